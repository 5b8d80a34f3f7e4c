"""What stations and leaders may say to the launcher; anything else is dropped before it counts."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, Mapping, Optional

__all__ = ["LONGEST", "from_leader", "from_station", "parse"]

LONGEST = 1 << 20  # bytes of a message

Message = Dict[str, Any]
Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 65536


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _seconds_or_none(value: Any) -> bool:
    return value is None or _seconds(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(each) for each in value)


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_count(each) for each in value)


def _contract(value: Any) -> bool:
    return isinstance(value, dict) and all(type(each) is int for each in value.values())


_VECTOR: Mapping[str, Check] = {
    "name": lambda value: _text(value) and bool(value),
    "sizes": _list_of(_count),
    "chunks": _list_of(_pair),
    "exact": _list_of(_flag),
    "contract": _contract,
}


def _vector(value: Any) -> bool:
    return isinstance(value, dict) and _suits(value, _VECTOR)


_PROGRESS = dict.fromkeys(("step", "exchanges", "lost", "late"), _count)

_LEADER: Mapping[str, Mapping[str, Check]] = {
    "hello": {"client": _count, "pid": _count, "life": _count},
    "register": {"vector": _vector, "sync": _flag},
    "ready": {"generation": _count},
    "joined": {"generation": _count, "name": _text},
    "held": {"generation": _count, "fresh": _seconds_or_none},
    "saved": {"generation": _count, "ok": _flag},
    "seeded": {"generation": _count},
    "lost": {"generation": _count, "stall": _flag, "why": _text},
    "offer": {"name": _text, "again": _flag},
    "filled": {"name": _text, "ok": _flag},
    "pulled": {"name": _text},
    "meet": {"what": _text},
    "detach": {"name": _text},
    "progress": {**_PROGRESS, "staleness_s": _seconds_or_none},
    "finished": {},
}

_ROLE = {"generation": _count, "role": _text, "index": _count, "pid": _count}

_STATION: Mapping[str, Mapping[str, Check]] = {
    "up": {"pid": _count},
    "serving": _ROLE,
    "ended": {**_ROLE, "how": _text},
    "heard": {"client": _count, "message": lambda value: from_leader(value)},
    "gone": {"client": _count, "pid": _count},
}


def _suits(message: Mapping[str, Any], fields: Mapping[str, Check]) -> bool:
    return all(name in message and check(message[name]) for name, check in fields.items())


def _is_known(message: Any, known: Mapping[str, Mapping[str, Check]]) -> bool:
    say = message.get("say") if isinstance(message, dict) else None
    return isinstance(say, str) and say in known and _suits(message, known[say])


def from_leader(message: Any) -> bool:
    """Return whether `message` is one that leaders may send, with all its fields."""
    return _is_known(message, _LEADER)


def from_station(message: Any) -> bool:
    """Return whether `message` is one that stations may send, with all its fields."""
    return _is_known(message, _STATION) and (
        message["say"] != "serving"
        or message["role"] != "scheduler"
        or _text(message.get("address"))
    )


def parse(line: bytes) -> Optional[Message]:
    """Return the message that a station wrote on one line, None where it is not one."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if from_station(message) else None
