"""What a training on pictures needs of its data, wherever they come from."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Tuple

import mxnet as mx
from mxnet.gluon.data.vision import transforms as t

from ..topology import world

__all__ = [
    "MEAN",
    "STD",
    "Augmentation",
    "PictureData",
    "Reading",
    "input_rate",
    "middle",
    "normalize",
    "prepare",
    "reading_threads",
    "shorter_side",
]

# Of ImageNet's pictures, red, green and blue, 0 to 255.
MEAN = (123.68, 116.779, 103.939)
STD = (58.393, 57.12, 57.375)

Batches = Iterator[Tuple[mx.nd.NDArray, mx.nd.NDArray]]


@dataclass(frozen=True)
class PictureData:
    """Labelled pictures to train on and to validate with, shared among the workers.

    Attributes
    ----------
    name, source : str
        What they are, and where they were found.
    num_classes : int
    shape : tuple of int
        Channels, height and width of a sample, a float32 of about mean 0 and deviation 1.
    train_count, validation_count : int
        Pictures of the whole job.
    train : iterable of (NDArray, NDArray)
        This worker's batches of one epoch, as many on every worker. It has a length, and unless
        it is a ``DataLoader`` it is its own `sampler`.
    sampler : object
        What `TrainingState` wants of one: ``epoch``, ``set_epoch``, ``share_anew``.
    validation : callable
        Returns an iterator over this rank's part of the validation set: over the ranks of a client
        each picture comes once. Ranks may have unequal numbers of batches.
    """

    name: str
    source: str
    num_classes: int
    shape: Tuple[int, int, int]
    train_count: int
    validation_count: int
    train: Any
    sampler: Any
    validation: Callable[[], Batches]


@dataclass(frozen=True)
class Augmentation:
    """How training pictures are varied; the defaults are what reference recipes use for ImageNet.

    Parameters
    ----------
    area, aspect : tuple of float
        Smallest and largest share of a picture that a random crop takes, and its width to height.
    flip : bool
        Mirror half of the pictures.
    jitter : float
        Brightness, contrast and saturation change by at most this factor.
    pca_noise : float
        Deviation of the noise along the principal colours.
    """

    area: Tuple[float, float] = (0.08, 1.0)
    aspect: Tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    jitter: float = 0.4
    pca_noise: float = 0.1

    def reader_options(self) -> Dict[str, Any]:
        """Return the arguments for ``mx.io.ImageRecordIter``."""
        names = ("brightness", "contrast", "saturation")
        return {
            "random_resized_crop": True,
            "min_random_area": self.area[0],
            "max_random_area": self.area[1],
            "min_aspect_ratio": self.aspect[0],
            "max_aspect_ratio": self.aspect[1],
            "rand_mirror": self.flip,
            "pca_noise": self.pca_noise,
            **dict.fromkeys(names, self.jitter),
        }

    def transforms(self, size: int) -> Any:
        """Return the same for one picture of uint8, shape (height, width, 3), to `size` pixels."""
        steps = [t.RandomResizedCrop(size, scale=self.area, ratio=self.aspect)]
        steps += [t.RandomFlipLeftRight()] if self.flip else []
        steps += [t.RandomColorJitter(*[self.jitter] * 3)] if self.jitter else []
        steps += [t.RandomLighting(self.pca_noise)] if self.pca_noise else []
        return t.Compose(steps)


@dataclass(frozen=True)
class Reading:
    """How the pictures of files become batches; see `open_pictures`."""

    batch_size: int
    image_size: int
    seed: int
    threads: int
    augmentation: Augmentation

    @property
    def shape(self) -> Tuple[int, int, int]:
        """Channels, height and width."""
        return 3, self.image_size, self.image_size


def normalize(picture: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return a picture of uint8, (height, width, 3), as float32, (3, height, width)."""
    mean, std = (tuple(value / 255 for value in values) for values in (MEAN, STD))
    return mx.nd.image.normalize(mx.nd.image.to_tensor(picture), mean=mean, std=std)


def prepare(path: str, size: int = 224) -> mx.nd.NDArray:
    """Read a picture as a batch of one, as validation sees it.

    Parameters
    ----------
    path : str
        A JPEG, PNG or BMP file.
    size : int, default 224
        Pixels of each side: the middle of the picture with its shorter side at 8/7 of it.

    Returns
    -------
    NDArray of float32, shape (1, 3, size, size)
    """
    return normalize(middle(size)(mx.image.imread(path))).expand_dims(0)


def middle(size: int) -> Any:
    """Return the transform to the middle `size` pixels of a picture scaled to 8/7 of that."""
    return t.Compose([t.Resize(shorter_side(size), True), t.CenterCrop(size)])


def shorter_side(size: int) -> int:
    """Return to how many pixels the shorter side is scaled before the middle is cut: 256 to 224."""
    return size * 8 // 7


def input_rate(pictures: PictureData, limit_s: float = 2.0) -> float:
    """Read batches for `limit_s` seconds at most, without a network; return pictures per second.

    Of this rank, with all others doing the same. The epoch begins again afterwards. In a client
    that is started again nothing is read, and the rate is nan.
    """
    if world().settings.life > 0:
        return float("nan")
    batches, count, start = iter(pictures.train), 0, 0.0
    for data, _ in batches:
        data.wait_to_read()
        now = time.monotonic()
        if not start:  # the first one waits for files to be opened
            start = now
            continue
        count += len(data)
        if now - start > limit_s:
            break
    if pictures.sampler is not None:
        pictures.sampler.set_epoch(0)
    return count / (time.monotonic() - start) if count else float("nan")


def reading_threads() -> int:
    """Return the cores that this rank has for its input; those it is bound to are its own."""
    me, cores = world(), len(os.sched_getaffinity(0))
    if me.settings.bind == "cores":
        return cores
    ranks = me.machine_size
    if me.settings.places is not None:  # one for each rank of this MPI job
        places = me.settings.places.split(";")
        ranks = int(places[me.worker_rank if me.settings.is_split else me.rank].partition("/")[2])
    return max(1, cores // ranks)
