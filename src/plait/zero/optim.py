"""The pieces that this rank's optimizer updates.

An engine takes an optimizer that was built on the model's parameters and replaces the lists in its parameter groups,
once: each parameter becomes the runs of it that this rank owns.

    group 0: [w, b]          rank 0: [w[0:32]]               lr, weight decay, betas: untouched
                             rank 1: [w[32:35], b]

An optimizer that was built on ``engine.parameters()`` has the pieces already, and keeps its lists.  States are created
at the first step, so states of elements that a rank does not own never exist.  Updates happen in place in the unit's
storage, and learning-rate schedules that hold the optimizer keep working.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from plait.table.tensor_cut import TensorCut
from plait.zero.elementwise import check_elementwise, has_stepped, rebuilt
from plait.zero.owned import Owned
from plait.zero.whole_update import WholeUpdate, whole_updates


def give_gradients(owned: Iterable[Owned], touched: Mapping[str, bool]) -> None:
    """Gives each piece its gradient, or None where no rank has one for the parameter; an update comes next."""
    for piece in owned:
        gradient = piece.gradient if touched[piece.name] else None
        piece.view.grad = gradient.to(piece.view) if gradient is not None and piece.converts else gradient


class OwnedOptimizer:
    """The optimizers of an engine, which have only the runs that this rank owns.

    Args:
        names: the names of the model's parameters, by ``id``.
        owned: the runs that this rank owns.
        cuts: True if a run may be part of a parameter.
        over_tensor: the cuts of parameters by the tensor or expert axis.

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
        over_tensor: Mapping[str, TensorCut],
    ) -> None:
        self.optimizers = tuple(optimizers)
        self.groups: dict[Optimizer, list[list[str]]] = {}
        """The names of the parameters in each group, by optimizer, in the order in which they were given."""
        self.by_name: dict[str, list[Owned]] = {}
        for piece in owned:
            self.by_name.setdefault(piece.name, []).append(piece)
        self.whole_updates: dict[Optimizer, list[WholeUpdate]] = {}
        """The cut parameters that an optimizer updates whole."""
        names = {**names, **{id(piece.view): piece.name for piece in owned}}
        holder: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            if has_stepped(optimizer):
                raise ValueError(
                    "the optimizer has made steps already: give a new one, and give it the state of this one by "
                    "engine.load_optimizer_state_dict(old.state_dict())"
                )
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if (first := holder.setdefault(id(parameter), optimizer)) is not optimizer:
                    raise ValueError(
                        f"{names.get(id(parameter), 'a parameter')!r} is in two optimizers, {type(first).__name__} and "
                        f"{type(optimizer).__name__}: give it to one of them"
                    )
            self._take(optimizer, names, cuts=cuts, over_tensor=over_tensor)

    def _take(
        self, optimizer: Optimizer, names: Mapping[int, str], *, cuts: bool, over_tensor: Mapping[str, TensorCut]
    ) -> None:
        """Checks an optimizer, and points its groups at the pieces."""
        groups = optimizer.param_groups
        if any(id(p) not in names for group in groups for p in group["params"]):
            raise ValueError(
                "the optimizer holds parameters that are not the model's: build it on model.parameters() of this very "
                "model, before plait cuts them, or on engine.parameters()"
            )
        own = [list(dict.fromkeys(names[id(p)] for p in group["params"])) for group in groups]
        if cuts:
            check_elementwise(optimizer)
        cut_here = {name: over_tensor[name] for group in own for name in group if name in over_tensor}
        self.whole_updates[optimizer] = whole_updates(optimizer, cut_here, self.by_name)
        self.groups[optimizer] = own
        for group, names_of_group in zip(groups, own, strict=True):
            group["params"] = self.views(names_of_group)
        if any(optimizer.state.values()):  # created with the optimizer, for whole parameters (Adagrad)
            optimizer.state.clear()
            if here := [group for group in groups if group["params"]]:
                optimizer.state.update(rebuilt(optimizer, here).state)

    def check_groups(self) -> None:
        """Raises ValueError if the program has added a group since: its parameters would not train."""
        for optimizer in self.optimizers:
            if len(optimizer.param_groups) != len(self.groups[optimizer]):
                raise ValueError(
                    f"a parameter group was added to {type(optimizer).__name__} after its Engine was built: build all "
                    f"groups first (with lr=0 until they are to train), then the Engine"
                )

    @property
    def owned(self) -> list[Owned]:
        """The runs and whole parameters that the optimizers of this rank update."""
        return [piece for pieces in self.by_name.values() for piece in pieces]

    def views(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The pieces of these parameters that this rank updates."""
        return [piece.view for name in names for piece in self.by_name.get(name, ())]

    def state_bytes(self) -> int:
        """The bytes of this rank's optimizer state, without step counters and master weights."""
        states = [one.state.get(piece.view, {}) for piece in self.owned for one in self.optimizers]
        return sum(v.nbytes for state in states for key, v in state.items() if torch.is_tensor(v) and key != "step")
