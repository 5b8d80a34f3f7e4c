"""Soft labels are probabilities, and mixing keeps them so."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_esgd.vision import mixup, soft_labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_labels(smoothing: float) -> None:
    target = soft_labels(mx.nd.array([2, 0]), 5, smoothing).asnumpy()
    assert target.dtype == np.float32
    assert target.sum(axis=1) == pytest.approx([1, 1])
    assert target[0, 2] == target[1, 0] == pytest.approx(1 - smoothing * 4 / 5)
    assert target[0, 0] == target[1, 4] == pytest.approx(smoothing / 5)


def test_without_smoothing_the_loss_is_that_of_classes() -> None:
    scores, label = mx.nd.random.normal(shape=(4, 5)), mx.nd.array([0, 3, 2, 4])
    sure = gluon.loss.SoftmaxCrossEntropyLoss()(scores, label)
    soft = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)(scores, soft_labels(label, 5))
    assert soft.asnumpy() == pytest.approx(sure.asnumpy(), rel=1e-6)


def test_mixup_mixes_pictures_as_it_mixes_labels() -> None:
    np.random.seed(1)
    data, target = mx.nd.array(np.eye(4)[:, :, None]), soft_labels(mx.nd.arange(4), 4)
    shares = set()
    for _ in range(3):
        mixed, labels = mixup(data, target, 0.3)
        assert (mixed.asnumpy()[:, :, 0] == labels.asnumpy()).all()
        assert labels.asnumpy().sum(axis=1) == pytest.approx(np.ones(4))
        assert labels.asnumpy()[0, 3] == pytest.approx(1 - labels.asnumpy()[0, 0])
        shares.add(float(labels.asnumpy()[0, 0]))
    assert len(shares) == 3, "one share a batch"


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match=r"smoothing=1\.0 must be from 0 to below 1"):
        soft_labels(mx.nd.zeros(1), 3, 1.0)
    with pytest.raises(ValueError, match="alpha=0 must be above 0"):
        mixup(mx.nd.zeros(1), mx.nd.zeros(1), 0)
