"""What a redistribution or an expression would send, before it sends anything.

    >>> print(explain(y, "batch out"))
    all_gather over tensor of dim 1: 3072 bytes, this rank sends 2304

    >>> print(explain(model, x))                       any function of tensors; forward only
    all_reduce over tensor: 768 bytes, this rank sends 1152      (redistribute)

An expression runs on the ``meta`` device in a world that moves nothing, so it costs neither memory nor messages; the
lines are those that the ledger of this rank would show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.comm.trace import TraceComm
from plait.core.collectives import Entry, Note
from plait.core.layout import Layout, entries, path
from plait.sharded.dispatch import tensors_in
from plait.sharded.redistribute import NOTE
from plait.sharded.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Explanation:
    """The lines of this rank's ledger, and the steps in words where they are known."""

    entries: tuple[Entry, ...]
    steps: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that this rank would send."""
        return sum(e.sent for e in self.entries)

    def __str__(self) -> str:
        words = self.steps or tuple(f"{e.kind} over {', '.join(e.axes)}" for e in self.entries)
        lines = []
        left = iter(self.entries)
        for step in words:
            entry = next(left) if step.split()[0] in {e.kind for e in self.entries} else None
            lines.append(f"{step}: sends nothing" if entry is None else _line(step, entry))
        return "\n".join(lines) or "sends nothing"


def _line(step: str, entry: Entry) -> str:
    about = " ".join(filter(None, [entry.note.phase, entry.note.unit]))
    return f"{step}: {entry.bytes} bytes, this rank sends {entry.sent}" + (f"      ({about})" if about else "")


def explain(what: Any, *args: Any, note: Note = NOTE, **kwargs: Any) -> Explanation:
    """What ``x.redistribute(layout)`` or ``fn(*args, **kwargs)`` would send.

    Args:
        what: a ShardedTensor, and then a layout; or a function (a module), and then its arguments.

    Raises:
        LayoutError: the expression is refused, as it would be when it runs.
    """
    if isinstance(what, ShardedTensor):
        (end,) = args
        end = Layout.parse(end) if isinstance(end, str) else end
        spec, comm = what._spec, what.comm
        steps = path(spec.layout, end, comm.mesh)
        lines = entries(steps, tuple(spec.shape), comm.mesh, comm.rank, what.dtype.itemsize, note)
        return Explanation(tuple(lines), tuple(map(str, steps)))
    return _expression(what, args, kwargs)


def _expression(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    given = [t for t in tensors_in([args, kwargs]) if isinstance(t, ShardedTensor)]
    if not given and isinstance(fn, torch.nn.Module):
        given = [p for p in fn.parameters() if isinstance(p, ShardedTensor)]
    if not given:
        raise ValueError("explain(fn, ...) needs a ShardedTensor among the arguments, to know the mesh")
    comm = given[0].comm
    paper = TraceComm(comm.mesh, comm.rank, device="meta")
    with torch.no_grad(), _OnPaper(paper):
        fn(*args, **kwargs)
    return Explanation(paper.ledger.entries)


class _OnPaper(TorchFunctionMode):
    """Every torch function on ``meta`` tensors of a world that moves nothing."""

    def __init__(self, comm: TraceComm) -> None:
        super().__init__()
        self.comm = comm

    def _copy(self, value: Any) -> Any:
        if isinstance(value, ShardedTensor) and value.comm is not self.comm:
            return ShardedTensor(value.local.detach().to("meta"), value.sharding, self.comm, tuple(value.shape))
        if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
            return value.detach().to("meta")
        if isinstance(value, list | tuple):
            return type(value)(self._copy(v) for v in value) if type(value) in (list, tuple) else value
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(self._copy, args), **{k: self._copy(v) for k, v in (kwargs or {}).items()})
