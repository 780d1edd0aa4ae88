"""Predicts the messages of a redistribution or of an expression.

    >>> print(explain(y, "batch out"))
    all_gather over tensor of dim 1: 3072 bytes, this rank sends 2304

    >>> print(explain(model, x))                       any function of tensors; forward only
    all_reduce over tensor: 768 bytes, this rank sends 1152      (redistribute)

An expression runs on the ``meta`` device in a world that moves nothing, so it costs neither memory nor messages; the
lines are those that the ledger of this rank would show.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.comm.trace import TraceComm
from plait.sharded.dispatch import mapped, tensors_in
from plait.sharded.redistribute import NOTE
from plait.sharded.sharded_tensor import ShardedTensor
from plait.table.collectives import Entry, Note
from plait.table.layout import Layout, entries, path


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
        steps = self.steps or [f"{e.kind} over {', '.join(e.axes)}" for e in self.entries]
        left, kinds = iter(self.entries), {e.kind for e in self.entries}
        lines = [_line(step, next(left)) if step.split()[0] in kinds else f"{step}: sends nothing" for step in steps]
        return "\n".join(lines) or "sends nothing"


def _line(step: str, entry: Entry) -> str:
    about = " ".join(filter(None, [entry.note.phase, entry.note.unit]))
    return f"{step}: {entry.bytes} bytes, this rank sends {entry.sent}" + (f"      ({about})" if about else "")


def explain(what: Any, *args: Any, note: Note = NOTE, **kwargs: Any) -> Explanation:
    """Predicts the messages of ``what.redistribute(*args)`` for a ShardedTensor, or else of ``what(*args, **kwargs)``.

    Returns:
        The steps; as text, with the bytes of each. ``sent`` is what this rank would send in all.

    Raises:
        LayoutError: the expression is refused, as it would be when it runs.
        ValueError: no ShardedTensor among the arguments.
    """
    if isinstance(what, ShardedTensor):
        (end,) = args
        end = Layout.parse(end) if isinstance(end, str) else end
        spec, comm = what._spec, what.comm
        steps = path(spec.layout, end, comm.mesh)
        lines = entries(steps, tuple(spec.shape), comm.mesh, comm.rank, what.dtype.itemsize, note)
        return Explanation(tuple(lines), tuple(map(str, steps)))
    given = [t for t in tensors_in([args, kwargs]) if isinstance(t, ShardedTensor)]
    if not given and isinstance(what, torch.nn.Module):
        given = [p for p in what.parameters() if isinstance(p, ShardedTensor)]
    if not given:
        raise ValueError("explain(fn, ...) needs a ShardedTensor among the arguments, to know the mesh")
    comm = given[0].comm
    paper = TraceComm(comm.mesh, comm.rank, device="meta")
    with torch.no_grad(), _OnPaper(paper):
        what(*args, **kwargs)
    return Explanation(paper.ledger.entries)


class _OnPaper(TorchFunctionMode):
    """Every torch function on ``meta`` tensors of a world that moves nothing."""

    def __init__(self, comm: TraceComm) -> None:
        super().__init__()
        self.comm = comm
        self._made: dict[int, tuple[ShardedTensor, ShardedTensor]] = {}

    def _copy(self, x: Tensor) -> Tensor:
        if not isinstance(x, ShardedTensor):
            return x.detach().to("meta")
        if x.comm is self.comm:
            return x
        if id(x) not in self._made:  # one that comes twice is one, and is gathered once
            self._made[id(x)] = x, ShardedTensor(x.local.detach().to("meta"), x.sharding, self.comm, tuple(x.shape))
        return self._made[id(x)][1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = mapped(self._copy, (args, kwargs or {}))
        return func(*args, **kwargs)
