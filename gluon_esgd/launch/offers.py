"""Start values of the center, and meetings of the leaders: who has offered, who is waited for."""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, List, Sequence, Set, Tuple

__all__ = ["Offers"]


class Offers:
    """Fills each vector of the center once, by one client, and lets leaders meet.

    Parameters
    ----------
    tell : callable
        ``tell(client, message)`` reaches a leader.
    """

    def __init__(self, tell: Callable[[int, Dict[str, Any]], None]) -> None:
        self._tell = tell
        self.filled: Set[str] = set()
        self._offers: Dict[str, Dict[int, bool]] = {}
        self._filling: Dict[str, int] = {}
        self._owed: Dict[Tuple[str, int], int] = {}  # answers to "fill" that are still to come
        self._meetings: Dict[str, Set[int]] = {}
        # Who pulls what was just filled, and who has: nobody moves it before all have.
        self._pulling: Dict[str, Set[int]] = {}
        self._pulled: Dict[str, Set[int]] = {}

    def offer(self, client: int, name: str, again: bool) -> None:
        """Note that a leader holds start values; `again`: they are to replace the center."""
        self._offers.setdefault(name, {})[client] = again

    def meet(self, client: int, what: str) -> None:
        """Note that a leader waits for all others at `what`."""
        self._meetings.setdefault(what, set()).add(client)

    def forget(self, client: int) -> None:
        """Drop all that a leader said: it has left, or another process took its place."""
        for offers in self._offers.values():
            offers.pop(client, None)
        self.reconnect(client)
        for who in (*self._meetings.values(), *self._pulling.values(), *self._pulled.values()):
            who.discard(client)

    def reconnect(self, client: int) -> None:
        """A leader says hello: what it was asked before, or has answered, may never have come."""
        self._filling = {name: k for name, k in self._filling.items() if k != client}
        self._owed = {key: n for key, n in self._owed.items() if key[1] != client}

    def drop(self, name: str) -> None:
        """Forget a vector."""
        self.filled.discard(name)
        self._offers.pop(name, None)
        self._filling.pop(name, None)

    def interrupt(self) -> None:
        """Count on no answer to "fill" any more: the generation that was filled ends."""
        self._filling.clear()

    def lose(self) -> List[str]:
        """Forget that anything was filled; return the names."""
        names, self.filled = sorted(self.filled), set()
        return names

    def answer(self, client: int, name: str, ok: bool) -> None:
        """Take a leader's answer to "fill"."""
        left = self._owed.pop((name, client), 0) - 1
        if left > 0:  # to a "fill" of an earlier generation
            self._owed[name, client] = left
            return
        if self._filling.get(name) != client:
            return
        del self._filling[name]
        if ok:
            self.filled.add(name)
            offers = self._offers.pop(name, {})
            self._pulling[name], self._pulled[name] = set(offers), set()
            for each in offers:
                self._tell(each, {"do": "filled", "name": name, "joined": False})

    def pulled(self, client: int, name: str) -> None:
        """Note that a leader has pulled what was filled."""
        if name not in self._pulling:  # it was told before, when it could not hear
            self._tell(client, {"do": "started", "name": name})
        elif client in self._pulling[name]:
            self._pulling[name].discard(client)
            self._pulled[name].add(client)

    def settle(self, live: Sequence[int], crew: Collection[int], names: Collection[str]) -> None:
        """Answer what can be answered: `crew` takes part in the running generation of `names`."""
        for name in [name for name in self._offers if name in names]:
            self._let_join(name, crew)
            offers = self._offers[name]
            if name not in self._filling and live and all(k in offers and k in crew for k in live):
                self._fill(name, min(live))

    def settle_meetings(self, live: Sequence[int]) -> None:
        """Tell those who met, once no live leader is missing; those who pulled, once all have."""
        for name in [name for name, who in self._pulling.items() if not who & set(live)]:
            del self._pulling[name]
            for client in sorted(self._pulled.pop(name)):
                self._tell(client, {"do": "started", "name": name})
        for what in [what for what, who in self._meetings.items() if who and who >= set(live)]:
            for client in sorted(self._meetings.pop(what)):
                self._tell(client, {"do": "met", "what": what})

    def _let_join(self, name: str, crew: Collection[int]) -> None:
        """A vector that was filled before is taken, not moved, by who comes later."""
        if name not in self.filled:
            return
        offers = self._offers[name]
        for client in [k for k, again in offers.items() if k in crew and not again]:
            del offers[client]
            self._tell(client, {"do": "filled", "name": name, "joined": True})

    def _fill(self, name: str, client: int) -> None:
        self._filling[name] = client
        self._owed[name, client] = self._owed.get((name, client), 0) + 1
        self._tell(client, {"do": "fill", "name": name})
