"""The clients of a job, life after life: who failed, who starts again, whose place stays empty."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Optional, Sequence

from . import proc
from .child import Child
from .ending import Ending
from .state import Failure, first_failed_rank, missing_ranks, set_aside

__all__ = ["Lives", "Place", "Restarts"]

_LONGEST_PAUSE_S = 60.0
_LASTS_S = 60.0  # who has lived so long may start again at once
_LEFT_S = 10.0  # what cannot be killed within this time is not waited for


@dataclass(frozen=True)
class Restarts:
    """Who may be started again, and how often.

    Attributes
    ----------
    most : int
        For each client.
    whole : bool
        Whether all clients are then started again, since none can go on alone.
    least : int
        With how many clients the job goes on.
    """

    most: int
    whole: bool
    least: int


@dataclass
class Place:
    """The place of a client, or of all clients that are one MPI job.

    Attributes
    ----------
    number, clients : int
        Number of its first client, and how many it has.
    child : Child
        What started it, in this life.
    state : str
        "training", "ending", "restarting", "finished" or "empty".
    life, restarts : int
        How often it was started again, and how often because it had failed itself.
    in_a_row : int
        Failures of lives that did not last, the last one and those right before it.
    added : bool
        Whether it was added to the running job; the others do not depend on its start.
    """

    number: int
    clients: int
    child: Child
    since: float
    state: str = "training"
    life: int = 0
    restarts: int = 0
    in_a_row: int = 0
    started: bool = False
    added: bool = False
    again: bool = True
    due: float = 0.0
    ending: Optional[Ending] = field(default=None, repr=False)

    @property
    def numbers(self) -> range:
        """Its clients."""
        return range(self.number, self.number + self.clients)


class Lives:
    """Watches the clients and starts them again where that is wanted.

    Parameters
    ----------
    job_dir : str
        Folder of the job.
    client_size : int
        Ranks in each client.
    start_limit_s : float
        How long the ranks of a client may take to report their start.
    start : callable
        ``start(client, life)`` starts a client and returns the `Child`.
    drop : callable
        Called with a `Child` that has ended and is replaced.
    restarts : callable
        Returns the `Restarts` as they are now.
    let_fail : callable
        ``let_fail(why)`` ends the waits of clients for others, which are none any more.
    grace_s : float
        How long clients that are well have to their end.
    joined : callable
        ``joined(client)`` says whether it has trained with others before.
    leave : callable
        ``leave(client)`` is called where a place stays empty, ``begin_anew()`` before all start
        again, ``fail(failure)`` where the job fails.
    """

    def __init__(
        self,
        job_dir: str,
        client_size: int,
        start_limit_s: float,
        start: Callable[[int, int], Child],
        drop: Callable[[Child], None],
        restarts: Callable[[], Restarts],
        let_fail: Callable[[str], None],
        grace_s: float,
        joined: Callable[[int], bool],
        leave: Callable[[int], None],
        begin_anew: Callable[[], None],
        fail: Callable[[Failure], None],
    ) -> None:
        self._job_dir, self._client_size = job_dir, client_size
        self._start_limit_s, self._start, self._drop = start_limit_s, start, drop
        self._restarts, self._joined, self._leave = restarts, joined, leave
        self._begin_anew, self._fail = begin_anew, fail
        self._let_fail, self._grace_s = let_fail, grace_s
        self._began = time.time()
        self.places: List[Place] = []

    def begin(self, clients: Sequence[int]) -> None:
        """Start all clients."""
        for client in clients:
            child = self._start(client, 0)
            self.places.append(Place(client, child.process.clients, child, time.monotonic()))

    @property
    def are_over(self) -> bool:
        """Whether nobody trains any more, or will."""
        return all(place.state in ("finished", "empty") for place in self.places)

    def remove(self, client: int, grace_s: float) -> str:
        """End a client for good; return what is done.

        Raises
        ------
        ValueError
            There is no such client, or the others could not go on without it.
        """
        place = self._place(client)
        if self._restarts().whole:
            raise ValueError(
                "only clients that exchange through servers by rule esgd or asgd can go"
            )
        if place.state not in ("training", "restarting"):
            raise ValueError(f"client {client} is {place.state} already")
        if self._others(place) < 1:
            raise ValueError(f"client {client} is the last one; end the job instead")
        if place.state == "restarting":
            self._vacate(place)
            return f"client {client} is not started again"
        self._put_to_end(place, again=False, grace_s=grace_s)
        return f"client {client} is asked to end within {grace_s:g} s"

    @property
    def empty(self) -> List[int]:
        """Clients whose places are empty."""
        return [place.number for place in self.places if place.state == "empty"]

    def add(self, client: int) -> None:
        """Start a client in its empty place, or in a new one behind all others."""
        if client == len(self.places):
            child = self._start(client, 0)
            self.places.append(Place(client, 1, child, time.monotonic(), added=True))
            return
        place = self._place(client)
        place.again, place.added, place.restarts = True, True, 0
        self._start_again(place)

    def _place(self, client: int) -> Place:
        for place in self.places:
            if client in place.numbers:
                return place
        last = sum(place.clients for place in self.places) - 1
        raise ValueError(f"client {client} is none of this job's, which are 0 to {last}")

    def look(self) -> None:
        """See who has ended or failed or never came, and start again who is due."""
        for place in self.places:
            {
                "training": self._watch,
                "ending": self._bury,
                "restarting": self._revive,
                "finished": self._nothing,
                "empty": self._nothing,
            }[place.state](place)

    @staticmethod
    def _nothing(place: Place) -> None:
        """A place that is done with."""

    def _watch(self, place: Place) -> None:
        failure = first_failed_rank(self._job_dir, place.numbers)
        code = place.child.poll()
        if failure is None and code:
            failure = place.child.failure()
        if failure is None and code is None and not place.started:
            failure = self._missing(place)
        if failure is not None:
            self._on_failure(place, failure)
        elif code == 0:
            place.state = "finished"

    def _missing(self, place: Place) -> Optional[Failure]:
        missing = missing_ranks(self._job_dir, place.numbers, self._client_size)
        place.started = not missing
        if not missing or time.monotonic() - place.since <= self._start_limit_s:
            return None
        names = ", ".join(f"client {client} rank {rank}" for client, rank in missing)
        how = f"failed: not started within {self._start_limit_s:g} s (--start-timeout)"
        return Failure(names, how, 1, time.time(), place.child.process.log)

    def _on_failure(self, place: Place, failure: Failure) -> None:
        restarts = self._restarts()
        if not all(self._joined(client) for client in place.numbers):
            self._on_bad_start(place, failure)
        elif place.restarts < restarts.most:
            self._restart(place, failure, restarts)
        elif self._others(place) >= restarts.least and not restarts.whole:
            self._give_up(place, failure)
        else:
            self._fail(failure)

    def _on_bad_start(self, place: Place, failure: Failure) -> None:
        """An error at the start is not mended by starting again."""
        if place.added and self._others(place) > 0:
            self._give_up(place, failure)
        else:
            self._fail(failure)

    def _give_up(self, place: Place, failure: Failure) -> None:
        self._say(failure.text())
        left = f"{self._others(place)} of {len(self.places)} clients go on"
        self._say(f"gluon-esgd: the place of client {place.number} stays empty; {left}")
        self._put_to_end(place, again=False)

    def _others(self, place: Place) -> int:
        return sum(other.state != "empty" and other.again for other in self.places) - place.again

    def restart_all(self, failure: Failure) -> bool:
        """Start all clients again, which lost what they share; whether that is wanted."""
        restarts, first = self._restarts(), self.places[0]
        numbers = [client for place in self.places for client in place.numbers]
        is_wanted = restarts.whole and first.restarts < restarts.most
        if not is_wanted or not all(map(self._joined, numbers)):
            return False
        self._restart(first, failure, restarts, alone=False)
        return True

    def _restart(
        self, place: Place, failure: Failure, restarts: Restarts, alone: bool = True
    ) -> None:
        """Start `place` again, which failed `alone` or with all others."""
        place.restarts += 1
        pause_s = self._pause_s(place)
        when = f"in {pause_s:g} s" if pause_s else "at once"
        who = "all clients start" if restarts.whole else f"{place.child.process.name} starts"
        count = f"restart {place.restarts} of {restarts.most}"
        self._say(failure.text())
        self._say(f"gluon-esgd: {who} again {when} ({count})")
        if restarts.whole:
            self._let_fail(f"{failure.who} {failure.how}; all clients start again")
        for each in self.places if restarts.whole else [place]:
            is_well = not (alone and each is place)
            each.restarts, each.in_a_row = place.restarts, place.in_a_row
            each.due = time.monotonic() + pause_s
            self._put_to_end(each, again=True, grace_s=self._grace_s if is_well else 0.0)

    @staticmethod
    def _pause_s(place: Place) -> float:
        """How long to wait: nothing at first, then ever longer, where a life does not last."""
        if time.monotonic() - place.since > _LASTS_S:
            place.in_a_row = 0
        place.in_a_row += 1
        return min(_LONGEST_PAUSE_S, 2.0 ** (place.in_a_row - 2)) if place.in_a_row > 1 else 0.0

    def _put_to_end(self, place: Place, again: bool, grace_s: float = 0.0) -> None:
        """End all processes of a client, to start it again or not."""
        place.again, place.state = again, "ending"
        place.ending = Ending([place.child], *self._markers(place))
        place.ending.begin(grace_s)

    def _markers(self, place: Place) -> Sequence[str]:
        return proc.marker(self._job_dir), proc.client_marker(place.number)

    def _bury(self, place: Place) -> None:
        """Wait until nothing of a life is left: two lives at once would share files and names."""
        assert place.ending is not None
        place.ending.step()
        if not place.ending.done():
            return
        left = proc.job_processes(*self._markers(place))  # which `ending` kills
        if left and time.time() - place.child.ended_at < _LEFT_S:
            return
        self._drop(place.child)
        set_aside(self._job_dir, place.numbers, place.life)
        proc.clean_shared_memory(self._began)
        place.ending, place.state = None, "restarting"
        if not place.again:
            self._vacate(place)

    def _vacate(self, place: Place) -> None:
        """Leave a place empty; clients that are one MPI job come and go together only."""
        place.again, place.state = False, "empty"
        self._leave(place.number)

    def _revive(self, place: Place) -> None:
        if time.monotonic() < place.due:
            return
        if self._restarts().whole:
            if any(other.state == "ending" for other in self.places):
                return
            self._begin_anew()
            self._tell_of_checkpoints()
            for each in self.places:
                self._start_again(each)
        else:
            self._start_again(place)

    def _tell_of_checkpoints(self) -> None:
        folder = Path(self._job_dir, "checkpoints")
        if not any(folder.glob("client*/checkpoint-*.npz")):
            self._say(
                f"gluon-esgd: no checkpoint is in {folder}: unless the script has its own, "
                "training begins anew (gluon_esgd.checkpoint.TrainingState saves them)"
            )

    def _start_again(self, place: Place) -> None:
        place.life += 1
        place.child = self._start(place.number, place.life)
        place.since, place.started, place.state = time.monotonic(), False, "training"

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
