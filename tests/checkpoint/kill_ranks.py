"""Kills ranks in the middle of saves, again and again: ``python kill_ranks.py <folder> <kills> <seed>``.

    trial    ranks are forked from this process, which has imported everything; they load the newest checkpoint, hold it
             against what was noted when it was saved, and then step and save until they are killed
    kill     before a rank's n-th operation on a file in a save (n goes through all of them), or at a random moment;
             the other ranks at once, or a little later
    after    every checkpoint that is there is whole, and the newest no older than the newest before

It prints a line of JSON for each trial; the exit status is 1 where something was lost.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from ports import free_port

import plait
from plait.checkpoint.places import checkpoints
from plait.checkpoint.stored import Checkpoint
from plait.step import Engine

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}
MOST = {0: 52, 1: 4, 2: 4}
"""Operations of a rank from the begin of a save to the begin of the next."""
PATIENCE = 60.0


@dataclass(frozen=True)
class Trial:
    number: int
    ranks: int
    background: bool
    victim: int
    operation: int | None
    """Before which operation of its second save the victim kills itself; None: the launcher kills it."""
    seconds: float
    """At most so many after the first save."""
    together: bool
    """All ranks are killed with it; else they live for a moment."""


def trials(seed: int) -> Iterator[Trial]:
    """Half by operations, half by time; synchronous and asynchronous in turn."""
    draw = random.Random(seed)
    places = [(rank, n) for rank, most in MOST.items() for n in range(1, most + 1)]
    draw.shuffle(places)
    named = itertools.cycle(places)
    for number in itertools.count():
        ranks, background = draw.choice((2, 3)), bool(number & 1)
        victim, operation = next(named) if number & 2 else (draw.randrange(ranks), None)
        yield Trial(
            number, ranks, background, victim % ranks, operation, draw.uniform(0, 0.4), together=draw.random() < 0.5
        )


def digest(engine: Engine) -> str:
    """Of parameters and optimizer state; all ranks call it together."""
    whole = hashlib.sha256()
    state = engine.optimizer_state_dict()["state"]
    for name, value in engine.full_state_dict().items():
        for tensor in (value, *(state.get(name, {}).values())):
            whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def noted(path: Path) -> dict[int, str]:
    """What was last noted of each step."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): text for step, text in (line.split() for line in lines if line.count(" ") == 1)}


def rank_main(folder: Path, notes: Path, trial: Trial, rank: int, port: int, told: int) -> None:
    """Loads, compares, and saves until it is killed."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(trial.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    comm = plait.join(f"shard={trial.ranks}", deadline=20)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1001), torch.nn.Linear(1001, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)
    if checkpoints(folder):
        step = plait.load(folder, engine).step
        found, expected = digest(engine), noted(notes).get(step)
        if found != expected:
            raise AssertionError(f"step {step} was saved as {expected} and is loaded as {found}")
    saver = plait.Saver(folder, engine, keep=2, background=trial.background)
    for number in itertools.count():
        if number == 1 and rank == 0:
            os.write(told, b"saved\n")
        engine.backward(model(torch.ones(2, 64)).square().sum(), 2)
        optimizer.step()
        now = digest(engine)
        if not rank:
            with notes.open("a") as file:
                file.write(f"{engine.steps} {now}\n")
        if number == 1 and rank == trial.victim and trial.operation is not None:
            arm(trial.operation)
        saver.save(extra={"step": engine.steps})
        if not number:
            saver.wait()  # what kills have left beyond what is kept is gone then


def arm(operation: int) -> None:
    """Kill this process before its n-th operation on files from now on."""
    left = itertools.count(operation - 1, -1)

    def hook(event: str, arguments: Any) -> None:
        if event in OPERATIONS and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def forked(folder: Path, notes: Path, trial: Trial, rank: int, port: int, told: int) -> int:
    """A new process that is this rank."""
    if process := os.fork():
        return process
    try:
        rank_main(folder, notes, trial, rank, port, told)
    except (OSError, RuntimeError):
        os._exit(1)  # another rank is gone
    except BaseException:
        traceback.print_exc()
    os._exit(3)


def play(folder: Path, notes: Path, trial: Trial) -> list[int]:
    """The exit statuses of a trial's ranks."""
    port, (reads, writes) = free_port(), os.pipe()
    processes = [forked(folder, notes, trial, rank, port, writes) for rank in range(trial.ranks)]
    os.close(writes)
    saved = select.select([reads], [], [], PATIENCE)[0] and os.read(reads, 1)
    os.close(reads)
    victim = processes[trial.victim]
    end = time.monotonic() + (trial.seconds if trial.operation is None else PATIENCE / 20)
    while saved and time.monotonic() < end and not os.waitid(os.P_PID, victim, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.002)
    os.kill(victim, signal.SIGKILL)
    time.sleep(0 if trial.together else 0.1)
    for process in processes:
        os.kill(process, signal.SIGKILL)  # one that has ended is there until it is waited for
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    if not saved or 3 in statuses:
        raise AssertionError(f"{trial}: the ranks ended with {statuses}")
    return statuses


def newest(folder: Path) -> int:
    """The steps of the newest checkpoint, 0 where there is none; every one that is there is whole."""
    steps = [0]
    for there in checkpoints(folder):
        saved = Checkpoint.find(there)
        saved.check()
        steps.append(saved.manifest.step)
    return steps[-1]


def main(folder: Path, kills: int, seed: int) -> None:
    """So many trials."""
    torch.optim.AdamW([torch.zeros(1)])  # the first optimizer imports eight hundred modules, which no rank has to again
    before, start = 0, time.monotonic()
    for trial in itertools.islice(trials(seed), kills):
        statuses = play(folder, folder.with_name("notes"), trial)
        after = newest(folder)
        if after < before:
            raise AssertionError(f"{trial}: the newest checkpoint was {before}, and is {after}")
        hidden = [entry.name for entry in folder.iterdir() if entry.name.startswith(".step")]
        found = {"before": before, "after": after, "left": len(hidden), "whole": len(checkpoints(folder))}
        seconds = round(time.monotonic() - start, 1)
        print(json.dumps({**asdict(trial), **found, "statuses": statuses, "at": seconds}), flush=True)
        before = after


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
