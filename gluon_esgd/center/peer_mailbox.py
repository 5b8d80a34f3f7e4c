r"""The center without servers: each leader holds it whole, and together they move it.

The synchronous form of elastic averaging (Zhang, Choromanska, LeCun, arXiv 1412.6651, equations 5
and 6): with weights :math:`x_i` of client :math:`i` and the center :math:`c`

.. math:: d_i = \alpha (x_i - c), \qquad x_i \leftarrow x_i - d_i, \qquad
    c \leftarrow c + \sum_i d_i

The sum is an allreduce over the leaders. All of them add the same bits to the same bits, so they
need not compare their centers; but all must exchange equally often.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ..collectives import Plan, plan, shared_array
from ..communicator import Communicator
from ..errors import CenterError, CollectiveError
from ..optim.outer import Outer, outer_update
from .difference import center_difference, distance_to, is_finite
from .layout import check_out, checked_kinds, chunk_range, kind_spans

if TYPE_CHECKING:
    from .peers import PeerLink

__all__ = ["PeerMailbox", "center_errors"]


@contextmanager
def center_errors() -> Iterator[None]:
    """What fails among leaders is to a trainer a center that cannot be reached."""
    try:
        yield
    except CollectiveError as error:
        raise CenterError(str(error)) from error


class PeerMailbox:
    """One trainer's flat weights and its center; `PeerLink.attach` makes it.

    `seed`, `start_exchange`, `reduce` and ``pull(sync=True)`` are collective over the leaders of
    all clients and raise CenterError on those that wait past the limit, naming who is missing,
    and on those that meet another call; the others are this leader's own and wait for nobody.

    Attributes
    ----------
    x : ndarray of float32, shape (n,)
        The leader writes its weights here. `reduce` sums in place; an exchange uses them up.
    """

    def __init__(
        self,
        link: PeerLink,
        leaders: Communicator,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        exact: Sequence[bool],
        outer: Outer,
    ) -> None:
        n = sum(sizes)
        self.name = name
        self.x: np.ndarray = shared_array(n, np.float32, leaders)
        self._link, self._leaders = link, leaders
        self._sizes, self._chunks, self._outer = list(sizes), list(chunks), outer
        self._exact = list(exact)
        self._plans: Dict[Tuple[int, int], List[Plan]] = {}
        self._center = np.zeros(0, np.float32)  # under rule 'sgd' there is none
        self._shift = self._velocity = self._center
        self._closed = False
        self.in_flight = False
        self.distance = 0.0
        self.center_version = 0
        self.bytes_moved = 0

    def seed(self, seeder: bool, out: np.ndarray, resumed: bool = False) -> bool:
        """Make the seeder's x the center and fetch it; all leaders call it.

        A second call replaces the center and stops it, where it has momentum.

        Parameters
        ----------
        seeder : bool
            True on exactly one client.
        out : ndarray of float32, shape (n,)
            Receives the center.
        """
        check_out(out, self.x.size)
        self._check_idle("seed")
        what = f"the seed of '{self.name}'"
        flags = self._link.gather(bool(seeder), what)
        seeders = [client for client, flag in enumerate(flags) if flag]
        if len(seeders) != 1:
            raise CenterError(f"seeder: one client must be it, but clients {seeders} are")
        self._center = self.x.copy()
        with center_errors():
            plan("broadcast", self._center, self._leaders, root=seeders[0], what=what)()
        self._shift = np.empty_like(self._center)
        self._velocity = np.zeros(0 if self._outer.is_plain else self.x.size, np.float32)
        self.center_version += 1
        self.bytes_moved += self._center.nbytes
        np.copyto(out, self._center)
        return False

    def start_exchange(
        self, rule: str, alpha: float, kinds: np.ndarray, timeout_s: float = 0.0
    ) -> bool:
        """Exchange x with the center, together with all other clients; all leaders call it.

        It waits for them, up to their own limit, and returns True. What each kind of parameter
        does is as in `Mailbox.start_exchange`.

        Parameters
        ----------
        rule : str
            'esgd'.
        alpha : float
            Moving rate.
        kinds : ndarray of int, shape (number of parameters,)
            MOVED, AVERAGED or CARRIED for each parameter.
        """
        if rule != "esgd":
            raise ValueError(
                f"rule={rule!r} must be 'esgd': clients that go their own ways need a server; "
                "under 'sgd' call reduce()"
            )
        self._check_idle("start_exchange")
        kinds = checked_kinds(kinds, len(self._sizes))
        spans = kind_spans(self._sizes, kinds.tolist())
        x, center = self.x, self._center
        with np.errstate(all="ignore"):  # from weights that are lost; the distance tells
            self.distance = distance_to(center, x, spans)
            center_difference(rule, alpha, x, center, spans, out=x)
            if not is_finite(x):
                x[:] = 0  # the center takes nothing from weights that are lost
                self.distance = float("inf")
        np.negative(x, out=self._shift)
        self._sum(0, x.size, f"exchange {self.center_version} of '{self.name}'")
        self._move_center()
        self.center_version += 1
        self.in_flight = True
        return True

    def _move_center(self) -> None:
        """Add the differences of all clients, which lie in x, to the center."""
        for (start, stop), exact in zip(self._chunks, self._exact):
            here = slice(start, stop)
            if exact or self._outer.is_plain:
                self._center[here] += self.x[here]
            else:
                outer_update(self._center[here], self.x[here], self._velocity[here], self._outer)

    def collect(self, out: np.ndarray, timeout_s: float = 0.0) -> bool:
        """Fetch the shift ``-d`` of the exchange in flight, which is never late: return True.

        Parameters
        ----------
        out : ndarray of float32, shape (n,)
            Receives what the caller adds to its MOVED weights.
        timeout_s : float
            Of no use here: `start_exchange` has waited.
        """
        check_out(out, self.x.size)
        if not self.in_flight:
            raise RuntimeError("collect() needs an exchange in flight: call start_exchange() first")
        np.copyto(out, self._shift)
        self.in_flight = False
        return True

    def pull(self, out: np.ndarray, sync: bool = False, *, limit_s: Optional[float] = None) -> None:
        """Copy the center as it is now, which is on this leader, into `out`.

        Parameters
        ----------
        out : ndarray of float32, shape (n,)
        sync : bool, default False
            If True all leaders call it, and CenterError is raised on all of them where some have
            exchanged more often than others.
        limit_s : float, optional
            Of no use here: there are no servers.
        """
        check_out(out, self.x.size)
        self._check_idle("pull")
        if sync:
            versions = self._link.gather(self.center_version, f"a pull of '{self.name}'")
            if len(set(versions)) > 1:
                raise CenterError(
                    f"the clients have made {[v - 1 for v in versions]} exchanges of "
                    f"'{self.name}', by client: all must take equally many steps"
                )
        np.copyto(out, self._center)

    def last_center(self, out: np.ndarray) -> bool:
        """Copy the center into `out`, asking nobody; False if there is none."""
        check_out(out, self.x.size)
        if self.center_version:
            np.copyto(out, self._center)
        return self.center_version > 0

    def start_reduce(self, start: int, stop: int) -> Callable[[], None]:
        """Return what sums ``x[start:stop]`` over all clients, in place; all leaders call both.

        Nothing is under way before that is called: MPI goes on only where somebody waits.

        Parameters
        ----------
        start, stop : int
            Must be made of whole chunks.
        """
        self._check_idle("reduce")
        chunk_range(self._chunks, start, stop)
        return lambda: self._sum(start, stop, f"the sum of '{self.name}' [{start}, {stop})")

    def reduce(self, start: int, stop: int) -> None:
        """Sum ``x[start:stop]`` over all clients, in place; all leaders call it in one order."""
        self.start_reduce(start, stop)()

    def _sum(self, start: int, stop: int, what: str) -> None:
        with center_errors():
            if (start, stop) not in self._plans:
                self._plans[start, stop] = [
                    plan("allreduce", self.x[a:b], self._leaders, what=what, compression=wire)
                    for a, b, wire in self._runs(start, stop)
                ]
            for each in self._plans[start, stop]:
                each(what)
        self.bytes_moved += self.x[start:stop].nbytes

    def _runs(self, start: int, stop: int) -> List[Tuple[int, int, Optional[str]]]:
        """Cut ``[start, stop)`` where floats begin to travel in another form."""
        runs: List[Tuple[int, int, Optional[str]]] = []
        first, last = chunk_range(self._chunks, start, stop)
        for (a, b), exact in list(zip(self._chunks, self._exact))[first:last]:
            wire = None if exact else self._link.compression
            if runs and runs[-1][2] == wire:
                a = runs.pop()[0]
            runs.append((a, b, wire))
        return runs

    def close(self) -> None:
        """Forget the center. Idempotent; not collective."""
        self._link.forget(self)
        self._plans.clear()
        self._closed, self.in_flight = True, False

    def _check_idle(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}() of '{self.name}', which is closed; attach() a new one")
        if self.in_flight:
            raise RuntimeError(
                f"{what}() of '{self.name}' while an exchange is in flight; collect() it first"
            )
