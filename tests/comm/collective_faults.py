"""One rank calls other collectives than the rest: a few lines each, and the check's expected message."""

import inspect
from collections.abc import Callable
from typing import Any

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


def other(**how: Any) -> Fault:
    """The odd rank's sum is another one."""
    return lambda comm, odd: summed(comm, **how if odd else {})


def other_root(comm: Comm, odd: bool) -> None:
    comm.broadcast(torch.ones(3), AXES, 1 if odd else 0).wait()


def other_kind(comm: Comm, odd: bool) -> None:
    n = comm.world_size
    if odd:
        comm.all_gather(torch.ones(4 * n), torch.ones(4), AXES).wait()
    else:
        comm.all_reduce(torch.ones(4 * n), AXES).wait()


FAULTS: dict[str, tuple[Fault, str]] = {
    "skip": (skip, "unit 'a' .* unit 'b'"),
    "skip of equals": (skip_of_equals, "other line"),
    "extra": (extra, "sum all_reduce of unit 'b' .*barrier|barrier.*sum all_reduce of unit 'b'"),
    "reorder": (reorder, "other unit"),
    "dtype": (other(dtype=torch.float64), "other dtype"),
    "size": (other(numel=5), "other elements"),
    "reduction": (other(op="max"), "other reduction"),
    "unit": (other(unit="b"), "other unit"),
    "root": (other_root, "with root 0 .* with root 1"),
    "kind": (other_kind, "other operation"),
}
IN_PROCESSES = ("skip", "reorder", "dtype", "root")
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
