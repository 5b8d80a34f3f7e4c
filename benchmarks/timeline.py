"""What a trace of MXNet's profiler says about communication inside the backward pass."""

import json
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple

__all__ = ["Operation", "backward", "buckets", "read", "steps", "summary"]

STEP = "step "  # how the events around steps begin
BUCKET = "allreduce gradient bucket "  # the operations of the library
BACKWARD = "_backward"  # in the name of every backward operation of a hybridized network


class Operation(NamedTuple):
    """What ran from `start_ms` to `end_ms`, on the clock of the trace."""

    start_ms: float
    end_ms: float
    name: str


def read(path: Path) -> List[Operation]:
    """Return the operations of the Chrome trace in `path`, by their start."""
    begun: Dict[Any, Dict[str, Any]] = {}
    found = []
    for event in json.loads(path.read_text())["traceEvents"]:
        thread = (event.get("pid"), event.get("tid"))
        if event.get("ph") == "B":
            begun[thread] = event
        elif event.get("ph") == "E":  # MXNet writes it right after its begin
            begin = begun.pop(thread)
            found.append(Operation(begin["ts"] / 1e3, event["ts"] / 1e3, begin["name"]))
    return sorted(found)


def steps(operations: List[Operation]) -> List[List[Operation]]:
    """Return the operations of each step, by the events ``step 0``, ``step 1``, ..."""
    return [
        [o for o in operations if step.start_ms <= o.start_ms < step.end_ms and o is not step]
        for step in operations
        if step.name.startswith(STEP)
    ]


def backward(step: List[Operation]) -> Operation:
    """Return the backward pass of a step as one operation."""
    found = [o for o in step if BACKWARD in o.name]
    return Operation(found[0].start_ms, max(o.end_ms for o in found), "backward")


def buckets(step: List[Operation]) -> Dict[int, Operation]:
    """Return the collectives of a step by the number of their bucket."""
    found = [o for o in step if o.name.startswith(BUCKET)]
    return {int(o.name[len(BUCKET) :].split()[0]): o for o in found}


def _inside(operation: Operation, whole: Operation) -> float:
    return max(0.0, min(operation.end_ms, whole.end_ms) - max(operation.start_ms, whole.start_ms))


def summary(operations: List[Operation]) -> Dict[str, Any]:
    """Return the medians over all steps: where the collectives lay, relative to backward.

    Returns
    -------
    dict
        ``backward_ms``; ``inside``, the share of the time in collectives that lay inside
        backward; and by bucket its start (``begins_ms``, negative before the end of backward),
        its time (``takes_ms``) and how much of that lay inside backward (``inside_ms``).
    """
    passes = [(backward(step), buckets(step)) for step in steps(operations)]
    rows, shares = [], []
    for number in sorted(passes[0][1]):
        mine = [(whole, found[number]) for whole, found in passes]
        rows.append(
            {
                "bucket": number,
                "begins_ms": median(o.start_ms - whole.end_ms for whole, o in mine),
                "takes_ms": median(o.end_ms - o.start_ms for _, o in mine),
                "inside_ms": median(_inside(o, whole) for whole, o in mine),
            }
        )
    for whole, found in passes:
        taken = sum(o.end_ms - o.start_ms for o in found.values())
        shares.append(sum(_inside(o, whole) for o in found.values()) / taken)
    return {
        "steps": len(passes),
        "backward_ms": median(whole.end_ms - whole.start_ms for whole, _ in passes),
        "inside": median(shares),
        "buckets": rows,
    }
