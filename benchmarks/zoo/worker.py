"""A process for each model, forked from one that has torch and transformers in memory already.

The child writes a line when a layout begins and one when it ends. If it dies or takes too long, that layout
is a crash, and another child goes on after it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from catalogue import Entry, NotBuiltError, build, declare_torchvision
from trial import Trial

Row = dict[str, Any]


def examine(entry: Entry, layouts: Sequence[str], write: Callable[[str, Any], None]) -> None:
    """Runs every layout of one model; ``write`` gets the beginning (None) and the end of each."""
    write("build", None)
    try:
        model, batches = build(entry)
        trial = Trial(model, batches)
        trial.check()
    except NotBuiltError as error:
        write("not built", str(error))
        return
    write("about", {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())})
    for name in layouts:
        write(name, None)
        write(name, asdict(trial.run(name)))


def preload() -> None:
    """Have in memory what nearly every model imports, before the first fork."""
    declare_torchvision()
    for module in ("modeling_utils", "generation", "models.auto.modeling_auto", "models.llama.modeling_llama"):
        importlib.import_module(f"transformers.{module}")


@dataclass
class Child:
    """A process that examines one model."""

    entry: Entry
    layouts: tuple[str, ...]
    path: Path
    pid: int = 0
    started: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._main()

    def _main(self) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            log = os.open(self.path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            warnings.simplefilter("ignore")
            with self.path.open("a", encoding="utf-8") as file:

                def write(what: str, value: Any) -> None:
                    file.write(json.dumps([what, value]) + "\n")
                    file.flush()

                examine(self.entry, self.layouts, write)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)

    def lines(self) -> list[Any]:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


def ended(child: Child, deadline: float) -> str | None:
    """The child's end ('' if well), None while it runs; a child past its deadline is ended."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid == 0:
        if time.monotonic() - child.started < deadline:
            return None
        os.killpg(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        return f"no answer in {deadline:.0f} s"
    code = os.waitstatus_to_exitcode(status)
    return "" if code == 0 else f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def examined(
    chosen: Sequence[Entry], layouts: Sequence[str], folder: Path, *, jobs: int, deadline: float
) -> Iterator[tuple[Entry, Row]]:
    """The rows as they come, of so many children at a time."""
    waiting = [Child(entry, tuple(layouts), folder / f"{entry.kind}-{entry.name}.jsonl") for entry in chosen]
    waiting.reverse()
    running: list[Child] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop())
            running[-1].start()
        time.sleep(0.05)
        for child in list(running):
            how = ended(child, deadline)
            if how is None:
                continue
            running.remove(child)
            lines = child.lines()
            done = {what: value for what, value in lines if value is not None}
            if how and (open_ones := [w for w, v in lines if v is None and w in layouts and w not in done]):
                with child.path.open("a", encoding="utf-8") as file:
                    value = {
                        "word": "crash",
                        "why": how,
                        "difference": 0,
                        "ledger": [],
                        "once": True,
                        "seconds": 0,
                        "traceback": "",
                    }
                    file.write(json.dumps([open_ones[-1], value]) + "\n")
                    done[open_ones[-1]] = value
                if left := tuple(name for name in layouts if name not in done):
                    waiting.append(Child(child.entry, left, child.path))
                    continue
            elif how:
                done.setdefault("not built", f"on one process, {how}")
            yield child.entry, {"kind": child.entry.kind, "name": child.entry.name, **done}
