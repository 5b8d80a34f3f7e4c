"""Malformed inputs from good ones, and what is asked of the code that gets them.

Everything random comes from one ``random.Random(seed)`` for each case, so the number that a
failing test prints makes the same input again.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from random import Random
from typing import Any, Callable, Iterator, List, NoReturn, Optional, Sequence, Tuple

from gluon_esgd import errors

CASE_S = 10  # one case takes milliseconds; so long only where it hangs
ROOM_BYTES = 1 << 30  # beyond what the process has: an array that a header invents does not fit

OURS = tuple(getattr(errors, name) for name in errors.__all__ if name != "raise_faults")

TEXTS = (
    "", " ", "\t", "\n", "-", "--", "-1", "0", "1e309", "nan", "inf", "-inf", "0x10", "1_000", "²",
    "\uff11\uff12", "a,b", ",", ":", ";", "=", "/", "..", "'", '"', "é", "🙂", "\u202e", "\ud800",
    "\udcff", "$(touch x)", "`id`", "%s%n", "{}", "__class__", "9" * 40, "9" * 5000, "x" * 70000,
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**60, 2**63, 2**64, -(2**63),
    10**40, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), True,
)  # fmt: skip


class Refused(Exception):
    """A command line was refused by argparse, which has said why."""


def texts(random: Random, good: str) -> str:
    """A text that is `good` no more, or by chance still."""
    out = good
    for _ in range(random.choice((1, 1, 2, 4))):
        at, end = sorted(random.randrange(len(out) + 1) for _ in range(2))
        new = random.choice((*TEXTS, out[at:end], out[:20]))
        how = random.randrange(5)
        if how == 0:
            out = out[:at] + new + out[at:]
        elif how == 1:
            out = out[:at] + new + out[end:]
        elif how == 2:
            out = out[:at]
        elif how == 3:
            out = out[:at] + out[at:end] * random.choice((2, 3, 50)) + out[end:]
        else:
            out = out[:at] + chr(random.choice((0x100, 0x3000, 0xDC80, 33, 44, 58))) + out[at + 1 :]
    return out


def bytes_(random: Random, good: bytes, other: bytes = b"") -> bytes:
    """Bytes with flips, cuts, insertions, huge numbers, pieces of themselves and of `other`."""
    out = bytearray(good)
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        at, end = sorted(random.randrange(len(out) + 1) for _ in range(2))
        how = random.randrange(7)
        if how == 0 and out:
            out[at - 1] ^= 1 << random.randrange(8)
        elif how == 1 and out:
            out[at - 1] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        elif how == 2:
            del out[at : min(end, at + random.choice((1, 4, 1000)))]
        elif how == 3:
            del out[at:]
        elif how == 4:
            new = random.choice(
                (
                    b"\0" * 8,
                    b"\xff" * 8,
                    bytes(random.getrandbits(8) for _ in range(9)),
                    out[at:end],
                )
            )
            out[at:at] = new[:4096]
        elif how == 5:
            size, order = random.choice((2, 4, 8)), random.choice(("little", "big"))
            number = random.choice((0, 1, 2**31 - 1, 2**31, 2**60, 2**64 - 1))
            out[at : at + size] = (number % 256**size).to_bytes(size, order)
        else:
            start = random.randrange(len(other) + 1)
            out[at:end] = other[start : start + random.choice((4, 64, 4096))]
    return bytes(out)


def value(random: Random, depth: int = 2) -> Any:
    """Any value that JSON can say."""
    kind = random.randrange(7 if depth else 4)
    if kind in (0, 1):
        return random.choice((None, True, False, *NUMBERS))
    if kind in (2, 3):
        return random.choice(TEXTS)
    if kind == 4:
        return [value(random, depth - 1) for _ in range(random.randrange(4))]
    if kind == 5:
        return {random.choice(TEXTS): value(random, depth - 1) for _ in range(random.randrange(4))}
    return nested(random.choice((10, 200)), random.choice(([], {})))


def nested(depth: int, inner: Any) -> Any:
    """Lists or dicts in one another, `depth` of them."""
    for _ in range(depth):
        inner = {"a": inner} if isinstance(inner, dict) else [inner]
    return inner


def tree(random: Random, good: Any) -> Any:
    """A JSON tree with one to three places changed: another value, a lost key, one more."""
    for _ in range(random.choice((1, 1, 2, 3))):
        good = _changed(random, good, random.randrange(1, 9))
    return good


def _changed(random: Random, node: Any, depth: int) -> Any:
    if depth == 0 or not isinstance(node, (dict, list)) or not node:
        return value(random)
    if isinstance(node, dict):
        key = random.choice(sorted(node, key=str))
        out = dict(node)
        how = random.randrange(8)
        if how == 0:
            del out[key]
        elif how == 1:
            out[random.choice(TEXTS)] = out.pop(key)
        elif how == 2:
            out[random.choice(TEXTS)] = value(random)
        else:
            out[key] = _changed(random, out[key], depth - 1)
        return out
    at = random.randrange(len(node))
    how = random.randrange(8)
    if how == 0:
        return node[:at] + node[at + 1 :]
    if how == 1:
        return [*node, node[at]]
    return [*node[:at], _changed(random, node[at], depth - 1), *node[at + 1 :]]


def json_text(random: Random, good: Any) -> str:
    """JSON that says something else than `good`, or is none."""
    how = random.randrange(10)
    if how == 0:
        return texts(random, json.dumps(good))
    if how == 1:
        depth = random.choice((500, 100_000))
        return '{"a":' * depth if random.randrange(2) else "[" * depth
    return json.dumps(tree(random, good))


class Cases:
    """Counts what a module of tests has tried.

    Parameters
    ----------
    errors : tuple of exception types, optional
        What may come besides our errors, ValueError and OSError with their own texts.
    """

    def __init__(self, *errors: type) -> None:
        self.count = self.refused = 0
        self._errors = (*OURS, Refused, *errors)

    def ends_well(
        self,
        seed: int,
        given: Any,
        call: Callable[[], Any],
        names: Sequence[str] = (),
    ) -> Optional[BaseException]:
        """Call; return the error if there was one, which must be ours.

        Its text must have one of `names` in it: what the error is about.
        """
        self.count += 1
        try:
            with bounded():
                call()
            return None
        except BaseException as error:
            fault = self._fault(error, names)
            if fault is None:
                self.refused += 1
                return error
            raise AssertionError(f"seed {seed}: {fault}\ninput: {given!r:.2000}") from error

    def _fault(self, error: BaseException, names: Sequence[str]) -> Optional[str]:
        kind = type(error)
        ours = kind in self._errors or kind is ValueError or isinstance(error, OSError)
        if not ours:
            return f"{kind.__name__} from the depths: {error}"
        text = str(error)
        if isinstance(error, OSError) and error.errno is None:
            return None if text else "an OSError without a text"
        if not any(name in text for name in names or ("",)) or not text.strip():
            return f"{kind.__name__} names none of {list(names)}: {text!r:.500}"
        return None


def seeds(first: int, count: int) -> Iterator[Tuple[int, Random]]:
    """`count` seeds and what is random in each case."""
    for seed in range(first, first + count):
        yield seed, Random(seed)


@contextmanager
def bounded() -> Iterator[None]:
    """Let the block have so much time and memory, and no more."""

    def late(number: int, frame: Any) -> NoReturn:
        raise TimeoutError_(f"more than {CASE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_size() + ROOM_BYTES, old[1]))
    started, left_s = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, CASE_S)[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is malformed may overflow
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:  # of the test's own limit
            left_s = max(0.1, left_s - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, left_s)


class TimeoutError_(BaseException):
    """A case hangs; no handler for Exception may swallow it."""


def _size() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


_DANGEROUS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "os.remove",
              "shutil.rmtree", "socket.connect", "pickle.find_class")  # fmt: skip
_watched: List[List[str]] = []


def _audit(event: str, args: Any) -> None:
    if _watched and event in _DANGEROUS:
        _watched[-1].append(f"{event} {args!r:.200}")


sys.addaudithook(_audit)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Fail if the block starts a process, imports, connects or lets a pickle name something."""
    seen: List[str] = []
    _watched.append(seen)
    try:
        yield
    finally:
        _watched.pop()
        assert not seen, f"the input made the process do: {seen}"
