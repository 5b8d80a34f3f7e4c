"""A leader's link to the leaders of other clients, where they are ranks of one MPI job."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ..communicator import Communicator
from ..counters import Counters
from ..errors import CenterError
from ..optim.outer import Outer
from . import contract as contracts
from .layout import check_chunks, check_exact, check_sizes
from .peer_mailbox import PeerMailbox, center_errors

__all__ = ["PeerLink"]

_PLAIN = Outer()


class PeerLink:
    """A leader's link to the leaders of the other clients of its MPI job.

    One per process, shared by all its trainers, with the face of `CenterLink`.

    Parameters
    ----------
    leaders : Communicator
        The leaders of all clients; a client's number is its rank. Its limits bound every wait.
    outer : Outer, default the plain sum
        How the differences of an exchange move the center; the same on all clients.
    compression : {'fp16'}, optional
        Half floats between machines, but for chunks that are exact; the same on all clients.
    """

    num_servers = 1  # into how many parts vectors are cut at least

    def __init__(
        self, leaders: Communicator, outer: Outer = _PLAIN, compression: Optional[str] = None
    ) -> None:
        self.num_clients, self.place = leaders.size, leaders.rank
        self._leaders, self._outer, self.compression = leaders, outer, compression
        self._boxes: Dict[str, PeerMailbox] = {}

    def wait_ready(self) -> None:
        """Return at once: the leaders are there since MPI has started."""

    def attach(
        self,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        contract: Mapping[str, int],
        exact: Sequence[bool] = (),
    ) -> PeerMailbox:
        """Make the mailbox of one trainer; all leaders make the same ones in the same order.

        Parameters
        ----------
        name : str
            The trainer's, for messages.
        sizes : sequence of int
            Floats of each parameter; n is their sum.
        chunks : sequence of (start, stop)
            How n is cut; `PeerMailbox.reduce` takes whole chunks.
        contract : mapping of str to int
            What must be equal on all clients; number of floats and cuts are compared without
            being named here.
        exact : sequence of bool, optional
            For each chunk, whether it travels in float32 and is added up as it is, whatever the
            link's `outer` and `compression`; none unless given.

        Raises
        ------
        CenterError
            On all clients: what one of them brings that does not do, or what differs between
            them; on those that wait too long for the others.
        """
        mine: Dict[str, Any] = {"fault": None, "name": name}
        plain, flags, everything = list(sizes), list(exact), dict(contract)
        try:
            plain, flags = self._checked(name, sizes, chunks, exact)
            own = contracts.own_contract(plain, chunks, flags)
            contracts.check_contract(contract, len(own))
            everything.update(own)
            # The seeder is compared by the seed; here any one will do.
            mine["row"] = contracts.row(everything, seeder=self._leaders.rank == 0).tolist()
        except (TypeError, ValueError) as error:
            mine["fault"] = str(error)
        self._compare(self.gather(mine, f"the mailbox '{name}'"), everything)
        with center_errors():
            self._boxes[name] = PeerMailbox(
                self, self._leaders, name, plain, chunks, flags, self._outer
            )
        return self._boxes[name]

    def _checked(
        self,
        name: str,
        sizes: Sequence[int],
        chunks: Sequence[Tuple[int, int]],
        exact: Sequence[bool],
    ) -> Tuple[List[int], List[bool]]:
        if name in self._boxes:
            raise ValueError(f"name={name!r} is in use; attached are {', '.join(self._boxes)}")
        plain = check_sizes(sizes)
        cuts = check_chunks(chunks, sum(plain))
        return plain, check_exact(exact, len(cuts))

    def _compare(self, said: List[Dict[str, Any]], contract: Mapping[str, int]) -> None:
        client = f"client {self._leaders.rank}"
        faults = [f"client {k}: {each['fault']}" for k, each in enumerate(said) if each["fault"]]
        if faults:
            raise CenterError("; ".join(faults))
        names = [each["name"] for each in said]
        if len(set(names)) > 1:
            raise CenterError(
                f"{client}: the clients do not make the same trainers in the same order: "
                f"{names} by client"
            )
        table = np.array([each["row"] for each in said], np.float32)
        found = contracts.faults(table, contract)
        if found:
            raise CenterError(f"{client}: the clients do not match: {'; '.join(found)}")

    def gather(self, value: Any, what: str) -> List[Any]:
        """Return every leader's `value` by client; collective over the leaders."""
        with center_errors():
            return self._leaders.allgather(value, what)

    def forget(self, box: PeerMailbox) -> None:
        """Let its name be free again."""
        self._boxes.pop(box.name, None)

    def report(self, step: int, counters: Counters) -> None:
        """Do nothing: nobody watches the job from outside."""

    def close(self) -> None:
        """Forget all mailboxes. Idempotent; not collective."""
        for box in list(self._boxes.values()):
            box.close()
