"""Class folders of real JPEG files, from what Debian has: for `gluon-esgd data` and the recipe.

    python benchmarks/pictures.py clipart DIR    # 10 classes of openclipart-png, some 3,000 files
    python benchmarks/pictures.py fashion DIR    # dataset-fashion-mnist: train/ and val/, 70,000

Drawings come on white, with their shorter side at 96 pixels; clothes as 28 by 28 in grey. Neither
is ImageNet, and no accuracy on them says anything about it. Needs Pillow.
"""

import argparse
import warnings
from pathlib import Path
from typing import Callable, Dict, Iterator, Tuple

import numpy as np
from PIL import Image

from gluon_esgd.data import load_images

_Raw = argparse.RawDescriptionHelpFormatter
CLIPART = Path("/usr/share/openclipart/png")
CLASSES = (
    *("animals", "computer", "food", "geography", "office"),
    *("people", "recreation", "shapes", "tools", "transportation"),
)
MOST, SIDE = 400, 96  # files of a class, pixels
LARGEST = 4_000_000  # pixels of a drawing
Image.MAX_IMAGE_PIXELS = None  # nothing here comes from strangers


def clipart() -> Iterator[Tuple[Path, Image.Image]]:
    """Yield where each drawing goes, and the drawing."""
    for name in CLASSES:
        files = sorted((CLIPART / name).rglob("*.png"))
        order = np.random.RandomState(0).permutation(len(files))[:MOST]
        for number, path in enumerate(files[i] for i in order):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of size, and of palettes with transparency
                drawing = Image.open(path)
                if drawing.width * drawing.height > LARGEST:
                    continue
                drawing = drawing.convert("RGBA")
            page = Image.new("RGB", drawing.size, "white")
            page.paste(drawing, mask=drawing.getchannel("A"))
            scale = SIDE / min(page.size)
            size = tuple(max(SIDE, min(4 * SIDE, round(side * scale))) for side in page.size)
            yield Path(name, f"{number:04}.jpg"), page.resize(size, Image.Resampling.LANCZOS)


def fashion() -> Iterator[Tuple[Path, Image.Image]]:
    """Yield where each piece of clothing goes, and its picture."""
    images = load_images()
    if images.name != "Fashion-MNIST":
        raise SystemExit("Fashion-MNIST is not here (Debian: dataset-fashion-mnist)")
    for part, pixels, labels in (
        ("train", images.train_images, images.train_labels),
        ("val", images.test_images, images.test_labels),
    ):
        for number, (picture, label) in enumerate(zip(pixels, labels)):
            yield Path(part, str(label), f"{number:05}.jpg"), Image.fromarray(picture)


SETS: Dict[str, Callable[[], Iterator[Tuple[Path, Image.Image]]]] = {
    "clipart": clipart,
    "fashion": fashion,
}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    count = 0
    for path, picture in SETS[args.set]():
        target = args.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.save(target, quality=95)
        count += 1
    print(f"{count:,} files in {args.folder}")


if __name__ == "__main__":
    main()
