"""``plait trace``: steps through a function of a file on every rank, and writes a page with one column per rank.

plait trace FILE.py:body --mesh shard=4
plait trace FILE.py:body --mesh shard=4 --world process     each rank writes a file, and rank 0 merges them
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Literal

import tyro

from plait.checkpoint.files.writing import check_file, write_text
from plait.comm import Comm
from plait.messages.escape import say
from plait.run.config.machine import MachineConfig
from plait.run.course.merge import take_records, write_record
from plait.run.course.page import page
from plait.run.course.tracer import follow, ranks_apart, trace
from plait.run.job.user_code import load_name
from plait.run.launch.local import launch
from plait.table.mesh import AXES, Mesh


@dataclass(frozen=True)
class TraceConfig:
    """Step through a function of a file on every rank, and write a page with one column per rank."""

    function: tyro.conf.Positional[str]
    """A file and a function of one argument, the rank's comm, as in FILE.py:body."""
    mesh: str = "shard=4"
    """The axes and their sizes."""
    world: Literal["thread", "process"] = "thread"
    """Kind of a rank."""
    out: str = "trace.html"
    """The file to write."""


def run(config: TraceConfig, argv: Sequence[str] = ()) -> int:
    body = load_name(config.function, "function")
    if not isfunction(body):
        raise ValueError(f"function {config.function!r} is a {type(body).__name__}: name a function of the rank's comm")
    file = body.__code__.co_filename
    source = Path(file).read_text(encoding="utf-8")
    if config.world == "thread":
        write(config.out, lambda: page(config.function, source, trace(file, body, Mesh.parse(config.mesh))))
        return 0
    check_file("out", config.out)

    def rank(comm: Comm) -> int:
        with ranks_apart() as said:
            record = follow(comm, file, body, said)
        write_record(config.out, comm.rank, record)
        comm.barrier(AXES)
        if comm.rank == 0:
            write(config.out, lambda: page(config.function, source, take_records(config.out, comm.world_size)))
        return 0

    return launch(MachineConfig(mesh=config.mesh, world="process"), rank, ["-m", "plait", *argv])


def write(place: str, make: Callable[[], str]) -> None:
    """Writes a page, once its place is known to be writable."""
    check_file("out", place)
    text = make()
    write_text(place, text)
    say(f"written: {place} ({len(text.encode()):,} bytes); arrow keys step, #12 is step 12\n", sys.stdout)
