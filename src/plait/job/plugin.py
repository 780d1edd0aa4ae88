"""Rows from outside: ``plait --plugin FILE.py``, and installed packages with an entry point in ``plait_plugins``.

    # my_rows.py                                          plait --plugin my_rows.py verify --optimizer rmsprop

    OPTIMIZERS["rmsprop"] = OptimizerRow(RMSprop, states=1, amplifies=True)

A plugin adds rows to the tables (strategies, orders, styles, families, optimizers) when it is imported.  Every rank
imports it too.
"""

import os
import traceback
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from plait.job.own import load_file

FLAG = "--plugin"
GROUP = "plait_plugins"
"""The entry points of installed packages that are imported with every command."""


def take_plugins(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of a command line without its plugins, and the plugins' files; ValueError for a flag without a file."""
    rest, files, left = [], [], iter(words)
    for word in left:
        flag, equals, file = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        file = file if equals else next(left, "")
        if not file:
            raise ValueError(f"{FLAG} without a file: give one, as in {FLAG} my_rows.py")
        files.append(file)
    return rest, tuple(dict.fromkeys(files))


@cache
def load_plugin(file: str) -> None:
    """Runs a plugin's file, once in a process; ValueError, with the line, for any error in it."""
    if not (file.endswith(".py") and os.path.isfile(file)):
        raise ValueError(f"plugin {file!r}: give a file of Python, as in {FLAG} my_rows.py")
    _load(f"plugin {file}", file, lambda: load_file(file, "plugin"))


@cache
def load_installed() -> None:
    """Imports the plugins of installed packages; ValueError, with the package, for any error in one."""
    for point in entry_points(group=GROUP):
        owner = point.dist.name if point.dist else "?"
        _load(f"plugin {point.name!r} of the installed package {owner}", "", point.load)


def _load(title: str, file: str, load: Any) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [error.lineno]
        where = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{title}{where}: {type(error).__name__}: {error}") from error
