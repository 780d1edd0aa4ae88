"""One rank calls other collectives than the rest: a few lines each, and the check's expected message."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from plait.comm import Comm, MismatchError
from plait.referee.sanitize.collectives import check_collectives
from plait.table.collectives import Note

AXES = ("pipe", "replica", "shard", "tensor")

Fault = Callable[[Comm, bool], None]
"""The second argument says whether this rank is the odd one."""


def summed(comm: Comm, unit: str = "a", numel: int = 4, dtype: torch.dtype = torch.float32, op: str = "sum") -> None:
    comm.all_reduce(torch.ones(numel, dtype=dtype), AXES, op, Note("forward", unit)).wait()


def skip(comm: Comm, odd: bool) -> None:
    if not odd:
        summed(comm, "a")  # line: skipped
    summed(comm, "b")  # line: odd


def skip_of_equals(comm: Comm, odd: bool) -> None:
    if not odd:
        comm.barrier(AXES)  # line: skipped
    comm.barrier(AXES)  # line: odd


def extra(comm: Comm, odd: bool) -> None:
    if odd:
        summed(comm, "b")  # line: odd
    comm.barrier(AXES)  # line: others


def reorder(comm: Comm, odd: bool) -> None:
    for unit in ("b", "a") if odd else ("a", "b"):
        summed(comm, unit)


def other_dtype(comm: Comm, odd: bool) -> None:
    summed(comm, dtype=torch.float64 if odd else torch.float32)


def other_size(comm: Comm, odd: bool) -> None:
    summed(comm, numel=5 if odd else 4)


def other_reduction(comm: Comm, odd: bool) -> None:
    summed(comm, op="max" if odd else "sum")


def other_unit(comm: Comm, odd: bool) -> None:
    summed(comm, "b" if odd else "a")


def other_root(comm: Comm, odd: bool) -> None:
    comm.broadcast(torch.ones(3), AXES, 1 if odd else 0).wait()


def other_kind(comm: Comm, odd: bool) -> None:
    n = comm.world_size
    if odd:
        comm.all_gather(torch.ones(4 * n), torch.ones(4), AXES).wait()
    else:
        comm.all_reduce(torch.ones(4 * n), AXES).wait()


FAULTS: dict[Fault, str] = {
    skip: "unit 'a' .* unit 'b'",
    skip_of_equals: "other line",
    extra: "sum all_reduce of unit 'b' .*barrier|barrier.*sum all_reduce of unit 'b'",
    reorder: "other unit",
    other_dtype: "other dtype",
    other_size: "other elements",
    other_reduction: "other reduction",
    other_unit: "other unit",
    other_root: "with root 0 .* with root 1",
    other_kind: "other operation",
}


IN_PROCESSES = (skip, reorder, other_dtype, other_root)
"""Some of them, for worlds that take seconds to begin."""


def told(comm: Comm, fault: Fault, odd: int) -> str:
    """The message that this rank gets of a fault; at once, where the deadline is longer than the test may last."""
    check_collectives(comm)
    summed(comm)
    text = ""
    try:
        fault(comm, comm.rank == odd)
    except (MismatchError, ConnectionError) as error:
        text = str(error)
    assert text, "not told"
    return text


def line_of(fault: Fault, mark: str) -> str:
    """``comm/collective_faults.py:31``, of the line of a fault that ends with this comment."""
    lines, first = inspect.getsourcelines(fault)
    [number] = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# line: {mark}")]
    return f"comm/collective_faults.py:{number}"
