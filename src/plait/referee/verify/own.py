"""What is somebody's own: classes that no installed package and not Python itself has, and what their objects keep.

A class of a library says by its ``state_dict()`` what goes on; what it keeps besides (caches, counters, its workers) is
its own business.  A class of one's own may have forgotten something.
"""

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, MemberDescriptorType
from typing import Any

LIBRARIES = (
    *("torch", "torchdata", "numpy", "plait"),
    *("builtins", "functools", "pathlib", "logging", "threading", "multiprocessing", "itertools"),
)
"""Objects of their classes are not looked into."""
INSTALLED = ("site-packages", "dist-packages")
PLAIN_BASES = ("builtins", "typing", "abc")
"""Of their classes an object has no attributes."""


def is_library(kind: type) -> bool:
    return _top(kind) in LIBRARIES


def is_installed(kind: type) -> bool:
    """Whether an installed package has the class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return any(folder in file for folder in INSTALLED)


def attributes(value: Any) -> dict[str, Any]:
    """All that an object keeps, by name: in its ``__dict__`` and in the slots of classes of one's own."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in filter(_is_own, type(value).__mro__):
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                found.setdefault(name, member.__get__(value))
    return found


def own_attributes(value: Any) -> dict[str, Any]:
    """Those that somebody's own class keeps.

    Where it has a base of a library: what its own functions set (``self.calls = 0``) and the base's do not, since the
    base, and wrappers that know the base, set others.
    """
    kinds = type(value).__mro__
    own = [kind for kind in kinds if _is_own(kind)]
    bases = [kind for kind in kinds if not _is_own(kind) and _top(kind) not in PLAIN_BASES]
    if not own:
        return {}
    if not bases:
        return attributes(value)
    asked = frozenset().union(*map(_set_by, own)) - frozenset().union(*map(_set_by, bases))
    return {name: one for name, one in attributes(value).items() if name in asked}


@cache
def _is_own(kind: type) -> bool:
    """Whether neither Python nor an installed package has the class."""
    known = _top(kind) in LIBRARIES or _top(kind) in sys.stdlib_module_names
    return not known and not is_installed(kind)


def _top(kind: type) -> str:
    return (kind.__module__ or "").partition(".")[0]


@cache
def _set_by(kind: type) -> frozenset[str]:
    """The attributes that the functions of a class set."""
    functions = [inner for value in vars(kind).values() for inner in _functions(value)]
    codes = [code for function in functions for code in _codes(function.__code__)]
    return frozenset(one.argval for code in codes for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")


def _functions(value: Any) -> list[FunctionType]:
    """What a class has below a name, without what is around it."""
    if isinstance(value, property):
        inner = [value.fget, value.fset, value.fdel]
    else:
        inner = [value.__func__ if isinstance(value, classmethod | staticmethod) else value]
    bare = [inspect.unwrap(one) for one in inner if isinstance(one, FunctionType)]
    return [one for one in bare if isinstance(one, FunctionType)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's, and those of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
