"""Runs a lesson's ``body`` on ranks that are processes, and compares each rank with the same rank as a thread.

plait lesson run 9 --world process                     plait starts the processes
torchrun --nproc-per-node 4 -m plait lesson run 9      torchrun does
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.run_threads import run
from plait.messages.escape import say
from plait.run.config.machine import MachineConfig
from plait.run.launch.local import launch
from plait.table.mesh import AXES, Mesh


def on_processes(number: int, lesson: Any, ranks: int | None, command: Sequence[str]) -> int:
    """Runs the body of a lesson's module on processes, ``ranks`` or those of its mesh, and returns the exit code.
    ``command`` has the words after ``python`` that come here again, now as a rank."""
    if not hasattr(lesson, "body"):
        raise ValueError(f"lesson {number} has no ranks, or starts them itself: plait lesson run {number}")
    mesh = mesh_of(number, lesson.MESH, ranks)
    return launch(MachineConfig(mesh=str(mesh), world="process"), partial(_compare, number, lesson), command)


def mesh_of(number: int, text: str, ranks: int | None) -> Mesh:
    """The mesh of a lesson with another number of ranks on its only axis, or on ``shard`` if it has several."""
    mesh = Mesh.parse(text)
    if ranks is None or ranks == mesh.size:
        return mesh
    sizes = {axis: mesh.axis(axis) for axis in AXES if mesh.axis(axis) > 1}
    axis = next(iter(sizes)) if len(sizes) == 1 else "shard"
    others = mesh.size // sizes[axis]
    if ranks < 1 or ranks % others:
        raise ValueError(f"lesson {number}: {ranks} ranks do not make its mesh {text!r}: give a multiple of {others}")
    return Mesh(**(sizes | {axis: ranks // others}))


def _compare(number: int, lesson: Any, comm: Comm) -> int:
    """Compares this process's result and bytes with those of the same rank as a thread; rank 0 reports for all."""

    def result(comm: Comm) -> tuple[object, int]:
        return lesson.body(comm), comm.ledger.sent

    found, expected = result(comm), run(comm.mesh, result)[comm.rank]
    verdicts = torch.empty(comm.world_size, dtype=torch.int64)
    comm.all_gather(verdicts, torch.tensor([int(same(found, expected))]), AXES).wait()
    wrong = [rank for rank, verdict in enumerate(verdicts.tolist()) if not verdict]
    where = f"lesson {number} on {comm.world_size} processes, {comm.mesh}"
    verdict = f"each rank has its thread's values, to the bit; rank 0 sent {found[1]:,} bytes"
    if wrong:
        verdict = f"ranks {wrong} differ from the same ranks as threads"
    say(f"{where}: {verdict}\n", sys.stdout)
    return int(bool(wrong))


def same(found: Any, expected: Any) -> bool:
    """True if two results are equal, with every tensor equal to the bit."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)
