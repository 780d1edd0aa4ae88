"""Updates parameters that the tensor or expert axis cuts, by an optimizer that looks at whole tensors.

    gather     every rank's piece of the values and of the gradient    to the parameter's owner
    update     the owner's optimizer has the whole parameter
    scatter    the new values                                          to every rank its piece

Each parameter has one owner among the ranks that share it, so its update is computed once and its state exists once.
Between steps the owner keeps the state, and no whole values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm.padded import padded
from plait.table.collectives import UPDATE, Note
from plait.table.flat import Run, Slot
from plait.table.tensor_cut import TensorCut
from plait.tensor.pieces import assemble, piece_of
from plait.zero.elementwise import is_elementwise
from plait.zero.owned import Owned
from plait.zero.storage import placeholder


@dataclass(frozen=True)
class WholeUpdate:
    """One parameter's gather and scatter, on a rank that has a piece of it."""

    piece: Owned
    cut: TensorCut
    owner: int
    """The owner's index among the ranks that share the parameter."""
    whole: Owned | None
    """The whole parameter, on its owner.  Its ``view`` has values only during the update."""

    def gather(self) -> None:
        """Brings values and gradient to the owner, before its update; does nothing if the step has no gradient."""
        view = self.piece.view
        if view.grad is None:
            return
        values, gradient = self._gathered(view.detach()), self._gathered(view.grad)
        if self.whole is not None and values is not None:
            self.whole.view.data, self.whole.view.grad = values, gradient

    @torch.no_grad()
    def scatter(self) -> None:
        """Brings every rank its piece of the new values, after the update."""
        view, axes, comm = self.piece.view, self.piece.flat.axes.cut, self.piece.flat.comm
        if view.grad is None:
            return
        mine, pieces = padded(view.detach(), self.cut.dim, self._longest).to(comm.device, copy=True).contiguous(), None
        if self.whole is not None:
            values, nothing = self.whole.view.detach().to(comm.device), placeholder(view.dtype, view.device)
            each = [piece_of(values, self.cut, index) for index in range(self.cut.ways)]
            pieces = torch.stack([padded(piece, self.cut.dim, self._longest) for piece in each])
            self.whole.view.data, self.whole.view.grad = nothing.expand(self.cut.shape), None
        comm.scatter(mine, pieces, axes, self.owner, Note(UPDATE, self.piece.name)).wait()
        view.copy_(mine.narrow(self.cut.dim, 0, view.size(self.cut.dim)))

    @property
    def _longest(self) -> int:
        return self.cut.local_shape(0)[self.cut.dim]

    def _gathered(self, values: Tensor) -> Tensor | None:
        """Returns the whole tensor on the owner, from every rank's piece."""
        flat, dim, ways = self.piece.flat, self.cut.dim, self.cut.ways
        piece = padded(values.to(flat.comm.device), dim, self._longest).contiguous()
        pieces = piece.new_empty((ways, *piece.shape)) if self.whole is not None else None
        flat.comm.gather(pieces, piece, flat.axes.cut, self.owner, Note(UPDATE, self.piece.name)).wait()
        if pieces is None:
            return None
        cut = [p.narrow(dim, 0, self.cut.local_shape(index)[dim]) for index, p in enumerate(pieces)]
        return assemble(cut, self.cut).to(values.device)


def whole_updates(
    optimizer: Optimizer, cuts: Mapping[str, TensorCut], by_name: dict[str, list[Owned]]
) -> list[WholeUpdate]:
    """Gives each cut parameter of an optimizer an owner, the rank with the fewest elements so far.

    Args:
        cuts: the cuts of the optimizer's parameters, by name.
        by_name: this rank's runs.  A whole parameter replaces its piece on the owner; on other ranks it has no runs.

    Returns:
        One for each piece of this rank; none for an element-wise optimizer, which updates pieces.

    Raises:
        ValueError: ranks without a piece, or an optimizer that changes parameters between steps.
    """
    if is_elementwise(optimizer) or not cuts:
        return []
    _check(optimizer, cuts)
    made, loads = list[WholeUpdate](), dict[tuple[str, ...], list[int]]()
    for name, cut in cuts.items():
        pieces, by_name[name] = by_name.get(name, []), []
        for piece in pieces:
            owners, numel = loads.setdefault(piece.flat.axes.cut, [0] * cut.ways), math.prod(cut.shape)
            owner = owners.index(min(owners))
            owners[owner] += numel
            made.append(WholeUpdate(piece, cut, owner, None))
            if owner == piece.flat.tensor_rank:
                nothing = placeholder(piece.view.dtype, piece.view.device).expand(cut.shape)
                run = Run(Slot(name, cut.shape, 0), 0, numel, 0)
                whole = replace(piece, run=run, view=nn.Parameter(nothing), whole=True)
                whole.view.piece = whole  # type: ignore[attr-defined]
                by_name[name].append(whole)
                made[-1] = replace(made[-1], whole=whole)
    return made


def _check(optimizer: Optimizer, cuts: Mapping[str, TensorCut]) -> None:
    kind = type(optimizer).__name__
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise ValueError(
            f"{kind} changes parameters between steps, in train() and eval(), and if the tensor or expert axis cuts "
            f"one, a rank has only a piece: if it is element-wise, call plait.elementwise(optimizer); else leave its "
            f"modules out of the tensor plan"
        )
    for name, cut in cuts.items():
        if not cut.local_shape(cut.ways - 1)[cut.dim]:
            raise ValueError(
                f"{kind} looks at whole tensors, and dim {cut.dim} of {name!r}, {list(cut.shape)}, leaves a rank of "
                f"{cut.ways} no piece: give it to another optimizer, or leave its module out of the tensor plan"
            )
