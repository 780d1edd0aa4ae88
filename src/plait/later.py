"""Names of a package that are imported when they are asked for: ``import plait`` is fast, and needs no torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562).

    Args:
        modules: the names, separated by spaces, that each of its modules brings.  Any other name is that of a module.
    """
    places = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in places:
            return getattr(import_module(places[name]), name)
        try:
            return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[package]) from None  # for Python's hint

    return get
