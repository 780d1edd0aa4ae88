"""Who updates what: a stock optimizer pointed at the pieces this rank owns.

``OwnedOptimizer`` takes an optimizer that was built on the model's parameters in the ordinary way and replaces, in its
parameter groups, each parameter by views of the runs of it that lie in this rank's piece:

    group 0: [w, b]          rank 0: [w[0:32]]               lr, weight decay, betas: untouched
                             rank 1: [w[32:35], b]

States are made at the first step, so those of elements that a rank does not own never exist.  Updates happen in place
in the unit's storage, and learning-rate schedules that hold the optimizer go on working.

Cutting a parameter is right only for *element-wise* optimizers: torch's own, and those that their users declare (see
``probe``).
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.table.flat import Run
from plait.table.tensor_cut import TensorCut
from plait.zero.flat_gradient import FlatGradient
from plait.zero.place import RunPlace
from plait.zero.probe import (
    APART,
    ELEMENTWISE,
    declared,
    has_state_at_once,
    probe_apart,
    probe_elementwise,
    rebuilt,
)
from plait.zero.storage import Flat

SQUARED = 1 << 16
"""Elements squared at once: torch converts what it sums to fp64, and so many still lie in the cache then."""


@dataclass(frozen=True)
class Owned:
    """One run of a parameter that this rank's optimizer updates.

    ``view`` and ``gradient`` have the parameter's shape where the run is the whole of it, and are flat otherwise.
    """

    name: str
    run: Run
    flat: Flat
    cut: TensorCut | None
    """How the parameter is cut over the tensor axis; the run lies in this rank's piece of it."""
    view: nn.Parameter
    """In the unit's storage, or in its master weights."""
    gradient: Tensor
    """In the accumulator."""
    converts: bool
    """The optimizer has another dtype or device than the sums."""

    @property
    def place(self) -> RunPlace:
        """Where the run lies in the whole parameter."""
        return RunPlace(self.run, self.cut, self.flat.tensor_rank)


def owned_runs(gradients: Iterable[FlatGradient]) -> list[Owned]:
    """Every run that the row's optimizer cell gives this rank."""
    owned = []
    for g in gradients:
        flat, updated, sums = g.flat, g.flat.updated, g.owned
        converts = (sums.dtype, sums.device) != (updated.dtype, updated.device)
        for cut, run in ((cut, flat.layout.run(i, *flat.optim_place)) for i, cut in enumerate(flat.cuts)):
            if run is None:
                continue
            here = slice(run.offset, run.offset + run.numel)
            shape = run.slot.shape if run.whole else (run.numel,)
            view = nn.Parameter(updated[here].view(shape))
            owned.append(Owned(run.slot.name, run, flat, cut, view, sums[here].view(shape), converts))
    return owned


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether it has made steps, itself or in the run that its state was loaded from."""
    for state in optimizer.state.values():
        step = state.get("step")
        if any(map(torch.is_tensor, state.values())) if step is None else float(step) > 0:
            return True
    return False


class OwnedOptimizer:
    """The user's optimizer, changed in place to have only what this rank owns of all flat gradients.

    Several optimizers may share the parameters, each of which is in one of them.  ``names`` are those of the model's
    own parameters by ``id``; ``cuts`` says whether a run may be part of a parameter, ``apart`` whether ranks own
    different parameters, and ``over_tensor`` names those that the tensor axis cuts.

    Raises:
        ValueError: parameters that are not the model's, an optimizer that has made steps already, or one that is not
            element-wise although the row cuts parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[int, str],
        gradients: Sequence[FlatGradient],
        *,
        cuts: bool,
        apart: bool = False,
        over_tensor: Collection[str] = (),
    ) -> None:
        self.optimizers = tuple(optimizers)
        self.owned = owned_runs(gradients)
        updated = gradients[0].flat.updated if gradients else None
        self.masters = [g.flat.master for g in gradients if g.flat.master is not None]
        self.groups: dict[Optimizer, list[list[str]]] = {}
        """By optimizer, the names of the parameters of each of its groups, in the order in which they were given."""
        self.reader: threading.Event | None = None
        """Set once whoever reads what the optimizers keep (a save) has it; until then nothing of it may be written."""
        self.by_name: dict[str, list[Owned]] = {}
        for piece in self.owned:
            self.by_name.setdefault(piece.name, []).append(piece)
        seen: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if seen.setdefault(id(parameter), optimizer) is not optimizer:
                    raise ValueError(
                        f"{names.get(id(parameter), 'a parameter')!r} is in two optimizers, "
                        f"{type(seen[id(parameter)]).__name__} and {type(optimizer).__name__}: give it to one of them"
                    )
        self._homes: dict[int, int] = {}
        """Where each piece lies while an optimizer makes its step, by ``id``."""
        self._steps: Counter[Optimizer] = Counter()
        self._keep_gradients: set[Optimizer] = set()
        """Optimizers that keep gradients beyond their step: they are given copies."""
        self._updated, self._cuts, self._apart, self._over_tensor = updated, cuts, apart, set(over_tensor)
        self._published = any(gradient.flat.published for gradient in gradients)
        for optimizer in optimizers:
            self.groups[optimizer] = []
            eager = has_state_at_once(optimizer)
            if has_stepped(optimizer) or (any(optimizer.state.values()) and not eager):
                raise ValueError(
                    "the optimizer has made steps already: hand over a new one, and give it the state of this one by "
                    "engine.load_optimizer_state_dict(old.state_dict())"
                )
            self._take(optimizer, names)
            optimizer.state.clear()
            here = [group for group in optimizer.param_groups if group["params"]]
            if eager and here:
                optimizer.state.update(rebuilt(optimizer, here).state)

    @property
    def gives_pieces(self) -> bool:
        """Whether an optimizer has parts of parameters, or other ranks have copies of what it has."""
        return self._cuts or self._apart or self._published or bool(self._over_tensor)

    def take_new_groups(self, model: nn.Module) -> None:
        """Groups that a program has added to the optimizers (``add_param_group``) are pointed at the pieces too."""
        for optimizer in self.optimizers:
            if len(optimizer.param_groups) > len(self.groups[optimizer]):
                self._take(optimizer, {id(p): name for name, p in model.named_parameters()})

    def _take(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Check the groups of an optimizer that are new, and point them at the pieces."""
        new = optimizer.param_groups[len(self.groups[optimizer]) :]
        if any(id(p) not in names for group in new for p in group["params"]):
            raise ValueError(
                "the optimizer holds parameters that are not the model's: build it on model.parameters() of this very "
                "model, before plait cuts them"
            )
        if self._published and all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
            raise ValueError(
                f"{type(optimizer).__name__} changes parameters between steps, in train() and eval(), and under this "
                f"row that would reach neither the other ranks nor the forward: use ddp or zero3, in full precision"
            )
        own = [[names[id(p)] for p in group["params"]] for group in new]
        given = {name for name_lists in self.groups.values() for group in name_lists for name in group}
        if twice := sorted(given & {name for group in own for name in group}):
            raise ValueError(f"{twice[0]!r} is in two groups of the optimizers: give it to one of them")
        kind = type(optimizer)
        for group in new if self._apart and kind not in APART else ():
            if reason := probe_apart(optimizer, group, self._updated):
                raise ValueError(
                    f"an update of {kind.__name__} depends on other parameters too, and ranks own different ones here: "
                    f"{reason}. Use a row that keeps the optimizer state full (ddp), without a pipe or tensor axis; if "
                    f"it clips by the norm of all gradients, leave that to Engine(clip=...)"
                )
        parted = sorted(self._over_tensor & {name for group in own for name in group})
        if (self._cuts or parted) and kind not in ELEMENTWISE:
            self._check_elementwise(optimizer, list(zip(new, own, strict=True)), parted)
        self.groups[optimizer] += own
        for group, names_of_group in zip(new, own, strict=True):
            group["params"] = self.views(names_of_group)  # the user's own: see docs/guide/your-own-loop.md

    def _check_elementwise(
        self, optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], list[str]]], parted: Sequence[str]
    ) -> None:
        """Raises ValueError for an optimizer that is not torch's, and not declared or not found to be element-wise."""
        name = type(optimizer).__name__
        way_out = 'Use cut="tensor" (whole tensors on one owner) or a row that keeps the optimizer state full (ddp)'
        if parted:
            way_out = (
                f"The tensor axis cuts {len(parted)} of its parameters ({', '.join(parted[:3])}, ...): give these to "
                f"another optimizer, or leave their modules out of the tensor plan"
            )
        if type(optimizer) in APART:
            raise ValueError(f"{name} is not element-wise, so parameters cannot be cut anywhere. {way_out}")
        if not declared(optimizer):
            raise ValueError(
                f"{name} is not one of torch's element-wise optimizers, so it is not known whether parameters can be "
                f"cut anywhere. {way_out}; or, if it updates each element from the gradient and state of that element "
                f"alone, say so: plait.elementwise(optimizer)"
            )
        for group, names in groups:
            pieces = [(piece.place, piece.view) for key in names for piece in self.by_name.get(key, ())]
            if reason := probe_elementwise(optimizer, group, pieces):
                raise ValueError(
                    f"{name} cannot be cut anywhere, though it was declared element-wise: {reason}. {way_out}"
                )

    def views(self, names: Iterable[str]) -> list[nn.Parameter]:
        """What this rank updates of these parameters."""
        return [piece.view for name in names for piece in self.by_name.get(name, ())]

    def give_gradients(self, touched: Mapping[str, bool]) -> None:
        """Point each owned run at its gradient, or at None where no rank has one; an update comes next."""
        self.wait_for_reader()
        copied = {id(view) for one in self._keep_gradients for group in one.param_groups for view in group["params"]}
        for piece in self.owned:
            gradient = piece.gradient.to(piece.view) if piece.converts else piece.gradient
            if id(piece.view) in copied:
                gradient = gradient.clone()
            self._homes[id(piece.view)] = piece.view.data_ptr()
            piece.view.grad = gradient if touched[piece.name] else None

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Behind an optimizer's step, which may have left values and gradients where nobody looks for them.

        - ``p.data = ...`` gives a piece other memory than the unit's: its values go where they belong.
        - An optimizer that keeps ``p.grad`` (as its last gradient, as a momentum) has memory that the next sums are
          made in: it is given a copy, and copies from then on.  Looked for in steps 1 to 8, 16, 32, ...
        """
        for piece in self.owned:
            view = piece.view
            if view.data_ptr() != self._homes.get(id(view), view.data_ptr()):
                here = piece.flat.updated[piece.run.offset : piece.run.offset + piece.run.numel].view(view.shape)
                here.copy_(view)
                view.data = here
        self._steps[optimizer] += 1
        steps = self._steps[optimizer]
        if steps > 8 and steps & (steps - 1):
            return
        buffers = {piece.gradient.untyped_storage().data_ptr() for piece in self.owned if piece.gradient.numel()}
        for state in (*optimizer.state.values(), vars(optimizer)):
            if _take_out(state, buffers):
                self._keep_gradients.add(optimizer)

    def wait_for_reader(self) -> None:
        """Returns when what the optimizers keep may be written to."""
        if self.reader is not None:
            self.reader.wait()
            self.reader = None

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state, step counters left out, and of its master weights."""
        states = [one.state.get(piece.view, {}) for piece in self.owned for one in self.optimizers]
        tensors = [v for state in states for key, v in state.items() if torch.is_tensor(v) and key != "step"]
        return sum(tensor.nbytes for tensor in [*self.masters, *tensors])


def _take_out(kept: Any, buffers: Collection[int]) -> bool:
    """Puts copies in the place of tensors that lie in these storages, also in lists; whether there were any."""
    found = False
    for key, value in list(kept.items() if isinstance(kept, dict) else enumerate(kept)):
        if isinstance(value, list | deque):
            found |= _take_out(value, buffers)
            continue
        plain = is_plain(value) and value.layout is torch.strided and value.numel()
        if plain and value.untyped_storage().data_ptr() in buffers:
            kept[key], found = value.clone(), True
    return found


def is_plain(value: Any) -> bool:
    """True for a tensor of torch's own class; a subclass (an 8-bit state) need not have one memory."""
    return isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter, nn.Buffer)


def square_sum(runs: Iterable[Tensor]) -> float:
    """The sum of squares in fp64, run by run; the device is waited for once."""
    reals = (torch.view_as_real(run) if run.is_complex() else run for run in runs)
    blocks = [block for real in reals for block in real.reshape(-1).split(SQUARED)]
    norms = torch.stack(torch._foreach_norm(blocks, 2, dtype=torch.float64)).tolist() if blocks else ()
    return math.fsum(norm * norm for norm in norms)


def dtype_of_norm(dtypes: Collection[torch.dtype]) -> torch.dtype:
    """The precision in which gradients of these dtypes have a norm: fp32 at least."""
    return torch.float64 if torch.float64 in dtypes or torch.complex128 in dtypes else torch.float32


def norm_of(squares: float, dtype: torch.dtype) -> float:
    """The norm with this sum of squares, rounded once to ``dtype``."""
    return torch.tensor(math.sqrt(squares), dtype=dtype).item()


@torch.no_grad()
def scale(runs: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients in place; ``_foreach_mul_`` would round the factor to bf16 first, and so change bits."""
    for run in runs:
        run.mul_(factor)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by; as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    return min(1.0, limit / (norm + 1e-6))
