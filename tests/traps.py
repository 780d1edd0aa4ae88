"""Modules that report that they were imported."""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

TRAP = """
def trap():
    import os
    with open(os.environ["TRAP"], "a") as told:
        told.write(__name__ + chr(10))
trap()
"""

EVERY = {*sys.stdlib_module_names, *packages_distributions(), "plait"}
"""The modules of Python, of plait and of all installed packages."""


class Traps:
    """A folder full of them.

    Args:
        more: what they do once they have told.
    """

    def __init__(self, folder: Path, names: Iterable[str] = EVERY, more: str = "") -> None:
        self.folder, self._told = folder / "traps", folder / "told"
        self.folder.mkdir()
        for name in names:
            if name.isidentifier():
                (self.folder / f"{name}.py").write_text(TRAP + more)

    @property
    def told(self) -> list[str]:
        """The traps that were imported."""
        return self._told.read_text().split() if self._told.exists() else []

    @property
    def environment(self) -> dict[str, str]:
        """For a process that may fall into one."""
        return {**os.environ, "TRAP": str(self._told)}
