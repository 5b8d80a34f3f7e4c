"""What a reduction does with the vectors of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Optional

import numpy as np

__all__ = [
    "COMPRESSIONS",
    "DTYPES",
    "OPERATIONS",
    "TAIL",
    "WIDE",
    "Operation",
    "accumulator",
    "divide_by_weight",
    "silence",
]

DTYPES = ("float16", "float32", "float64", "int32", "int64")
# What may be compressed on its way, and to what.
WIDE, COMPRESSIONS = ("float32", "float64"), ("fp16",)

TAIL = 2
"""Numbers behind a vector of ``weighted_mean``: its weight, and how many ranks had an error."""


@dataclass(frozen=True)
class Operation:
    """A reduction: `combine` all vectors in a fixed order, then divide.

    Attributes
    ----------
    name : str
    combine : numpy.ufunc
    divides : bool
        Whether the result is divided: by the number of vectors, or, where the vectors
        have a tail, by the sum of the weights in it.
    tail : int
        Elements at the end of the vector that are added up and not divided; the first
        of them is the weight.
    """

    name: str
    combine: np.ufunc
    divides: bool = False
    tail: int = 0

    @property
    def bare(self) -> Operation:
        """The same without the division, over all elements."""
        return replace(self, divides=False, tail=0)

    def divisor(self, count: int, tail: Optional[Any] = None) -> Optional[float]:
        """Return what to divide by: None for nothing.

        Parameters
        ----------
        count : int
            Vectors in all.
        tail : ndarray, shape (tail,), optional
            The sum of all tails, where there are tails.
        """
        if not self.divides:
            return None
        return float(tail[0]) if self.tail and tail is not None else float(count)

    def divide(self, block: Any, divisor: Optional[float]) -> None:
        """Divide `block` in place; zeros where there was no weight, integers rounded down."""
        if divisor is None:
            return
        if divisor == 0:
            block[:] = 0
        elif block.dtype.kind == "f":
            block /= block.dtype.type(divisor)
        else:
            block //= block.dtype.type(divisor)

    def finish(self, array: Any, count: int) -> None:
        """Divide a whole vector of sums, its tail left out."""
        end = array.size - self.tail
        self.divide(array[:end], self.divisor(count, array[end:] if self.tail else None))


OPERATIONS = {
    op.name: op
    for op in (
        Operation("sum", np.add),
        Operation("mean", np.add, divides=True),
        Operation("min", np.minimum),
        Operation("max", np.maximum),
        Operation("weighted_mean", np.add, divides=True, tail=TAIL),
        Operation("weighted_sum", np.add, tail=TAIL),
    )
}


def divide_by_weight(array: Any) -> None:
    """Make a `weighted_mean` of a `weighted_sum`; in place, on this rank alone."""
    OPERATIONS["weighted_mean"].finish(array, 0)


def accumulator(dtype: Any) -> np.dtype:
    """Return the type in which vectors of `dtype` are added up."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


# NaN and inf travel unchanged, and what comes of them is not worth a warning. In numpy 1
# `errstate` takes two microseconds, its parts a tenth of that.
if np.lib.NumpyVersion(np.__version__) < "2.0.0":
    from numpy.core.umath import geterrobj, seterrobj  # type: ignore[attr-defined]

    def silence() -> Callable[[], object]:
        """Let arithmetic of this thread say nothing; return what undoes it."""
        before = geterrobj()
        seterrobj(_SILENT)
        return partial(seterrobj, before)

    _SILENT = [*geterrobj()[:1], 0, None]

else:

    def silence() -> Callable[[], object]:
        """Let arithmetic of this thread say nothing; return what undoes it."""
        return partial(np.seterr, **np.seterr(all="ignore"))
