"""The classes that are a user's own, and what their objects keep.

A class of a library says by its ``state_dict()`` what goes on; what it keeps besides (caches, counters, its workers) is
its own business.  A class of a user may have forgotten something.
"""

import sys
from functools import cache
from types import MemberDescriptorType
from typing import Any

from torch import nn

LIBRARIES = (
    *("torch", "torchdata", "numpy", "plait"),
    *("builtins", "functools", "pathlib", "logging", "threading", "multiprocessing", "itertools"),
)
"""Objects of their classes are not looked into."""
INSTALLED = ("site-packages", "dist-packages")
PLAIN_BASES = ("builtins", "typing", "abc")
"""Objects have no attributes of these classes."""
OF_MODULES = frozenset(vars(nn.Module()))


def is_library(kind: type) -> bool:
    return _top(kind) in LIBRARIES


def is_installed(kind: type) -> bool:
    """True if an installed package has the class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return any(folder in file for folder in INSTALLED)


def attributes(value: Any) -> dict[str, Any]:
    """All that an object keeps, by name: in its ``__dict__`` and in the slots of a user's classes."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in filter(_is_own, type(value).__mro__):
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                found.setdefault(name, member.__get__(value))
    return found


def own_attributes(value: Any) -> dict[str, Any]:
    """Attributes that a user's class keeps, without those that every module or the library's base class has."""
    kinds = type(value).__mro__
    if not any(map(_is_own, kinds)):
        return {}
    found = attributes(value)
    if isinstance(value, nn.Module):
        return {name: one for name, one in found.items() if name not in OF_MODULES}
    bases = [kind for kind in kinds if not _is_own(kind) and _top(kind) not in PLAIN_BASES]
    return {name: one for name, one in found.items() if not (bases and name.startswith("_"))}


@cache
def _is_own(kind: type) -> bool:
    """True if neither Python nor an installed package has the class."""
    known = _top(kind) in LIBRARIES or _top(kind) in sys.stdlib_module_names
    return not known and not is_installed(kind)


def _top(kind: type) -> str:
    return (kind.__module__ or "").partition(".")[0]
