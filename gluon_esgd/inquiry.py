"""How far ranks of other machines have come, asked by small messages while a wait lasts."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Sequence, Set, Tuple

import numpy as np

from .roll_call import RollCall

__all__ = ["Inquiry"]

_TAG = 11
_QUESTION, _ANSWER = 0, 1
_SILENT_S = 2.0  # since a machine was heard of last; who waits there answers in a fraction of it


class Inquiry:
    """Questions to ranks of other machines, and answers to theirs.

    Nobody waits for a message here, and nothing is sent before a wait is long. A rank that waits
    looks for questions a few times a second and answers with the roll call of its machine: so one
    rank that waits speaks for all of its machine, and a machine on which nobody waits is silent.
    What counts say is a lower bound, so old answers do no harm.

    Parameters
    ----------
    mpi : mpi4py.MPI.Intracomm
        A duplicate on which nothing else is sent.
    nodes : sequence of sequences of int
        The ranks of each machine.
    roll_call : RollCall
        Of this machine.
    """

    def __init__(self, mpi: Any, nodes: Sequence[Sequence[int]], roll_call: RollCall) -> None:
        self._mpi, self._roll_call = mpi, roll_call
        self._others = [list(ranks) for ranks in nodes if mpi.rank not in ranks]
        self._machine_of = {rank: list(ranks) for ranks in nodes for rank in ranks}
        self._entered = dict.fromkeys(self._machine_of, 0)
        self._heard: Dict[int, float] = {}  # of each rank's machine, when
        self._owing: Set[int] = set()  # who was asked and has not answered yet
        self._sends: List[Tuple[Any, np.ndarray]] = []

    def ask(self) -> None:
        """Send a question to every rank of another machine that owes no answer."""
        self._sends = [pair for pair in self._sends if not pair[0].Test()]
        for rank in (rank for ranks in self._others for rank in ranks):
            if rank not in self._owing:
                self._owing.add(rank)
                self._send(rank, _QUESTION)

    def attend(self) -> None:
        """Take in what has come, and answer what was asked; does not wait."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._mpi.Iprobe(MPI.ANY_SOURCE, _TAG, status):
            rank = status.Get_source()
            machine = self._machine_of[rank]
            message = np.empty(1 + len(machine), np.int64)
            self._mpi.Recv(message, rank, _TAG)  # it is there
            for member, entered in zip(machine, message[1:].tolist()):
                self._entered[member] = max(entered, self._entered[member])
                self._heard[member] = time.monotonic()
            if message[0] == _QUESTION:
                self._send(rank, _ANSWER)
            else:
                self._owing.discard(rank)

    def missing(self, here: int) -> Tuple[List[int], List[int]]:
        """Return who has not come to collective number `here`; ranks known of, ranks unknown of.

        Unknown are those of machines that have been silent: nobody waits there in a collective.
        """
        late = [rank for ranks in self._others for rank in ranks if self._entered[rank] < here]
        since = time.monotonic() - _SILENT_S
        known = [rank for rank in late if self._heard.get(rank, since) > since]
        return known, [rank for rank in late if rank not in known]

    def _send(self, rank: int, kind: int) -> None:
        message = np.array([kind, *self._roll_call.counts()], np.int64)
        self._sends.append((self._mpi.Isend(message, rank, _TAG), message))
