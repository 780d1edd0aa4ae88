"""A pickle read as data: nothing that it names is looked up, called or made.

    bytes                                    read
    c torch\\n Size\\n  (3, 4) TUPLE1 REDUCE   Made("torch.Size", ((3, 4),))
    c os\\n system\\n  "..." TUPLE1 REDUCE     ValueError: it names 'os.system'

A pickle is a program for a machine with a stack.  This machine knows plain values, lists, tuples and dicts.  What a
program would call stays a note of the name and the arguments, and only of names that the reader expects.
"""

import pickletools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 1 << 24
"""Opcodes of one pickle, which bound the objects that are made."""
MOST_VALUES = 1 << 20
"""Values in one of a user's objects, where a shared one counts each time: a short pickle can mean endlessly many."""
DEEPEST = 64

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_GIVEN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_GETATTR = {"builtins.getattr", "__builtin__.getattr"}
"""By which Python 3.11.0 to 3.11.3 write a member of an enumeration: ``getattr(class, "MEMBER")``."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(eq=False)
class Made:
    """What a class or a function would be called with; by itself, without arguments, its name."""

    name: str
    arguments: Any = None
    state: Any = None
    """What the object's ``__setstate__`` would get."""


def unpickled(data: bytes, names: Collection[str]) -> Any:
    """What a pickle says.

    Raises:
        ValueError: it names anything but ``names``, does what data does not, or is damaged or too large.
    """
    try:
        return _Machine(names).run(data)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a pickle is damaged ({type(error).__name__})") from error


def _steps(data: bytes) -> Iterator[tuple[str, Any]]:
    """Opcodes and their arguments, of which none is longer than the data."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            yield opcode.name, argument
    except ValueError as error:
        raise ValueError(f"a pickle is damaged: {error}") from error


class _Machine:
    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (name, argument) in enumerate(_steps(data)):
            if count > MOST_STEPS:
                raise ValueError(f"a pickle has more than {MOST_STEPS} steps")
            if name == "STOP":
                if len(self.stack) != 1:
                    raise ValueError(f"a pickle leaves {len(self.stack)} values")
                return self.stack[0]
            self.step(name, argument)
        raise ValueError("a pickle has no end")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case _ if name in _GIVEN:
                if type(argument) is int and not -(1 << 63) <= argument < 1 << 63:
                    raise ValueError("a pickle has a number of more than 64 bits")
                stack.append(argument)
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                self.marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self.marked()))
            case _ if name in _TUPLES:
                stack.append(tuple(self.taken(_TUPLES[name])))
            case "APPEND" | "APPENDS":
                items = self.marked() if name == "APPENDS" else self.taken(1)
                self.top(list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self.marked() if name == "SETITEMS" else self.taken(2)
                for key, value in zip(items[::2], items[1::2], strict=True):
                    if not isinstance(key, str | int | float | bytes | Made | None):  # what hashes in one step
                        raise ValueError(f"a pickle has a {type(key).__name__} as a key")
                    self.top(dict)[key] = value
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(self.named(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, own = self.taken(2)
                stack.append(self.named(f"{module}.{own}" if isinstance(module, str) and isinstance(own, str) else ""))
            case "REDUCE" | "NEWOBJ":
                what, arguments = self.taken(2)
                if type(what) is not Made or what.arguments is not None or type(arguments) is not tuple:
                    raise ValueError("a pickle calls what is no name")
                if what.name in _GETATTR:
                    what, arguments = self.member(what.name, *arguments)
                empty = what.name == "collections.OrderedDict" and not arguments
                stack.append({} if empty else Made(what.name, arguments))
            case "BUILD":
                (state,) = self.taken(1)
                self.top(Made).state = state
            case "BINPERSID":
                stack.append(Made("", tuple(self.taken(1))))
            case _:
                raise ValueError(f"a pickle has the opcode {name}, which data does not need")

    def member(self, name: str, *arguments: Any) -> tuple[Made, tuple[str]]:
        """A member of an enumeration, as what the class is called with, as other Pythons write it."""
        match arguments:
            case (Made(arguments=None) as what, str(member)) if what.name not in _GETATTR:
                return what, (member,)
        raise ValueError(f"a pickle calls {name!r} for something other than a member of what is read here")

    def named(self, name: str) -> Made:
        if name not in self.names and name not in _GETATTR:
            raise ValueError(f"it names {name[:80]!r}, which is not among what is read here; nothing of it was run")
        return Made(name)

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"a pickle takes a {type(self.stack[-1]).__name__} for a {kind.__name__}")
        return self.stack[-1]

    def taken(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("a pickle takes what it does not have")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def marked(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


def check_size(value: Any) -> None:
    """Raises ValueError where going through a value would take too long, or not end."""
    waiting, count = [(value, 0)], 0
    while waiting:
        one, depth = waiting.pop()
        count += 1
        inside = list(one.values()) if type(one) is dict else one if type(one) in (list, tuple) else ()
        if depth > DEEPEST or count + len(waiting) + len(inside) > MOST_VALUES:
            raise ValueError(f"an object is nested more than {DEEPEST} deep, or has more than {MOST_VALUES} values")
        waiting += [(other, depth + 1) for other in inside]
