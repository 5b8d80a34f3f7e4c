"""The integers under which vectors lie in the store, and what a push to each of them means.

MXNet puts key k on server ``k * 9973 mod num_servers``, so keys whose distance is a multiple of
the number of servers are neighbours. The three keys of a chunk are: what is pushed to one moves
what lies under another.
"""

from __future__ import annotations

from typing import List

__all__ = ["CENTER", "PLAIN", "STEP", "Keys", "span_of"]

# CENTER: holds a chunk in float32; what arrives is added as it is.
# STEP: what arrives, in whatever type, moves the chunk by an outer step; answers with the chunk.
# PLAIN: the same, but what arrives is added as it is.
CENTER, STEP, PLAIN = 0, 1, 2

_LIMIT = 70_000  # 3 * 70,000 * 9973 is below 2**31: MXNet multiplies in C integers


def span_of(num_servers: int) -> int:
    """Return the distance between the keys of a chunk: ``kind, index = divmod(key, span)``."""
    return _LIMIT // num_servers * num_servers


class Keys:
    """Gives out keys; all agents of a job ask for the same, in the same order.

    Parameters
    ----------
    num_servers : int
    """

    def __init__(self, num_servers: int) -> None:
        self._span, self._next = span_of(num_servers), 0

    def take(self, count: int) -> List[int]:
        """Return `count` keys of the kind CENTER that nobody has; consecutive.

        Raises
        ------
        ValueError
            When there are no more.
        """
        first, self._next = self._next, self._next + count
        if self._next > self._span:
            raise ValueError(
                f"{self._next} chunks of vectors were attached in this job, {self._span} at most: "
                "parameters that change between trained and frozen take new ones each time"
            )
        return list(range(first, self._next))

    def of_kind(self, kind: int, key: int) -> int:
        """Return the key of `kind` for the chunk that lies under CENTER key `key`."""
        return kind * self._span + key
