"""The work of a step, and how large known networks are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List

from ..errors import raise_faults
from .checks import number, whole

__all__ = ["MODELS", "Work"]

MODELS = {
    "alexnet": 61_100_840,
    "densenet121": 8_062_504,
    "inceptionv3": 23_869_000,
    "mobilenet1.0": 4_253_864,
    "mobilenetv2_1.0": 3_539_136,
    "resnet18_v1": 11_699_112,
    "resnet34_v1": 21_814_696,
    "resnet50_v1": 25_629_032,
    "resnet101_v1": 44_695_144,
    "resnet152_v1": 60_404_072,
    "resnet18_v2": 11_695_796,
    "resnet50_v2": 25_595_060,
    "squeezenet1.0": 1_248_424,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
"""Parameters of MXNet's model zoo with 1000 classes, running statistics included."""


@dataclass(frozen=True)
class Work:
    """What one worker computes in a step, and what has to travel.

    Attributes
    ----------
    parameter_bytes : float
        Of all parameters as float32, running statistics included: 4 for each.
    compute_s : float
        Of one step of one worker without communication, a nanosecond at least; measured with all
        workers of a host (of the machine, where hosts are pretended) at work.
    batch_size : int
        Samples of one worker in a step.
    samples_per_epoch : int
        Of all workers together; ImageNet's unless given.
    backward_share : float
        Of `compute_s`, during which gradients become ready.
    """

    parameter_bytes: float
    compute_s: float
    batch_size: int = 32
    samples_per_epoch: int = 1_281_167
    backward_share: float = 2 / 3

    def __post_init__(self) -> None:
        faults: List[str] = []
        number(faults, "parameter_bytes", self.parameter_bytes)
        number(faults, "compute_s", self.compute_s, 1e-9)
        whole(faults, "batch_size", self.batch_size, 1)
        whole(faults, "samples_per_epoch", self.samples_per_epoch, 1)
        number(faults, "backward_share", self.backward_share, 0.0, 1.0)
        raise_faults("work", faults)
