"""docs/waits.md lists every call in the sources that can wait, and nothing else."""

from __future__ import annotations

import ast
import re
from typing import Dict, Iterator, Set

from .pool import ROOT

# A call by one of these names waits, or may: of sockets, pipes, processes, threads, locks, queues,
# MPI's own communicators, MXNet's engine. Collectives of `Communicator` come down to its `wait`.
WAITING = {
    *("wait", "wait_for", "wait_until", "waitpid", "communicate", "sleep", "poll", "select"),
    *("recv", "recvmsg", "recv_into", "recvfrom", "accept", "connect", "create_connection"),
    *("acquire", "lockf", "flock", "get", "readline", "readlines", "_barrier"),
    *("Recv", "Barrier", "Ibarrier", "Wait", "Waitall", "bcast", "Split", "Split_type", "Dup"),
    *("waitall", "wait_to_read", "MXNDArrayWaitToWrite", "synchronize"),
}
OF_MODULES = {("subprocess", "run"), ("subprocess", "check_output"), ("os", "read")}


def waits(call: ast.Call) -> bool:
    """Whether `call` is one that can wait, as far as its name tells."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return isinstance(function, ast.Name) and function.id in ("wait", "wait_until")
    owner = function.value.id if isinstance(function.value, ast.Name) else None
    if (owner, function.attr) in OF_MODULES:
        return True
    if function.attr == "get":  # of a queue, not of a dict
        return not call.args or owner == "queue"
    if function.attr == "join":  # of a thread or process, not of texts or paths
        return not call.args or any(word.arg == "timeout" for word in call.keywords)
    return function.attr in WAITING


def calls() -> Iterator[tuple]:
    for path in sorted((ROOT / "gluon_esgd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and waits(node):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                yield str(path.relative_to(ROOT / "gluon_esgd")), name


def listed() -> Dict[str, Set[str]]:
    """File and names of calls in the first column of the page's tables."""
    found: Dict[str, Set[str]] = {}
    for row in (ROOT / "docs" / "waits.md").read_text().splitlines():
        match = re.match(r"\| `([\w/]+\.py)`: ([^|]*) \|", row)
        if match:
            found.setdefault(match[1], set()).update(re.findall(r"`(\w+)`", match[2]))
    return found


def test_every_call_that_can_wait_is_on_the_page() -> None:
    there: Dict[str, Set[str]] = {}
    for file, name in calls():
        there.setdefault(file, set()).add(name)
    page = listed()
    unlisted = {f: names - page.get(f, set()) for f, names in there.items()}
    gone = {f: names - there.get(f, set()) for f, names in page.items()}
    assert not any(unlisted.values()), (
        f"docs/waits.md lacks { ({f: n for f, n in unlisted.items() if n}) }: say there what is "
        "waited for, until when, and what is said (or that the call only looks)"
    )
    assert not any(gone.values()), f"docs/waits.md lists what is gone: {gone}"


def test_calls_that_wait_are_seen() -> None:
    def seen(text: str) -> bool:
        return waits(ast.parse(text, mode="eval").body)  # type: ignore[arg-type]

    for text in (
        "x.wait()",
        "t.join()",
        "t.join(timeout=3)",
        "q.get()",
        "s.recv(9)",
        "os.read(0, 9)",
    ):
        assert seen(text), text
    for text in (
        "', '.join(names)",
        "os.path.join(a, b)",
        "d.get(key)",
        "file.read(9)",
        "x.run(1)",
    ):
        assert not seen(text), text
