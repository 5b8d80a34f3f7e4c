"""What tests of packing share."""

import pytest

from gluon_esgd.data import packing

from .pictures import InThisProcess


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(packing, "PicturePool", InThisProcess)
