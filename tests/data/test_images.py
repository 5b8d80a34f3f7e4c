import gzip
import struct
import sys

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401 (sets environment variables: not in a test)

from gluon_esgd.data import images as module
from gluon_esgd.data import load_images

NAMES = module._FILES


def write(folder, name, array, suffix=""):
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    (folder / (name + suffix)).write_bytes(gzip.compress(raw) if suffix == ".gz" else raw)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "clothes"
    place.mkdir()
    for name, count in ((NAMES[0], 5), (NAMES[2], 3)):
        write(place, name, np.arange(count * 6, dtype="u1").reshape(count, 2, 3), ".gz")
    write(place, NAMES[1], np.array([0, 1, 2, 3, 4], "u1"))
    write(place, NAMES[3], np.array([0, 1, 2], "u1"))
    return place


@pytest.fixture
def no_debian(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_DEBIAN", (str(tmp_path / "none"),))
    monkeypatch.setattr(module, "data_dir", lambda: str(tmp_path / "mxnet"))


def test_a_folder_gives_what_its_files_hold(folder):
    data = load_images(str(folder))
    assert (data.name, data.source, data.num_classes) == ("clothes", str(folder), 5)
    assert data.train_images.shape == (5, 2, 3) and data.test_images.shape == (3, 2, 3)
    assert data.train_images.dtype == np.uint8 and data.train_labels.dtype == np.int32
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4]


def test_names_with_a_dot_are_the_same(folder):
    (folder / NAMES[1]).rename(folder / "train-labels.idx1-ubyte")
    assert len(load_images(str(folder)).train_labels) == 5


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_file_is_named(folder, missing):
    next(folder.glob(missing + "*")).unlink()
    with pytest.raises(ValueError, match=f"has no {missing} "):
        load_images(str(folder))


def test_files_of_two_sets_are_refused(folder):
    write(folder, NAMES[1], np.zeros(4, "u1"))
    with pytest.raises(ValueError, match=r"5 pictures, .* 4 labels: the files are not of one set"):
        load_images(str(folder))


def test_labels_in_place_of_pictures_are_refused(folder):
    write(folder, NAMES[2], np.zeros(3, "u1"), ".gz")
    with pytest.raises(ValueError, match="not uint8 pictures"):
        load_images(str(folder))
    write(folder, NAMES[2], np.zeros((3, 2, 3), "u1"), ".gz")
    write(folder, NAMES[3], np.zeros((3, 1), "u1"))
    with pytest.raises(ValueError, match="not uint8 labels"):
        load_images(str(folder))


def test_an_empty_set_is_refused(folder):
    write(folder, NAMES[2], np.zeros((0, 2, 3), "u1"), ".gz")
    write(folder, NAMES[3], np.zeros(0, "u1"))
    with pytest.raises(ValueError, match="0 pictures"):
        load_images(str(folder))


def test_the_order_of_places(no_debian, monkeypatch, folder, tmp_path):
    assert load_images().name == "digits"
    mxnet_place = tmp_path / "mxnet" / "datasets" / "fashion-mnist"
    mxnet_place.mkdir(parents=True)
    for file in folder.iterdir():
        (mxnet_place / file.name).write_bytes(file.read_bytes())
    data = load_images()
    assert (data.name, data.source) == ("Fashion-MNIST", str(mxnet_place))
    next(mxnet_place.glob(NAMES[3] + "*")).unlink()  # a broken-off download is passed over
    assert load_images().name == "digits"
    monkeypatch.setattr(module, "_DEBIAN", (str(folder),))
    assert load_images().source == str(folder)


def test_digits_are_split_alike_each_time(no_debian):
    one, two = load_images(), load_images()
    assert len(one.train_images) + len(one.test_images) == 1797
    assert one.train_images.shape[1:] == (8, 8) and one.num_classes == 10
    assert one.train_images.dtype == np.uint8 and one.train_images.max() == 255
    np.testing.assert_array_equal(one.train_images, two.train_images)
    assert set(one.test_labels) == set(one.train_labels) == set(range(10))


def test_nothing_found_says_what_to_do(no_debian, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RuntimeError, match="dataset-fashion-mnist, or scikit-learn"):
        load_images()
