"""The pieces that this rank's optimizer updates.

An engine takes an optimizer that was built on the model's parameters and replaces the lists in its parameter groups,
once: each parameter by the runs of it that this rank owns.

    group 0: [w, b]          rank 0: [w[0:32]]               lr, weight decay, betas: untouched
                             rank 1: [w[32:35], b]

An optimizer that was built on ``engine.parameters()`` has the pieces already, and keeps its lists.  States are made at
the first step, so those of elements that a rank does not own never exist.  Updates happen in place in the unit's
storage, and learning-rate schedules that hold the optimizer go on working.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.table.flat import Run
from plait.table.tensor_cut import TensorCut
from plait.zero.elementwise import check_elementwise, has_stepped, rebuilt
from plait.zero.flat_gradient import FlatGradient, view_of
from plait.zero.place import RunPlace
from plait.zero.storage import Flat


@dataclass(eq=False)
class Owned:
    """One run of a parameter that this rank's optimizer updates.

    ``view`` and ``gradient`` have the parameter's shape where the run is the whole of it, and are flat otherwise.
    """

    name: str
    run: Run
    flat: Flat
    cut: TensorCut | None
    """The parameter's cut over the tensor axis; the run is in this rank's piece of it."""
    view: nn.Parameter
    """A view of the unit's storage, or of its master weights."""
    gradient: Tensor
    """A view of the accumulator, or an adopted gradient, which is another tensor in each step."""
    converts: bool
    """True if the optimizer has another dtype or device than the sums."""

    @property
    def place(self) -> RunPlace:
        """The run's regions in the whole parameter."""
        return RunPlace(self.run, self.cut, self.flat.tensor_rank)


def owned_runs(gradients: Iterable[FlatGradient]) -> list[Owned]:
    """Every run that the row's optimizer cell gives this rank.  Each ``view`` has its ``Owned`` as ``view.piece``."""
    owned = []
    for g in gradients:
        flat, updated = g.flat, g.flat.updated
        converts = (flat.sum_dtype, flat.rest.device) != (updated.dtype, updated.device)
        for cut, run in ((cut, flat.layout.run(i, *flat.optim_place)) for i, cut in enumerate(flat.cuts)):
            if run is None:
                continue
            view = nn.Parameter(view_of(run, updated))
            piece = Owned(run.slot.name, run, flat, cut, view, g.piece(run), converts)
            view.piece = piece  # type: ignore[attr-defined]
            g.pieces.append(piece)
            owned.append(piece)
    return owned


def give_gradients(owned: Iterable[Owned], touched: Mapping[str, bool]) -> None:
    """Gives each piece its gradient, or None where no rank has one for the parameter; an update comes next."""
    for piece in owned:
        gradient = piece.gradient if touched[piece.name] else None
        piece.view.grad = gradient.to(piece.view) if gradient is not None and piece.converts else gradient


class OwnedOptimizer:
    """The optimizers of an engine, which have only the runs that this rank owns.

    Args:
        names: of the model's parameters, by ``id``.
        owned: the runs that this rank owns.
        cuts: a run may be part of a parameter.
        over_tensor: the parameters that the tensor axis cuts.

    Raises:
        ValueError: parameters that are not the model's, one that is in two optimizers or groups, an optimizer that has
            made steps, or one that is not element-wise although the layout cuts its parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[int, str],
        owned: Sequence[Owned],
        *,
        cuts: bool,
        over_tensor: Collection[str] = (),
    ) -> None:
        self.optimizers, self.owned = tuple(optimizers), list(owned)
        self.groups: dict[Optimizer, list[list[str]]] = {}
        """Names of the parameters in each group, by optimizer, in the order in which they were given."""
        self.by_name: dict[str, list[Owned]] = {}
        for piece in self.owned:
            self.by_name.setdefault(piece.name, []).append(piece)
        names = {**names, **{id(piece.view): piece.name for piece in self.owned}}
        holder: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            if has_stepped(optimizer):
                raise ValueError(
                    "the optimizer has made steps already: hand over a new one, and give it the state of this one by "
                    "engine.load_optimizer_state_dict(old.state_dict())"
                )
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if (first := holder.setdefault(id(parameter), optimizer)) is not optimizer:
                    raise ValueError(
                        f"{names.get(id(parameter), 'a parameter')!r} is in two optimizers, {type(first).__name__} and "
                        f"{type(optimizer).__name__}: give it to one of them"
                    )
            self._take(optimizer, names, cuts=cuts, over_tensor=set(over_tensor))

    def _take(self, optimizer: Optimizer, names: Mapping[int, str], *, cuts: bool, over_tensor: set[str]) -> None:
        """Checks an optimizer, and points its groups at the pieces."""
        groups = optimizer.param_groups
        if any(id(p) not in names for group in groups for p in group["params"]):
            raise ValueError(
                "the optimizer holds parameters that are not the model's: build it on model.parameters() of this very "
                "model, before plait cuts them, or on engine.parameters()"
            )
        own = [list(dict.fromkeys(names[id(p)] for p in group["params"])) for group in groups]
        cut_here = sorted(over_tensor & {name for group in own for name in group})
        if cuts or cut_here:
            check_elementwise(optimizer, cut_here)
        self.groups[optimizer] = own
        for group, names_of_group in zip(groups, own, strict=True):
            group["params"] = self.views(names_of_group)
        if any(optimizer.state.values()):  # made when the optimizer was built, for whole parameters (Adagrad)
            optimizer.state.clear()
            if here := [group for group in groups if group["params"]]:
                optimizer.state.update(rebuilt(optimizer, here).state)

    def check_groups(self) -> None:
        """Raises ValueError if a program has added a group since: its parameters would not train."""
        for optimizer in self.optimizers:
            if len(optimizer.param_groups) != len(self.groups[optimizer]):
                raise ValueError(
                    f"a parameter group was added to {type(optimizer).__name__} after its Engine was built: build all "
                    f"groups first (with lr=0 until they are to train), then the Engine"
                )

    def views(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The pieces of these parameters that this rank updates."""
        return [piece.view for name in names for piece in self.by_name.get(name, ())]

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state, step counters and master weights left out."""
        states = [one.state.get(piece.view, {}) for piece in self.owned for one in self.optimizers]
        return sum(v.nbytes for state in states for key, v in state.items() if torch.is_tensor(v) and key != "step")
