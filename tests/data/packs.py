"""Folders of small pictures, and the command that packs them."""

import subprocess
import sys

import mxnet as mx
import numpy as np
from PIL import Image

from gluon_esgd.data.framing import content, scan

from ..pool import environment

COLOURS = {"blue": (20, 40, 200), "green sea": (30, 190, 90), "réd": (210, 30, 40)}
FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "bmp": "BMP", "webp": "WEBP"}
FILES = ["train.rec", "train.idx", "val.rec", "val.idx", "classes.txt", "packed.json"]


def draw(path, colour=(9, 99, 199), size=(20, 16), mode="RGB", **how):
    """Write a picture that is all of one colour, but for one pixel that makes it unique."""
    image = Image.new("RGB", size, colour)
    image.putpixel((0, 0), tuple(np.random.RandomState(len(str(path))).randint(0, 255, 3)))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path, FORMATS[path.suffix[1:].lower()], **how)


def colours(root, count, suffix=".jpg"):
    for name, colour in COLOURS.items():
        for i in range(count):
            draw(root / name / f"{i}{suffix}", colour)
    return root


def command(*argv, code=0, timeout=100):
    done = subprocess.run(
        [sys.executable, "-m", "gluon_esgd.cli", "data", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(path_rec):
    """(header, image) of each record of a file, as MXNet unpacks it."""
    data = path_rec.read_bytes()
    return [mx.recordio.unpack(content(data, begin)) for _, begin, _ in scan(data).records]
