"""The leader's side of one trainer's center: snapshot in, center and shift out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, Optional

import numpy as np

from .layout import check_out, checked_kinds, chunk_range
from .memory import Memory

__all__ = ["Mailbox"]


class Mailbox(ABC):
    """One trainer's flat weights and its center; the link's `attach` makes it.

    No method waits longer than its limit. `seed`, ``pull(sync=True)`` and `start_reduce` are
    collective over the leaders of all clients, the others are this leader's own. Which agent
    they ask, and what becomes of a call when that agent is lost, is the business of the two kinds:
    `DirectMailbox` raises CenterError, `GenerationMailbox` goes on with the next generation.

    Attributes
    ----------
    x : ndarray of float32, shape (n,)
        The leader writes its weights here. The agent reads them from the start of an exchange
        to its end; `start_reduce` sums in place.
    """

    def __init__(self, name: str, memory: Memory, sync: bool) -> None:
        self.name = name
        self.x = memory.x
        self._memory, self._sync = memory, sync
        self._serial = 0  # of the last exchange
        self._is_closed = False

    @property
    @abstractmethod
    def in_flight(self) -> bool:
        """Whether an exchange was started and its shift not yet collected."""

    @property
    def distance(self) -> float:
        """L2 norm of x minus center over the moved parameters at the last exchange.

        Not finite where the difference was not, or was over what half floats hold, if it had
        to travel in them: nothing reached the center then.
        """
        return self._memory.distance

    @property
    def center_version(self) -> int:
        """How many whole centers have arrived here."""
        return self._memory.version

    @property
    def bytes_moved(self) -> int:
        """Bytes pushed to and pulled from the servers for this trainer."""
        return self._memory.moved_bytes

    @property
    def base(self) -> np.ndarray:
        """A copy of the center from which ``asgd`` counts the caller's changes."""
        return self._memory.base.copy()

    def count_from(self, base: np.ndarray) -> None:
        """Let ``asgd`` count the caller's changes from `base` on, which must not be in flight.

        Parameters
        ----------
        base : ndarray of float32, shape (n,)
        """
        self._check_idle("count_from")
        np.copyto(self._memory.base, base)

    def seed(self, seeder: bool, out: np.ndarray, resumed: bool = False) -> bool:
        """Make the seeder's x the center and fetch it; all leaders call it.

        `out` and the center are x to the bit on all clients, also where a second call replaces
        another center.

        Parameters
        ----------
        seeder : bool
            True on exactly one client.
        out : ndarray of float32, shape (n,)
            Receives the center.
        resumed : bool, default False
            True says that x is a center that was saved. Where it is not, and clients begin with a
            center that a job before them left on disk, that one is taken in place of x.

        Returns
        -------
        bool
            Whether the center was there before, which only happens with generations, to a client
            that comes back: it has taken that center, and x moved nothing.

        Raises
        ------
        CenterError
            On all clients if their contracts differ, naming each differing entry with the
            values; on those that wait longer than the link's ``start_timeout_s``.
        """
        check_out(out, self.x.size)
        self._check_idle("seed")
        joined = self._seed(bool(seeder), resumed)
        self._memory.copy_center(out)
        return joined

    @abstractmethod
    def _seed(self, seeder: bool, resumed: bool) -> bool: ...

    def start_exchange(
        self, rule: str, alpha: float, kinds: np.ndarray, timeout_s: float = 0.0
    ) -> bool:
        """Start an exchange of x with the center; returns at once where there is one.

        ========  ==================================  ==============================
        kind      ``esgd``: pull c, push d            ``asgd``: push d, pull c
        ========  ==================================  ==============================
        MOVED     ``d = alpha * (x - c)``             ``d = x - base``
        AVERAGED  ``d = alpha * (x - c)``             ``d = alpha * (x - base)``
        CARRIED   ``d = 0``                           ``d = 0``
        ========  ==================================  ==============================

        ``base`` is the center from which the caller's weights grew: that of the last ``asgd``
        exchange, `seed` or ``pull(rebase=True)``. A plain `pull` only looks.

        Parameters
        ----------
        rule : str
            'esgd' or 'asgd'.
        alpha : float
            Moving rate.
        kinds : ndarray of int, shape (number of parameters,)
            MOVED, AVERAGED or CARRIED for each parameter.
        timeout_s : float, default 0
            How long to wait for a generation of servers, where there is none at the moment.

        Returns
        -------
        bool
            False where there was none: nothing is in flight.

        Raises
        ------
        RuntimeError
            If an exchange is in flight or the mailbox is closed; `seed`, `pull` and `reduce` too.
        """
        if rule not in ("esgd", "asgd"):
            raise ValueError(f"rule={rule!r} must be 'esgd' or 'asgd'; under 'sgd' call reduce()")
        self._check_async("start_exchange")
        self._check_idle("start_exchange")
        self._memory.kinds[:] = checked_kinds(kinds, self._memory.sizes.size)
        self._serial += 1
        return self._start(rule, float(alpha), timeout_s)

    @abstractmethod
    def _start(self, rule: str, alpha: float, timeout_s: float) -> bool: ...

    def collect(self, out: np.ndarray, timeout_s: float) -> bool:
        """Wait for the exchange in flight; the servers have then acknowledged the push.

        Parameters
        ----------
        out : ndarray of float32, shape (n,)
            Receives the shift that the caller adds to its MOVED weights: ``-d`` for ``esgd``,
            ``c - x`` for ``asgd``.
        timeout_s : float
            Wait no longer than this; 0 looks only.

        Returns
        -------
        bool
            False if it is late: it stays in flight, call again.

        Raises
        ------
        RuntimeError
            If no exchange is in flight.
        CenterError
            If the agent is lost, or no answer came within the link's ``limit_s`` of the start.
        ExchangeLost
            With generations: the exchange was lost with its own. The caller's weights stay.
        """
        check_out(out, self.x.size)
        if not self.in_flight:
            raise RuntimeError("collect() needs an exchange in flight: call start_exchange() first")
        return self._collect(out, timeout_s)

    @abstractmethod
    def _collect(self, out: np.ndarray, timeout_s: float) -> bool: ...

    def pull(
        self,
        out: np.ndarray,
        sync: bool = False,
        rebase: bool = False,
        limit_s: Optional[float] = None,
    ) -> None:
        """Fetch the center as it is now.

        Parameters
        ----------
        out : ndarray of float32, shape (n,)
            Receives the center.
        sync : bool, default False
            If True all leaders call it, and all get the same version: no client goes on before
            all have pulled.
        rebase : bool, default False
            True says that the caller's weights now start from this center: ``asgd`` then
            counts their change from it. False only looks.
        limit_s : float, optional
            How long to wait for servers that are being replaced; the link's own limit unless
            given.

        Raises
        ------
        RuntimeError
            If an exchange is in flight, whose difference the pull would overwrite.
        CenterError
            If there is no answer within the link's ``limit_s``, with `sync` ``peers_limit_s``.
        """
        check_out(out, self.x.size)
        self._check_async("pull")
        self._check_idle("pull")
        self._pull(bool(sync), bool(rebase), limit_s)
        self._memory.copy_center(out)

    @abstractmethod
    def _pull(self, sync: bool, rebase: bool, limit_s: Optional[float]) -> None: ...

    def last_center(self, out: np.ndarray) -> bool:
        """Copy the last whole center into `out`, asking nobody; False if there is none."""
        check_out(out, self.x.size)
        return self._memory.copy_center(out)

    def start_reduce(self, start: int, stop: int) -> Callable[[], None]:
        """Start to sum ``x[start:stop]`` over all clients, in place.

        All leaders call it in one order. Several may be under way, of different parts of x.

        Parameters
        ----------
        start, stop : int
            Must be made of whole chunks.

        Returns
        -------
        callable
            To be called once, without arguments: it waits until ``x[start:stop]`` is the sum, and
            raises CenterError if it is not within the link's ``peers_limit_s`` of this call.

        Raises
        ------
        ValueError
            If the link is not ``sync``, or ``[start, stop)`` cuts a chunk.
        CenterError
            If there is nobody to ask within ``peers_limit_s``.
        """
        if not self._sync:
            raise ValueError("reduce() needs a link with sync=True (rule 'sgd')")
        self._check_idle("reduce")
        first, last = chunk_range(self._memory.chunks, int(start), int(stop))
        return self._start_reduce(first, last, f"the sum of '{self.name}' [{start}, {stop})")

    @abstractmethod
    def _start_reduce(self, first: int, last: int, what: str) -> Callable[[], None]: ...

    def reduce(self, start: int, stop: int) -> None:
        """Sum ``x[start:stop]`` over all clients, in place: `start_reduce`, and wait for it."""
        self.start_reduce(start, stop)()

    @abstractmethod
    def close(self) -> None:
        """Let the agent forget this mailbox; the center stays on the servers. Idempotent."""

    def _check_idle(self, what: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{what}() of '{self.name}', which is closed; attach() a new one")
        if self.in_flight:
            raise RuntimeError(
                f"{what}() of '{self.name}' while an exchange is in flight; collect() it first"
            )

    def _check_async(self, what: str) -> None:
        if self._sync:
            raise ValueError(
                f"{what}() needs a link with sync=False: under rule 'sgd' servers hand back sums "
                "and hold no center"
            )
