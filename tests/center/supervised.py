"""A job whose launcher is the test: a real station, its servers, and supervised links.

The test says each order itself, so it decides what happens between any two of them.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np

from gluon_esgd.center import GenerationLink, LinkTerms, chunks_of
from gluon_esgd.center.generation_mailbox import GenerationMailbox

from .stations import Message, Station

LIMIT_S = 60.0


class Supervised:
    """Station, servers of the current generation, and one link for each client."""

    def __init__(
        self,
        folder: Path,
        clients: int,
        servers: int = 1,
        sync: bool = False,
        snapshot_s: Optional[float] = None,
        **terms: Any,
    ) -> None:
        self.folder, self.servers, self.sync = folder, servers, sync
        self.snapshot_s = snapshot_s
        self.terms = {"start_timeout_s": LIMIT_S, "limit_s": 20.0, **terms}
        self.station = Station(folder)
        self.station.begin()
        self.threads = ThreadPoolExecutor(16)
        self.links: List[GenerationLink] = []
        self.vectors: List[Message] = []
        self.mailboxes: List[List[GenerationMailbox]] = []  # by vector, by client
        self.generation, self.roles = 0, {}  # type: int, Dict[str, Message]
        self.filled: List[str] = []
        for client in range(clients):
            self.add(client, clients)

    def add(self, client: int, clients: int, life: int = 0) -> GenerationLink:
        """Make the link of one client, in place of one that it had."""
        terms = LinkTerms(client, clients, self.servers, self.sync, str(self.folder), **self.terms)
        link = GenerationLink(
            str(self.station.socket), terms, life=life, snapshot_s=self.snapshot_s, stall_s=2.5
        )
        self.links[client : client + 1] = [link]
        self.hear(client, "hello", life=life)
        self.tell(client, "welcome", secret="5e" * 32)
        return link

    def hear(self, who: int, say: str, **fields: Any) -> Message:
        """Take the next message of this kind from a leader."""

        def wanted(heard: Message) -> bool:
            if heard["say"] != "heard" or heard["client"] != who:
                return False
            message = heard["message"]
            return {**message, "say": say, **fields} == message

        return self.station.heard.take(wanted)["message"]

    def said(self, client: int, say: str) -> List[Message]:
        """What a leader has said of this kind so far and was not taken."""
        self.station.heard.read(0.0)
        heard = [h["message"] for h in self.station.heard.all if h.get("client") == client]
        return [message for message in heard if message["say"] == say]

    def tell(self, to: int, do: str, **fields: Any) -> None:
        self.station.do("tell", client=to, message={"do": do, **fields})

    @property
    def clients(self) -> range:
        return range(len(self.links))

    def at_once(self, call: Callable[..., Any], *columns: Sequence[Any]) -> List[Future]:
        """Begin ``call(argument of client i, ...)`` in a thread each."""
        return [self.threads.submit(call, *row) for row in zip(*columns)]

    def attach(self, parts: Sequence[int], joins: bool = False) -> List[GenerationMailbox]:
        """Let all clients attach a vector of weights and statistics.

        By the next generation, or, where it `joins`, by the running one.
        """
        begun = self.register(parts)
        if joins:
            for k in self.clients:
                self.join(k)
            for k in self.clients:
                self.joined(k)
        else:
            self.hand_over()
        return self.attached(begun)

    def register(self, parts: Sequence[int]) -> List[Future]:
        """Let all clients begin to attach the next vector, and take what they register."""
        name = f"m{len(self.vectors)}"
        sizes = [size for size in parts if size]
        flags = [(parts[0], self.sync), (parts[1], True)]
        chunks, exact = chunks_of(flags, self.servers)
        begun = self.at_once(lambda link: link.attach(name, sizes, chunks, {}, exact), self.links)
        vectors = [self.hear(k, "register")["vector"] for k in self.clients]
        assert all(vector == vectors[0] for vector in vectors)
        self.vectors.append(vectors[0])
        return begun

    def join(self, client: int) -> None:
        """Let a client's agent attach the vector that was registered last."""
        self.tell(client, "attach", generation=self.generation, vector=self.vectors[-1])

    def joined(self, client: int) -> None:
        self.hear(client, "joined", generation=self.generation, name=self.vectors[-1]["name"])

    def attached(self, begun: Sequence[Future]) -> List[GenerationMailbox]:
        """Tell all clients that the vector is there; return their mailboxes."""
        for k in self.clients:
            self.tell(k, "attached", name=self.vectors[-1]["name"])
        self.mailboxes.append([future.result(LIMIT_S) for future in begun])
        return self.mailboxes[-1]

    def seed(
        self,
        mailboxes: Sequence[GenerationMailbox],
        again: bool = False,
        resumed: bool = False,
    ) -> List[np.ndarray]:
        """Let all clients seed, client 0 with its x; return what each gets."""
        outs = [np.empty_like(mailbox.x) for mailbox in mailboxes]
        begun = self.at_once(
            lambda m, k, out: m.seed(k == 0, out, resumed), mailboxes, self.clients, outs
        )
        name = mailboxes[0].name
        for k in self.clients:
            self.hear(k, "offer", name=name, again=again)
        self.tell(0, "fill", name=name)
        self.hear(0, "filled", name=name, ok=True)
        for k in self.clients:
            self.tell(k, "filled", name=name)
        for k in self.clients:
            self.hear(k, "pulled", name=name)
        for k in self.clients:
            self.tell(k, "started", name=name)
        assert [future.result(LIMIT_S) for future in begun] == [False] * len(outs)
        self.filled = [*self.filled, *([] if again else [name])]
        return outs

    # A hand-over, in its steps.

    def prepare(self, members: Optional[Sequence[int]] = None) -> int:
        """Start the next generation's servers, and let its members make their agents."""
        members, new = list(self.clients) if members is None else list(members), self.generation + 1
        self.generation = new
        self.coming = self.station.serve(new, len(members), self.servers)
        for place, client in enumerate(members):
            self.tell(
                client, "prepare", generation=new, scheduler=self.coming["scheduler"]["address"],
                client=place, num_clients=len(members), num_servers=self.servers,
                vectors=self.vectors,
            )  # fmt: skip
        return new

    def ready(self, members: Optional[Sequence[int]] = None) -> None:
        for k in members or self.clients:
            self.hear(k, "ready", generation=self.generation)

    def hold(self, old: int, hard: bool = False, members: Optional[Sequence[int]] = None) -> None:
        for k in members or self.clients:
            self.tell(k, "hold", generation=old, hard=hard)

    def held(self, old: int, members: Optional[Sequence[int]] = None) -> Dict[int, Any]:
        """Return what each says of how fresh its center is."""
        out = {}
        for k in members or self.clients:
            said = self.hear(k, "held")
            assert said["generation"] in (old, 0)  # 0: it was no member
            out[k] = said["fresh"]
        return out

    def save(self, old: int, client: int) -> bool:
        self.tell(client, "save", generation=old)
        return bool(self.hear(client, "saved", generation=old)["ok"])

    def restore(self, client: int) -> None:
        self.tell(client, "seed", generation=self.generation, names=self.filled)
        self.hear(client, "seeded", generation=self.generation)

    def go(self, num_clients: Optional[int] = None) -> None:
        for k in self.clients:
            count = num_clients or len(self.links)
            self.tell(k, "go", generation=self.generation, num_clients=count, place=k)
        self.station.do("end", generation=self.generation - 1)
        self.roles = self.coming

    def hand_over(self, hard: bool = False, source: int = 0) -> None:
        """Make a whole hand-over to the next generation, its center from client `source`."""
        old = self.generation
        if hard and old:
            self.hold(old, hard)
        self.prepare()
        self.ready()
        if old:
            if not hard:
                self.hold(old)
            self.held(old)
            if self.filled:
                assert hard or self.save(old, source)
                self.restore(source)
        self.go()

    def new_station(self) -> None:
        """Kill the station, and with it the servers; start another in its place."""
        self.station.kill()
        self.station = Station(self.folder)
        self.station.begin()
        for client in self.clients:
            self.tell(client, "welcome", secret="5e" * 32)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.threads.shutdown(wait=False)
        self.station.kill()


@contextlib.contextmanager
def supervised(folder: Path, *arguments: Any, **options: Any) -> Iterator[Supervised]:
    job = Supervised(folder, *arguments, **options)
    try:
        yield job
    finally:
        job.close()
