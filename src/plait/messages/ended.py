"""Catches programs that user code ends from within, by ``sys.exit()``: otherwise they would seem to have finished.

with to_its_end():         sys.exit(), sys.exit(0), sys.exit("text")     EndedError, with the line that did it
    job.loss_fn(...)       sys.exit(3)                                   passes: its code says that it failed
"""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = sysconfig.get_path("stdlib")
"""The path of Python's own library: argparse ends a program too."""


class EndedError(RuntimeError):
    """Raised for code that ended the program instead of returning."""


class OtherRankError(RuntimeError):
    """Raised with the text of another rank's error."""


@contextmanager
def to_its_end() -> Iterator[None]:
    """Turns a SystemExit inside, unless its code is above 0, into an EndedError."""
    try:
        yield
    except SystemExit as left:
        if isinstance(left.code, int) and left.code:
            raise
        frames = traceback.extract_tb(left.__traceback__)
        last = next((frame for frame in reversed(frames) if not frame.filename.startswith(_LIBRARY)), frames[-1])
        code = "" if left.code is None else f": {left.code}"
        raise EndedError(
            f"{last.filename}:{last.lineno} ended the program in {last.name} (SystemExit{code}) before all was done: "
            f"let it return, or raise an exception that says what is wrong"
        ) from left
