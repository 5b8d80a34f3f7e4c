"""From measured steps to the constants of the model."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from .cluster import SHARES, Cluster, Constants
from .configuration import Configuration
from .prediction import predict
from .work import Work

__all__ = [
    "Calibration",
    "Measurement",
    "Residual",
    "calibrate",
    "compare",
    "read_constants",
    "read_measurements",
    "write_measurements",
]

_VERSION = 1
_OUTLIER = 0.2  # a row that is off by more counts by its distance, not by the square of it
_BETTER = 1e-9  # by so much a loss must fall, else it is rounding
_LEAST = 1e-7  # below which a cost in seconds, or a share, is as good as 0


@dataclass(frozen=True)
class Measurement:
    """What was measured of a configuration.

    Attributes
    ----------
    configuration : Configuration
    work : Work
    cluster : Cluster
        Its constants do not matter.
    step_s : float
        Seconds of a step, averaged over whole intervals.
    busiest_link_bytes : float, optional
        In a step, of the link that carries most, in the direction in which it does.
    """

    configuration: Configuration
    work: Work
    cluster: Cluster
    step_s: float
    busiest_link_bytes: Optional[float] = None

    def __post_init__(self) -> None:
        for name in ("step_s", "busiest_link_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"measurement: {name} {value!r} must be a number above 0")


@dataclass(frozen=True)
class Residual:
    """A measurement beside its prediction.

    Attributes
    ----------
    measurement : Measurement
    predicted_s, predicted_bytes : float
    """

    measurement: Measurement
    predicted_s: float
    predicted_bytes: float

    @property
    def step_error(self) -> float:
        """Predicted over measured step, less 1."""
        return self.predicted_s / self.measurement.step_s - 1

    @property
    def bytes_error(self) -> Optional[float]:
        """The same of the bytes; None where they were not measured."""
        measured = self.measurement.busiest_link_bytes
        return None if measured is None else self.predicted_bytes / measured - 1


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, and how well they explain the rows they were fitted to."""

    constants: Constants
    residuals: Tuple[Residual, ...]

    @property
    def largest_error(self) -> float:
        """Of the step times, relative, without sign."""
        return max(abs(residual.step_error) for residual in self.residuals)

    def on(self, cluster: Cluster) -> Cluster:
        """Return `cluster` with the fitted constants."""
        return replace(cluster, constants=self.constants)

    def write(self, path: str) -> None:
        """Write what `gluon-esgd plan --calibration` reads."""
        document = {
            "version": _VERSION,
            "constants": asdict(self.constants),
            "rows": len(self.residuals),
            "largest_error": self.largest_error,
        }
        Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def compare(
    measurements: Sequence[Measurement], constants: Optional[Constants] = None
) -> Tuple[Residual, ...]:
    """Predict what was measured, with `constants` or those of each row's cluster."""
    return tuple(_residual(row, constants or row.cluster.constants) for row in measurements)


def _residual(row: Measurement, constants: Constants) -> Residual:
    cluster = replace(row.cluster, constants=constants)
    told = predict(row.work, cluster, row.configuration)
    return Residual(row, told.step_s, told.busiest_link_bytes)


def calibrate(
    measurements: Sequence[Measurement],
    start: Optional[Constants] = None,
    fit: Sequence[str] = (),
) -> Calibration:
    """Fit constants to measured step times.

    Least squares of the logarithms of predicted over measured, so that short and long steps count
    alike; a row that is off by more than a fifth counts less (Huber, *Robust estimation of a
    location parameter*, 1964). The search goes along one constant after the other, in steps that
    become smaller. What the rows say nothing of stays where it was.

    Parameters
    ----------
    measurements : sequence of Measurement
        Better many kinds than many rows: each constant needs rows in which it matters.
    start : Constants, optional
        From where to search; the guesses unless given.
    fit : sequence of str
        Names of the constants to fit; all unless given.

    Raises
    ------
    ValueError
        No measurement, or a name that is none of a constant.
    """
    names = tuple(fit) or tuple(one.name for one in fields(Constants))
    strange = sorted({*names} - {one.name for one in fields(Constants)})
    if strange:
        raise ValueError(f"fit names {', '.join(strange)}, which Constants does not have")
    if not measurements:
        raise ValueError("measurements is empty: give at least one")

    def loss(constants: Constants) -> float:
        rows = compare(measurements, constants)
        return sum(_huber(math.log(r.predicted_s / r.measurement.step_s)) for r in rows)

    found = _descend(start or Constants(), names, loss)
    return Calibration(found, compare(measurements, found))


def _huber(error: float) -> float:
    far = abs(error)
    return far * far if far <= _OUTLIER else _OUTLIER * (2 * far - _OUTLIER)


def _descend(
    constants: Constants, names: Sequence[str], loss: Callable[[Constants], float]
) -> Constants:
    """Go down along one constant after the other, until steps of a half per cent do not help."""
    best, factor = loss(constants), 4.0
    while factor > 1.005:
        before = best
        for name in names:
            for change in (factor, 1 / factor):
                tried = _scaled(constants, name, change)
                value = loss(tried)
                if value < best * (1 - _BETTER):
                    constants, best = tried, value
                    break
        if best > before * (1 - 1e-3):
            factor = math.sqrt(factor)
    return constants


def _scaled(constants: Constants, name: str, factor: float) -> Constants:
    value = max(getattr(constants, name), _LEAST) * factor
    return replace(constants, **{name: min(value, 1.0) if name in SHARES else value})


def write_measurements(path: str, measurements: Sequence[Measurement]) -> None:
    """Write rows as JSON, for `read_measurements`."""
    rows = [asdict(row) for row in measurements]
    text = json.dumps({"version": _VERSION, "measurements": rows}, indent=2)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_measurements(path: str) -> List[Measurement]:
    """Read rows.

    Raises
    ------
    ValueError
        The file cannot be read, or a row is not what `write_measurements` writes.
    """
    return [
        _made(path, f"row {i}", _measurement, row)
        for i, row in enumerate(_part(path, "measurements", list))
    ]


def _measurement(row: Dict[str, Any]) -> Measurement:
    cluster = dict(row["cluster"], constants=Constants(**row["cluster"]["constants"]))
    return Measurement(
        Configuration(**row["configuration"]),
        Work(**row["work"]),
        Cluster(**cluster),
        row["step_s"],
        row.get("busiest_link_bytes"),
    )


def read_constants(path: str) -> Constants:
    """Read what `Calibration.write` wrote.

    Raises
    ------
    ValueError
        The file cannot be read, or names what is no constant.
    """
    return _made(path, "constants", lambda row: Constants(**row), _part(path, "constants", dict))


def _part(path: str, name: str, kind: type) -> Any:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path!r} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError(f"{path!r} is not of version {_VERSION} of gluon_esgd.predict")
    if not isinstance(document.get(name), kind):
        raise ValueError(f"{path!r} has no {name!r}")
    return document[name]


def _made(path: str, what: str, make: Callable[[Any], Any], row: Any) -> Any:
    try:
        return make(row)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path!r}: {what} is not what was written: {error}") from None
