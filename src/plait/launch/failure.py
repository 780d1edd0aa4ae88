"""What a failed run prints: one line for a mistake of the user, the original traceback for anything else.

    raised on a rank                      printed                         exit code
    ValueError by plait                   plait: error: <message>         2
    FloatingPointError by plait           plait: error: <message>         1
    a disk that is full or gone           plait: error: <message>         1
    any other exception                   its traceback                   1
    (killed by a signal)                  plait: rank 3 was killed ...    128 + signal

A rank that plait started prints nothing itself.  It writes the file that torch's elastic agent hands out
(``TORCHELASTIC_ERROR_FILE``), and the launcher prints the *first* failure: the others are only its echo.  The agent
stamps failures to the second; the nanoseconds here tell cause from echo.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.comm.agree import OtherRankError
from plait.files.writing import DiskError

MISTAKE = 2
"""The exit code of bad input, the same as argparse's."""

ERROR = "plait: error:"
"""How a line begins that says all there is to say."""

LAUNCHER = "PLAIT_LAUNCHER"
"""Set for ranks that plait started: the launcher's process id."""


@dataclass(frozen=True)
class Failure:
    """One rank's end, as the launcher learns of it."""

    rank: int
    exit_code: int
    """Negative: the signal that killed it."""
    text: str = ""
    """What is to be printed; empty where the rank has printed it itself, or could not."""
    nanoseconds: int = 0


def is_mistake(error: BaseException, kinds: tuple[type[Exception], ...] = (ValueError,)) -> bool:
    """Whether this is plait refusing an input: an error of one of these kinds that was raised in its own code."""
    if not isinstance(error, kinds) or error.__traceback__ is None:
        return False
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "plait"


def guarded(work: Callable[[], int]) -> int:
    """Runs ``work`` and returns its exit code; what it raises is printed, and becomes one."""
    try:
        return work()
    except KeyboardInterrupt:
        if LAUNCHER not in os.environ:
            sys.stderr.write("plait: stopped by SIGINT\n")
        return 128 + signal.SIGINT
    except Exception as error:
        return report(error)


def report(error: BaseException, environment: Mapping[str, str] = os.environ) -> int:
    """Prints what went wrong, or records it for the launcher to print; returns the exit code.  What plait refuses is a
    line, with a grid below it where there is one; anything else is its traceback."""
    text = "".join(traceback.format_exception(error))
    if is_mistake(error, (ValueError, FloatingPointError)) or isinstance(error, DiskError | OtherRankError):
        reason, *grid = str(error).split("\n")
        line = " ".join([ERROR, *reason.split(), *getattr(error, "__notes__", ())])
        text = "\n".join([line, *grid, ""])
    path = environment.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now = time.time_ns()
        extra = {"py_callstack": text, "timestamp": str(now // 10**9), "nanoseconds": now}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    if not path or LAUNCHER not in environment:
        sys.stdout.flush()
        sys.stderr.write(text)
    return MISTAKE if is_mistake(error) else 1


def recorded(rank: int, exit_code: int, data: Mapping[str, Any]) -> Failure:
    """What ``report`` wrote, read back from the elastic agent's copy of the file."""
    message = data.get("message")
    if not isinstance(message, dict):
        return Failure(rank, exit_code, nanoseconds=time.time_ns())
    extra = message["extraInfo"]
    return Failure(rank, exit_code, message["message"], extra.get("nanoseconds", int(extra["timestamp"]) * 10**9))


def explain(failures: list[Failure], mesh: str) -> tuple[str, int]:
    """(what the launcher prints, its exit code) for the failures of a run.  A rank that a signal killed comes first: it
    left no note, and the tracebacks of the others are echoes.  SIGTERM, with which the agent stops the rest, is last.
    """

    def order(f: Failure) -> tuple[bool, bool, bool, int]:
        return f.exit_code == -signal.SIGTERM, f.exit_code >= 0, not f.text, f.nanoseconds

    first = min(failures, key=order)
    who = f"plait: rank {first.rank} of mesh {mesh}"
    if first.exit_code < 0:
        number = -first.exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        return f"{who} was killed by {name}{hint}; the others were stopped\n", 128 + number
    if first.text.startswith(ERROR) and first.exit_code != MISTAKE:
        return f"{first.text.rstrip()} (raised on rank {first.rank}, mesh {mesh})\n", first.exit_code
    if first.text and first.exit_code != MISTAKE:
        return f"{first.text}{who} failed as above; the others were stopped\n", first.exit_code
    return first.text, first.exit_code
