"""Runs the user's code by name: ``FILE.py:NAME``, ``plait --plugin FILE.py``.

    # my_rows.py                                          plait --plugin my_rows.py verify --optimizer rmsprop

    OPTIMIZERS["rmsprop"] = OptimizerRow(RMSprop, states=1, amplifies=True)

A plugin adds rows to the tables (strategies, orders, styles, families, optimizers) when it is imported, on every rank.
"""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from plait.checkpoint.files.reading import read_file
from plait.messages.ended import to_its_end
from plait.messages.escape import one_line

FLAG = "--plugin"


def take_files(words: Sequence[str], flag: str = FLAG) -> tuple[list[str], tuple[str, ...]]:
    """Splits a command line into the words without a flag, and the files that the flag names.  Raises ValueError for a
    flag without a file."""
    rest, files, left = [], [], iter(words)
    for word in left:
        own, equals, file = word.partition("=")
        if own != flag:
            rest.append(word)
        elif file := file if equals else next(left, ""):
            files.append(file)
        else:
            raise ValueError(f"{flag} without a file: give one, as in {flag} FILE")
    return rest, tuple(dict.fromkeys(files))


@cache
def load_plugin(file: str) -> None:
    """Runs a plugin's file, once in a process.  Raises ValueError, with the line, for any error in it."""
    if not (file.endswith(".py") and os.path.isfile(file)):
        raise ValueError(f"plugin {one_line(file, 300)!r}: give a file of Python, as in {FLAG} my_rows.py")
    try:
        load_file(file, "plugin")
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [error.lineno]
        where = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"plugin {file}{where}: {type(error).__name__}: {error}") from error


def load_name(place: str, what: str, kind: type = object) -> Any:
    """Runs the file of ``FILE.py:NAME`` and returns the named object.  ValueError if there is no such file or name: it
    has ``what``, the setting, and the file's names of this kind."""
    path, colon, name = place.rpartition(":")
    if not (colon and path.endswith(".py") and name.isidentifier()):
        raise ValueError(f"{what} {place!r}: give a file and a name in it, as in my_{what}.py:{what}")
    if not os.path.isfile(path):
        raise ValueError(f"{what} {place!r}: there is no file {path!r}")
    module = load_file(path, what)
    if not hasattr(module, name):
        names = ", ".join(n for n, value in vars(module).items() if n[0] != "_" and isinstance(value, kind)) or "none"
        raise ValueError(f"{what} {place!r}: {path} has no {name!r}; the {what}s in it: {names}")
    return getattr(module, name)


class AsWritten(SourceFileLoader):
    """Compiles the file's current text: Python caches compiled files by the second and the size of the source, so it
    would miss an edit within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_file(path: str, what: str, loader: Callable[[str, str], AsWritten] = AsWritten) -> Any:
    """Runs a file and returns its module.  The file may import its neighbours."""
    read_file(path, f"the {what}")  # refuses a missing or irregular file before Python reads it
    module_name = f"plait_{what}_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader(module_name, path))
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as if it were the main program
    with to_its_end():
        spec.loader.exec_module(module)
    return module
