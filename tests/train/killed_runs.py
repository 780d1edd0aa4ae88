"""A run to its end, and again with kills: ``python killed_runs.py FOLDER "[3, 20]" '["train", ...]'``.

Each attempt is a separate process, forked from this one, which has imported torch and computed nothing.  It gets
SIGKILL as soon as its metrics have the given step.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from plait.run.commands.main import main


def attempt(words: list[str], metrics: Path, kill: int | None) -> int:
    """The exit code, or the signal's number below 0."""
    child = os.fork()
    if not child:
        os.close(1)
        os.open(os.devnull, os.O_WRONLY)
        os._exit(main(words))
    while kill is not None:
        if metrics.exists() and metrics.read_text().count("\n") >= kill:
            os.kill(child, signal.SIGKILL)
            break
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, kills: list[int], words: list[str]) -> None:
    for name, due in (("whole", []), ("part", kills)):
        out = folder / name
        for kill in (*due, None):
            code = attempt([*words, "--out", str(out), "--resume", "auto"], out / "metrics.jsonl", kill)
            assert code == (0 if kill is None else -signal.SIGKILL), (name, kill, code)


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
