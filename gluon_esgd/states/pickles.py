"""A pickle as data: what it names is written down, and nothing of it is looked up, made or called.

``pickle.Unpickler`` is told what to call by the file, and obeys also where that takes all memory
(a place in its memo, 2**31) or all stack (a hash of tuples in one another). So the operations are
gone through here, as `pickletools` reads them, on a stack of our own.
"""

from __future__ import annotations

import pickletools
from typing import Any, Callable, Dict, List, Optional, Tuple

__all__ = ["Inert", "load"]


class Inert:
    """In place of what a pickle names or makes: what that is called and was given.

    Attributes
    ----------
    path : (str, str)
        Module and name, of the class where it was made from one.
    args : tuple or None
        What it was made with; None for what is only named.
    state : value or None
    items : list of (key, value)
    """

    def __init__(self, path: Tuple[str, str], args: Optional[Tuple[Any, ...]] = None) -> None:
        self.path, self.args = path, args
        self.state: Any = None
        self.items: List[Any] = []


def load(data: bytes) -> Any:
    """Return what a pickle holds: plain values, and `Inert` for all others.

    Raises
    ------
    ValueError
        Where it is cut short or asks for what no optimizer's states need.
    """
    machine = _Machine()
    for operation, argument, _ in pickletools.genops(data):
        if operation.name == "STOP":
            return machine.pop()
        machine.do(operation.name, argument)
    raise ValueError("it has no end")


_KEYS = (type(None), bool, int, float, str, bytes, Inert)


class _Machine:
    """The stack and the memo of a pickle, and what its operations do with them."""

    def __init__(self) -> None:
        self._stack: List[Any] = []
        self._marks: List[int] = []
        self._memo: Dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Do one operation, by its name in `pickletools`."""
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in _NOTHING:
            raise ValueError(f"it uses {name}, which optimizers' states do not")

    def pop(self) -> Any:
        """Take the value on top, which lies above the last mark."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("it takes a value where there is none")
        return self._stack.pop()

    def mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def taken(self) -> List[Any]:
        """Take all values above the last mark, and the mark."""
        if not self._marks:
            raise ValueError("it goes back to a mark that it has not set")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def top(self, *kinds: type) -> Any:
        """The value on top, which is one of `kinds`."""
        value = self.pop()
        self._stack.append(value)
        if not isinstance(value, kinds):
            raise ValueError(f"it adds to a {type(value).__name__}")
        return value

    def collect(self, make: Callable[[List[Any]], Any]) -> None:
        self._stack.append(make(self.taken()))

    def tuple_of(self, count: int) -> None:
        self._stack.append(tuple([self.pop() for _ in range(count)][::-1]))

    def put(self, place: Any) -> None:
        self._memo[place] = self.top(object)

    def get(self, place: Any) -> None:
        if place not in self._memo:
            raise ValueError(f"it refers to its value {place}, which it has not stored")
        self._stack.append(self._memo[place])

    def extend(self, values: List[Any]) -> None:
        target = self.top(list, Inert)
        (target if isinstance(target, list) else target.items).extend(values)

    def set_items(self, flat: List[Any]) -> None:
        target = self.top(dict, Inert)
        pairs = _pairs(flat)
        if isinstance(target, dict):
            target.update(pairs)
        else:
            target.items.extend(pairs)

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names something by what is no text")
        self._stack.append(Inert((module, name)))

    def make(self, args: Any) -> None:
        """Stand in for what a call or a construction would give."""
        kind = self.pop()
        if not isinstance(kind, Inert) or not isinstance(args, tuple):
            raise ValueError("it calls what is no function or class")
        self._stack.append(Inert(kind.path, args))

    def build(self, _: Any) -> None:
        state = self.pop()
        self.top(Inert).state = state


def _pairs(flat: List[Any]) -> List[Tuple[Any, Any]]:
    if len(flat) % 2:
        raise ValueError("a dictionary has a key without a value")
    pairs = zip(flat[::2], flat[1::2])
    # A key of another kind is never hashed: a stand-in says of what kind it was.
    return [(key if isinstance(key, _KEYS) else _odd(key), value) for key, value in pairs]


def _odd(key: Any) -> Inert:
    return Inert(("", f"{type(key).__name__} as a key"), ())


def _set_of(values: List[Any]) -> Inert:
    made = Inert(("", "set"), ())
    made.items = values
    return made


def _text(argument: str) -> Tuple[str, str]:
    module, _, name = argument.partition(" ")
    return module, name


_NOTHING = {"PROTO", "FRAME"}
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_CONSTANTS: Dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": lambda: _set_of([]),
}
_ACTIONS: Dict[str, Callable[[_Machine, Any], Any]] = {
    "MARK": _Machine.mark,
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.taken(),
    "DUP": lambda m, _: m._stack.append(m.top(object)),
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda m, _: m.put(len(m._memo)),
    "LIST": lambda m, _: m.collect(list),
    "TUPLE": lambda m, _: m.collect(tuple),
    "DICT": lambda m, _: m.collect(lambda flat: dict(_pairs(flat))),
    "FROZENSET": lambda m, _: m.collect(_set_of),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "APPEND": lambda m, _: m.extend([m.pop()]),
    "APPENDS": lambda m, _: m.extend(m.taken()),
    "ADDITEMS": lambda m, _: m.extend(m.taken()),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.taken()),
    "GLOBAL": lambda m, text: m.name(*_text(text)),
    "STACK_GLOBAL": lambda m, _: m.name(*[m.pop(), m.pop()][::-1]),
    "REDUCE": lambda m, _: m.make(m.pop()),
    "NEWOBJ": lambda m, _: m.make(m.pop()),
    "NEWOBJ_EX": lambda m, _: m.make([m.pop(), m.pop()][1]),
    "BUILD": _Machine.build,
}
