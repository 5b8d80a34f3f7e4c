"""Class folders: what is wrong with them is said before the run, on all ranks, with paths."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest

from gluon_esgd.vision import open_pictures
from gluon_esgd.vision.one_listing import _difference

from ..data.packs import draw
from ..data.pictures import png
from ..pool import Shape


def write(root: Path) -> Path:
    """Two classes; six pictures to train on, two to validate with."""
    for part, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for k in range(count):
                image = np.random.RandomState(k).randint(0, 255, (12, 12, 3)).astype("u1")
                (root / part / name / f"{k}.png").write_bytes(png(image))
    return root


def opened(roots: List[str]) -> Any:
    """What this rank is told of its own copy, or how many pictures it takes."""
    from gluon_esgd import world

    try:
        pictures = open_pictures(roots[world().rank], batch_size=1, image_size=8)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return pictures.train_count, len(pictures.train)


def less(root: Path) -> None:
    (root / "train" / "dog" / "1.png").unlink()


def cut(root: Path) -> None:
    path = root / "val" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:100])


def other_class(root: Path) -> None:
    shutil.copytree(root / "train" / "cat", root / "train" / "ant")


def records(root: Path) -> None:
    (root / "train.rec").touch()


def neither(root: Path) -> None:
    shutil.rmtree(root / "val")


def empty(root: Path) -> None:
    (root / "train" / "dog" / "2.png").write_bytes(b"")


OTHERS = "ranks see different pictures in "
DIFFERENT = [
    (less, f"{OTHERS}{{}}: rank 0 has 2 classes, 6 in train and 2 in val, rank 1 has 2 classes, "
     "5 in train and 2 in val; first, train/dog/1.png: "),
    (cut, "rank 1 has 2 classes, 6 in train and 2 in val; first, val/cat/0.png: "),
    (other_class, "rank 1 has 3 classes, 9 in train and 2 in val; first, there is no train/ant "
     "on rank 0. Give all ranks the same files"),
    (records, "class folders on rank 0, records on rank 1; give all ranks the same files"),
    (neither, "has folders, but not both train/ and val/"),
    (empty, "1 broken picture(s) in "),
]  # fmt: skip


@pytest.mark.mpi
def test_ranks_that_see_other_files_are_an_error_on_all(pools: Any, tmp_path: Path) -> None:
    pool = pools.get(Shape(2))
    copies = [write(tmp_path / "a"), write(tmp_path / "b")]
    assert pool.run(opened, [*map(str, copies)]) == [(6, 3)] * 2, "times may differ"
    for spoil, says in DIFFERENT:
        spoiled = tmp_path / spoil.__name__
        shutil.copytree(copies[0], spoiled)
        spoil(spoiled)
        said = pool.run(opened, [str(copies[0]), str(spoiled)])
        for text, root in zip(said, (copies[0], spoiled)):
            assert says.format(root) in text, spoil.__name__
    assert said[0].startswith("ValueError: rank 1: ") and "dog/2.png: is empty" in said[0]
    assert pool.run(opened, [*map(str, copies)]) == [(6, 3)] * 2, "nobody was left waiting"


def test_what_differs_is_said_with_sizes() -> None:
    both = {"cat/a": 1, "cat/b": 2000}
    said = _difference("val/cat", both, {"cat/a": 1}, 3)
    assert said == "val/cat/b: 2,000 bytes on rank 0, not there on rank 3"
    said = _difference("val/cat", both, {"cat/a": 0}, 1)
    assert said == "val/cat/a: 1 bytes on rank 0, 0 bytes on rank 1"


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda root: shutil.rmtree(root / "train" / "cat") or (root / "train/cat").mkdir(),
         "train/cat holds no picture"),
        (lambda root: (root / "val/dog").rename(root / "val/fox"),
         "val/fox: .* has no class of that name"),
        (empty, r"(?s)leave them out with gluon-esgd data --skip-broken:.*train/dog/2\.png: is em"),
        (lambda root: (root / "train/cat/x.png").symlink_to("nowhere"), "cat/x.png: cannot be l"),
    ],
)  # fmt: skip
def test_faults_before_the_run(tmp_path: Path, spoil: Callable[[Path], Any], says: str) -> None:
    spoil(write(tmp_path / "a"))
    with pytest.raises(ValueError, match=says):
        open_pictures(str(tmp_path / "a"), batch_size=1, image_size=8)


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda whole: b"no picture", "Decoding failed"),
        (lambda whole: whole[:-4], "a JPEG whose end is missing"),
        (lambda whole: whole.replace(b"\xff\xc4", b"\xff\xc5"), "Decoding failed"),
    ],
)
def test_a_broken_picture_is_named_when_it_is_read(
    tmp_path: Path, spoil: Callable[[bytes], bytes], says: str
) -> None:
    """MXNet alone fills up with grey what is missing, or keeps quiet."""
    path = write(tmp_path / "a") / "val" / "cat" / "1.jpg"
    draw(path)
    path.write_bytes(spoil(path.read_bytes()))
    pictures = open_pictures(str(tmp_path / "a"), batch_size=2, image_size=8)
    with pytest.raises(ValueError, match=rf"val/cat/1\.jpg: no image: .*{says}"):
        list(pictures.validation())
    assert len(list(pictures.train)) == 3
