"""The output of a failed run: one line for a mistake of the user, the original traceback for anything else.

    raised on a rank                      printed                         exit code
    ValueError by plait                   plait: error: <message>         2
    FloatingPointError by plait           plait: error: <message>         1
    MemoryError by plait                  plait: error: <message>         1
    a disk that is full or gone           plait: error: <message>         1
    SystemExit of code 0 (EndedError)     plait: error: <message>         1
    a standard output that takes no more  plait: error: <message>         1
    any other exception                   its traceback                   1
    (killed by a signal)                  plait: rank 3 was killed ...    128 + signal
    (ended with 0, and was not done)      plait: rank 3 ended ...         1

A rank that plait started prints nothing itself.  It leaves a note in the file that ``TORCHELASTIC_ERROR_FILE`` names,
in the form that torch's own agent reads, and the launcher prints the *first* failure: the others are only its echo.
Torch stamps failures to the second; the nanoseconds here tell cause from echo.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from plait.checkpoint.files.writing import DiskError
from plait.messages.ended import EndedError, OtherRankError
from plait.messages.escape import UnheardError, heard, printable, say
from plait.messages.wording import signal_name

MISTAKE = 2
"""The exit code of bad input, the same as argparse's."""

ERROR = "plait: error:"
"""The beginning of a line that is the whole report."""

ONE_LINE = (DiskError, OtherRankError, EndedError, UnheardError)
"""Errors whose message is the whole report."""

LAUNCHER = "PLAIT_LAUNCHER"
"""Set for ranks that plait started: the launcher's process id."""


@dataclass(frozen=True)
class Failure:
    """The end of one rank as the launcher sees it."""

    rank: int
    exit_code: int
    """Negative: the signal that killed it."""
    text: str | None = None
    """The text to print; None if it left no note."""
    nanoseconds: int = 0
    final: bool = False
    """True if another attempt would end the same way: an input that plait refuses, or the program's own exit code."""


def is_mistake(error: BaseException, kinds: tuple[type[Exception], ...] = (ValueError,)) -> bool:
    """True if plait refuses an input: an error of one of these kinds that was raised in its own code."""
    if not isinstance(error, kinds) or error.__traceback__ is None:
        return False
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "plait"


def guarded(work: Callable[[], int]) -> int:
    """Runs ``work`` and returns its exit code; an error is printed, and becomes one."""
    try:
        return work()
    except KeyboardInterrupt:
        if LAUNCHER not in os.environ:
            say("plait: stopped by SIGINT\n")
        return 128 + signal.SIGINT
    except Exception as error:
        return report(error)


def report(error: BaseException, environment: Mapping[str, str] = os.environ) -> int:
    """Prints an error, or records it for the launcher to print; returns the exit code.  An input that plait refuses is
    printed as a line, with a grid below it if there is one; any other error as its traceback."""
    text = "".join(traceback.format_exception(error))
    if is_mistake(error, (ValueError, FloatingPointError, MemoryError)) or isinstance(error, ONE_LINE):
        reason, *grid = str(error).split("\n")
        line = " ".join([ERROR, *reason.split(), *getattr(error, "__notes__", ())])
        text = "\n".join([line, *grid, ""])
    _tell(printable(text), environment)
    return MISTAKE if is_mistake(error) else 1


def _tell(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Sends text to the launcher, if it is plait's, or to the screen."""
    if not leave_note(text, final=text.startswith(ERROR), environment=environment) or LAUNCHER not in environment:
        with suppress(UnheardError):
            _flush()
        say(text)


def _flush() -> None:
    """Flushes the standard output; UnheardError if it cannot be written."""
    with heard(), suppress(ValueError):  # closed by the program
        for stream in filter(None, [sys.stdout]):  # None if the parent process has closed it
            stream.flush()


def leave_note(text: str, *, final: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Reports to the launcher why this rank ends with a code other than 0; False without a launcher, or room."""
    path, now = environment.get("TORCHELASTIC_ERROR_FILE"), time.time_ns()
    extra = {"py_callstack": text, "timestamp": str(now // 10**9), "nanoseconds": now, "final": final}
    with suppress(OSError):
        if path:
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
            return True
    return False


def recorded(rank: int, exit_code: int, note: Path) -> Failure:
    """Returns a rank's end, with its note if there is one."""
    try:
        message = json.loads(note.read_text(encoding="utf-8"))["message"]
        extra = message["extraInfo"]
        return Failure(rank, exit_code, str(message["message"]), int(extra["nanoseconds"]), bool(extra["final"]))
    except (OSError, ValueError, KeyError, TypeError):  # none, or it was killed while it wrote
        return Failure(rank, exit_code, nanoseconds=time.time_ns())


def first_of(failures: list[Failure]) -> Failure:
    """Returns the failure that the others echo: that of a rank that a signal killed or that left with exit code 0, else
    the first that left a note."""
    return min(failures, key=lambda f: (f.exit_code > 0, f.text is None, f.nanoseconds))


def explain(failure: Failure, mesh: str, found: str = "") -> tuple[str, int]:
    """Returns (text for the launcher to print, exit code) for an attempt that ended with this failure.  ``found`` is
    the status page's report of it, which has more details than the launcher knows."""
    who = f"plait: rank {failure.rank} of mesh {mesh}"
    code = failure.exit_code
    if code <= 0 or failure.text is None:
        ended = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code} before it was done"
        return found or f"{who} {ended}; the others were stopped\n", 128 - code if code < 0 else code or 1
    if failure.final:
        where = "" if code == MISTAKE else f" (raised on rank {failure.rank}, mesh {mesh})"
        return f"{failure.text.rstrip()}{where}\n" if failure.text else "", code
    return failure.text + (found or f"{who} failed as above; the others were stopped\n"), code


def leave(code: int) -> NoReturn:
    """Ends this process now: writes pending output, and skips the interpreter's own end, a second or two with torch."""
    try:
        _flush()
    except UnheardError as error:
        with suppress(UnheardError):
            code = code or report(error)
    with suppress(OSError, ValueError):
        for stream in filter(None, [sys.stderr]):
            stream.flush()
    if util := sys.modules.get("multiprocessing.util"):  # the names and the folder that workers of a data loader leave
        util._run_finalizers(0)
        shutil.rmtree(sys.modules["multiprocessing"].current_process()._config.get("tempdir", ""), ignore_errors=True)
    os._exit(code)


def open_closed() -> None:
    """Leads closed standard streams (``>&-``) nowhere from now on, here and in child processes: otherwise the next file
    that is opened would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere == number:
                os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", encoding="utf-8"))
