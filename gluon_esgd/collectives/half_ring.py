"""A ring on which vectors travel as half floats between machines, and are added up as they are.

While parts are reduced, what goes to another machine is rounded, and added to what lies there in
the type of the vector. The owner of a finished part rounds it too, keeps the rounded values, and
sends the message on its way; everybody passes it on as it came, so all ranks have the same bits.
So a part is rounded each time that it comes to another machine on its way, and once in the end:
``N`` times over ``N`` machines of a rank each, and once more at most where ranks of a machine
follow each other.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import numpy as np

from ..communicator import Communicator
from .flow import UNDER_WAY, Flow
from .half_floats import HalfFloats, Message, largest_message
from .operations import Operation
from .parts import blocks, part

__all__ = ["HalfRing"]

# Pieces in which a part travels, so that rounding one overlaps sending the one before.
_PIECE = 1 << 17


class _Piece(NamedTuple):
    """Some elements of the vector, the last `exact` of which are never rounded."""

    values: np.ndarray
    exact: int


class HalfRing:
    """As `Ring`, between machines in half floats.

    Parameters
    ----------
    array : ndarray of float32 or float64, shape (n,)
    comm : Communicator
    op : Operation
        Its division is not made here; its tail is never rounded.
    """

    def __init__(self, array: np.ndarray, comm: Communicator, op: Operation) -> None:
        self._comm, self._op, self._dtype = comm, op, array.dtype
        self._half_floats = HalfFloats(array.dtype)
        self._parts = [_cut(array, rank, comm.size, op.tail) for rank in range(comm.size)]
        rank, n = comm.rank, comm.size
        self._goes_far = _is_far(comm, rank, (rank + 1) % n)
        self._comes_far = _is_far(comm, (rank - 1) % n, rank)
        longest = max(sum(map(self._room, pieces)) for pieces in self._parts)
        # Messages of the part that goes and of the one that comes, in turn.
        self._rooms = np.empty((2, longest), np.uint8)
        widest = max((piece.values.size for pieces in self._parts for piece in pieces), default=0)
        widest = 0 if self._comes_far else widest  # where what comes in full waits to be added
        self._spare = np.empty((UNDER_WAY, widest), array.dtype)

    def reduce_scatter(self, what: str) -> None:
        """Reduce each rank's own part on it; the others are left with what passed through."""
        rank, n = self._comm.rank, self._comm.size
        for step in range(n - 1):
            sent, received = self._parts[(rank - step - 1) % n], self._parts[(rank - step - 2) % n]
            self._reduce(what, sent, received)

    def allgather(self, what: str) -> None:
        """Give every rank the parts that the others own, as their owners round them."""
        rank, n = self._comm.rank, self._comm.size
        messages = self._messages(self._parts[rank], self._rooms[0])
        for step in range(n - 1):
            received = self._parts[(rank - step - 1) % n]
            places = self._messages(received, self._rooms[(step + 1) % 2])
            own = self._parts[rank] if step == 0 else None
            self._pass_on(what, messages, own, places, received)
            messages = places

    def _reduce(self, what: str, sent: List[_Piece], received: List[_Piece]) -> None:
        out, places = self._messages(sent, self._rooms[0]), self._messages(received, self._rooms[1])
        spare = [self._spare[i % UNDER_WAY][: p.values.size] for i, p in enumerate(received)]

        def give(i: int) -> np.ndarray:
            if not self._goes_far:
                return sent[i].values
            self._half_floats.write(sent[i].values, out[i])
            return out[i].buffer

        def take(i: int) -> None:
            values = received[i].values
            if self._comes_far:
                self._half_floats.read(places[i], values, self._op.combine)
            else:
                self._op.combine(spare[i], values, out=values)

        def place(i: int) -> np.ndarray:
            return places[i].buffer if self._comes_far else spare[i]

        Flow(len(sent), give, len(received), place, take).run(self._comm, what)

    def _pass_on(
        self,
        what: str,
        messages: List[Message],
        own: Optional[List[_Piece]],
        places: List[Message],
        received: List[_Piece],
    ) -> None:
        """Send `messages`, of what is rounded only now where it is `own`, and read others."""

        def give(i: int) -> np.ndarray:
            if own is not None:
                self._half_floats.write(own[i].values, messages[i])
                self._half_floats.read(messages[i], own[i].values)
            return messages[i].buffer

        def take(i: int) -> None:
            self._half_floats.read(places[i], received[i].values)

        flow = Flow(len(messages), give, len(places), lambda i: places[i].buffer, take)
        flow.run(self._comm, what)

    def _room(self, piece: _Piece) -> int:
        """The bytes of a piece's message, and of what keeps the next one aligned."""
        nbytes = largest_message(piece.values.size, piece.exact, self._dtype)
        return -(-nbytes // self._dtype.itemsize) * self._dtype.itemsize

    def _messages(self, pieces: List[_Piece], room: np.ndarray) -> List[Message]:
        """Lay the messages of a part into `room`."""
        starts = np.cumsum([0, *map(self._room, pieces)])
        return [
            Message.over(room[start:], piece.values.size, piece.exact, self._dtype)
            for start, piece in zip(starts, pieces)
        ]


def _cut(array: np.ndarray, index: int, count: int, tail: int) -> List[_Piece]:
    """Part `index` of `count` in pieces; those that reach into the tail keep it exact."""
    end = array.size - tail
    return [
        _Piece(array[a:b], min(max(0, b - end), b - a))
        for a, b in blocks(part(array.size, index, count), _PIECE)
    ]


def _is_far(comm: Communicator, rank: int, other: int) -> bool:
    """Whether two ranks are on different machines."""
    return not any(rank in ranks and other in ranks for ranks in comm.nodes)
