"""What all trainers of a process share: the world, the engine lane, the way to the center."""

from __future__ import annotations

import atexit
import sys
import traceback
import weakref
from typing import Any, List, Optional, Tuple

from .center import CenterLink, GenerationLink, Link, LinkTerms
from .center.given_up import close_given_up
from .center.peers import PeerLink
from .engine import Lane, lane
from .errors import TopologyError
from .mpi_job import PATIENCE
from .policy import Policy
from .topology import World, world

__all__ = ["Job", "job"]

_PEERS_LIMIT_S = 600.0  # for other clients, where the environment sets no limit


class Job:
    """The part of this process in the job.

    Attributes
    ----------
    world : World
    lane : Lane
    policy : Policy or None
        That of the first trainer: its rule, outer and compression are the job's.
    """

    def __init__(self, world: World, lane: Lane) -> None:
        self.world, self.lane = world, lane
        world.control.idle = lambda: lane.idle
        self.policy: Optional[Policy] = None
        self._link: Optional[Link] = None
        self._trainers = 0
        self._unfinished: List[Any] = []
        atexit.register(self._end)

    def claim(self, policy: Policy) -> str:
        """Enter a trainer with its `policy`; return the prefix of its keys.

        Raises
        ------
        ValueError
            When an earlier trainer has another rule, outer or compression: the servers know one.
        """
        first = self.policy or policy
        for name in ("rule", "outer", "compression"):
            here, before = getattr(policy, name), getattr(first, name)
            if here != before:
                raise ValueError(
                    f"{name}={here!r}, but an earlier trainer of this job has {before!r}: the "
                    f"{name} belongs to the job; give all trainers the same"
                )
        self.policy = first
        self._trainers += 1
        return f"trainer{self._trainers - 1}"

    def link(self) -> Optional[Link]:
        """Return the leader's way to the center, made at the first call; None on other ranks."""
        settings = self.world.settings
        way = settings.station or settings.scheduler
        if way is None and not settings.is_split:
            raise TopologyError(
                f"{settings.num_servers} server(s) were announced, but no scheduler: let "
                "`gluon-esgd run` start the job"
            )
        if not self.world.is_leader:
            return None
        close_given_up()
        if self._link is None:
            assert self.policy is not None, "a trainer claims before it asks for the link"
            leaders = self.world.leaders
            if leaders is None:
                self._link = self._to_servers(self.policy)
            else:
                self._link = PeerLink(leaders, self.policy.outer, self.policy.compression)
        return self._link

    def clients_now(self) -> Tuple[int, int]:
        """Return how many clients the job has now, and how many of them come before this one.

        Collective in the client: all ranks get what the leader has last heard. Until its client
        takes part in the center that is what the environment said at its start.
        """
        told = None if self._link is None else [self._link.num_clients, self._link.place]
        clients, place = self.world.broadcast(told) or (self.world.num_clients, self.world.client)
        return clients, place

    def _to_servers(self, policy: Policy) -> Link:
        settings = self.world.settings
        terms = LinkTerms(
            client=self.world.client,
            num_clients=self.world.num_clients,
            num_servers=settings.num_servers,
            sync=not policy.has_center,
            job_dir=settings.job_dir,
            start_timeout_s=settings.start_timeout_s,
            limit_s=settings.center_limit_s,
            peers_limit_s=PATIENCE * (settings.stall_abort_s or _PEERS_LIMIT_S),
            outer=policy.outer,
            compression=policy.compression,
        )
        if settings.station is not None:
            snapshot_s = settings.center_snapshot_s
            return GenerationLink(
                settings.station, terms, life=settings.life, snapshot_s=snapshot_s
            )
        assert settings.scheduler is not None
        return CenterLink(settings.scheduler, **vars(terms))

    def finish_at_exit(self, trainer: Any, keep: bool) -> None:
        """Call ``trainer.finish()`` at a clean end of the script.

        With `keep` also where the script has given it up before: it has a last exchange to make.
        """
        self._unfinished.append((lambda: trainer) if keep else weakref.ref(trainer))

    def finished(self, trainer: Any) -> None:
        """Forget a trainer that has finished by itself."""
        self._unfinished = [t for t in self._unfinished if t() is not trainer]

    def _end(self) -> None:
        """Finish what a clean script left; a failure here must not pass for a good end."""
        told = self.lane.raised
        # First what is in the engine: a rank that waits there still learns that another has left.
        self.lane.drain()
        self.world.leave()
        try:
            if getattr(sys, "last_type", None) is None:
                self._finish_all()
        except Exception:
            if not told:
                traceback.print_exc()
            self.world.abort()
        if self._link is not None:
            self._link.close()

    def _finish_all(self) -> None:
        self.lane.check()
        if self._unfinished:
            if self.world.mpi_is_over:
                raise RuntimeError("call trainer.finish() before MPI.Finalize()")
            # Ranks that still train find out that this one has left; none is waited for in vain.
            trainers = [reference() for reference in self._unfinished]
            here = [trainer is not None for trainer in trainers]
            # The collector does not come to all ranks at the same time.
            everywhere = zip(*self.world.control.allgather(here, "the end of the script"))
            for trainer, known in zip(trainers, everywhere):
                if all(known):
                    trainer.finish()


_job: Optional[Job] = None


def job() -> Job:
    """Return the job of this process; the first call is collective over the client."""
    global _job
    if _job is None:
        _job = Job(world(), lane())
    return _job
