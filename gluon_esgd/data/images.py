"""Small sets of real pictures that are on the machine already; nothing is downloaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import numpy as np
from mxnet.base import data_dir

from .idx import read_idx

__all__ = ["ImageData", "load_images"]

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_DEBIAN = ("/usr/share/datasets/fashion-mnist", "/usr/share/dataset-fashion-mnist")


@dataclass(frozen=True)
class ImageData:
    """Pictures and labels of a training and a test set.

    Attributes
    ----------
    name : str
        What the set is called.
    train_images, test_images : ndarray of uint8, shape (samples, height, width)
    train_labels, test_labels : ndarray of int32, shape (samples,)
        Classes, from 0.
    source : str
        Where the pictures were read from.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + int(max(self.train_labels.max(), self.test_labels.max()))


def load_images(folder: Optional[str] = None) -> ImageData:
    """Return the first set of pictures that is found; never downloads.

    Parameters
    ----------
    folder : str, optional
        A folder with the four IDX files of MNIST or Fashion-MNIST, plain or packed
        with gzip. Unless given: Debian's package ``dataset-fashion-mnist``, then what
        MXNet's own downloader has stored, then scikit-learn's digits.

    Raises
    ------
    ValueError
        If a file is missing in `folder`, is broken, or does not fit its partner.
    RuntimeError
        If nothing was found and scikit-learn is not installed.
    """
    if folder is not None:
        return _from_folder(os.path.basename(os.path.abspath(folder)), folder)
    for place in (*_DEBIAN, os.path.join(data_dir(), "datasets", "fashion-mnist")):
        if len(_find(place)) == len(_FILES):
            return _from_folder("Fashion-MNIST", place)
    return _digits()


def _find(folder: str) -> Dict[str, str]:
    """Return the path of each IDX file that is in `folder`, by its plain name."""
    found: Dict[str, str] = {}
    for name in _FILES:
        for spelling in (name, name.replace("-idx", ".idx")):
            for path in (spelling, spelling + ".gz"):
                if os.path.isfile(os.path.join(folder, path)):
                    found.setdefault(name, os.path.join(folder, path))
    return found


def _from_folder(name: str, folder: str) -> ImageData:
    found = _find(folder)
    missing = [file for file in _FILES if file not in found]
    if missing:
        raise ValueError(
            f"{folder!r} has no {', '.join(missing)} (nor with .gz): name a folder with the "
            f"four IDX files of MNIST or Fashion-MNIST"
        )
    train, test = (
        _pair(found[images], found[labels]) for images, labels in (_FILES[:2], _FILES[2:])
    )
    return ImageData(name, *train, *test, folder)


def _pair(images_path: str, labels_path: str) -> Tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise ValueError(f"{images_path}: holds {images.dtype}{images.shape}, not uint8 pictures")
    if labels.ndim != 1 or labels.dtype != np.uint8:
        raise ValueError(f"{labels_path}: holds {labels.dtype}{labels.shape}, not uint8 labels")
    if not 0 < len(images) == len(labels):
        raise ValueError(
            f"{images_path} has {len(images)} pictures, {labels_path} {len(labels)} labels: "
            "the files are not of one set"
        )
    return images, labels.astype(np.int32)


def _digits() -> ImageData:
    """Return scikit-learn's digits: 1,797 pictures of 8 x 8, 360 of them to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RuntimeError(
            "no pictures found: name a folder of IDX files, install Debian's package "
            "dataset-fashion-mnist, or scikit-learn for its digits (pip install scikit-learn)"
        ) from error
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    images = (digits.images[order] * (255 / 16)).round().astype(np.uint8)
    labels = digits.target[order].astype(np.int32)
    return ImageData(
        "digits", images[:-360], labels[:-360], images[-360:], labels[-360:], "scikit-learn"
    )
