"""Runs cells under the plait of this interpreter, and writes a file for each: ``run_cells.py CELLS.json FOLDER``.

Workers are forks of one process that has imported torch and plait, so many cells cost one start.  A cell that raises
is written with its error.  The file of a cell is ``<digest>.pt``: tensors and JSON, nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import adapter
import torch
import torch._dynamo  # here, or the first optimizer of each worker imports it
from twin_cells import digest_of
from twin_programs_wings import PROGRAMS
from twin_rank import Rank, train
from twin_refusals_state import REFUSALS

Cell = dict[str, Any]
Notes = dict[str, Any]
FORK = multiprocessing.get_context("fork")
DEADLINE, WORKERS = 60.0, 2


def on_rank(cell: Cell, comm: Any, folder: str) -> Notes:
    """A rank's notes."""
    rank = Rank(cell, comm, folder)
    if cell["kind"] == "program":
        PROGRAMS[cell["program"]][0](rank)
    elif cell["kind"] == "refusal":
        REFUSALS[cell["refusal"]].run(rank)
    else:
        train(rank)
    return {"tensors": rank.tensors, "values": json.dumps(rank.values), "ledger": json.dumps(rank.ledger)}


def told(error: BaseException, folder: str) -> Notes:
    """An error as twins compare it: its type, and the names and numbers that it has."""
    kind, text = type(error).__name__, str(error).replace(folder, "FOLDER")
    if other := re.fullmatch(r"(?s)rank \d+ failed: (\w+): (.*)", text):  # ranks raise at once, and one is the first
        kind, text = other.groups()
    names = sorted({*re.findall(r"'([^'\n]{1,80})'", text)})
    numbers = sorted({*re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w.]*\w)", text)})
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and Path(frames[-1].filename).parent == Path(__file__).parent
    where = "".join(traceback.format_exception(error)[-12:])
    return {
        "type": kind,
        "names": names,
        "numbers": numbers,
        "text": text[:2000],
        "where": where,
        "own": own,
    }


def mesh_of(cell: Cell) -> str:
    return str(REFUSALS[cell["refusal"]].mesh if cell["kind"] == "refusal" else cell["mesh"])


def in_threads(cell: Cell, folder: str) -> list[Notes]:
    return adapter.on_threads(mesh_of(cell), lambda comm: on_rank(cell, comm, folder), DEADLINE)


def in_processes(cell: Cell, folder: str) -> list[Notes]:
    """The notes of ranks that are processes of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    size = 1
    for word in cell["mesh"].split():
        size *= int(word.split("=")[1])
    ranks = [FORK.Process(target=one_process, args=(cell, rank, size, port, folder)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    found = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(size)]
    for notes in found:
        if "error" in notes:
            raise RuntimeError(notes["error"])
    return found


def one_process(cell: Cell, rank: int, size: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    notes: Notes = {}
    try:
        comm = adapter.on_shared_memory(cell["mesh"], DEADLINE)
        notes = on_rank(cell, comm, folder)
        comm.close()
    except BaseException as error:
        notes = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
    torch.save(notes, Path(folder) / f"rank{rank}.pt")
    sys.stdout.flush()
    os._exit(0)


def run_cell(cell: Cell) -> Notes:
    """The notes of all ranks, or the error."""
    torch.manual_seed(0)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="twins") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            notes: Notes = {"ranks": (in_processes if cell["kind"] == "processes" else in_threads)(cell, folder)}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            notes = {"error": json.dumps(told(error, folder))}
    return notes | {"cell": cell["name"], "seconds": time.perf_counter() - started}


def write(cell: Cell, folder: Path) -> None:
    """Runs a cell and writes its file, whole or not at all."""
    notes = run_cell(cell)
    hidden = folder / f".{digest_of(cell)}.{os.getpid()}"
    torch.save(notes, hidden)
    hidden.rename(folder / f"{digest_of(cell)}.pt")


def work(cells: list[Cell], folder: Path, taken: Any) -> None:
    """Takes the next cell until none is left."""
    torch.set_num_threads(1)
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(cells):
            sys.stdout.flush()
            os._exit(0)  # threads of a cell that hangs are left behind
        write(cells[number], folder)
        print(".", end="", flush=True)


def main(file: str, to: str) -> None:
    cells, folder = json.loads(Path(file).read_text()), Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    cells.sort(key=lambda cell: cell["kind"] != "processes")  # long ones first
    taken = FORK.Value("i", 0)
    while taken.value < len(cells):  # a worker that dies takes the cell that it had with it
        workers = [FORK.Process(target=work, args=(cells, folder, taken)) for _ in range(min(WORKERS, len(cells)))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print(flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
