"""Tries optimizers: are they element-wise, and does an update of one parameter depend on others?

element-wise    optimizers that were declared so (``plait.elementwise``): steps on the real shapes, whole and as the
                pieces that this rank has, agree to the bit
per tensor      optimizers that torch does not have: steps on a group's shapes, in one optimizer and in one for each
                tensor, agree to the bit; an optimizer that divides by the norm of all fails

A probe holds one whole tensor, its state and its pieces at a time, of at most ``LIMIT`` elements.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm.texts import check_together
from plait.step.placed_model import PlacedModel
from plait.table.flat import BOUNDARY_BYTES, GRAIN
from plait.table.mesh import AXES
from plait.zero.elementwise import PER_TENSOR, NotRebuiltError, declared, rebuilt
from plait.zero.optim import OwnedOptimizer
from plait.zero.place import RunPlace

LIMIT = 1 << 22
"""The largest number of elements of a probe; the longest dims of a larger shape are halved."""
STEPS = 3
"""The steps of a probe: a rule that uses gradients, or all states, may only count from the second step on."""
LARGE = 100.0
"""The factor of the last step's gradients: a limit on norms may not affect smaller ones."""


def check_optimizers(placed: PlacedModel) -> None:
    """Tries each optimizer of an engine if ranks own different pieces; all ranks call it together.

    Raises:
        ValueError: an optimizer depends on more than its row allows.
    """
    owner, mesh = placed.owned_optimizer, placed.comm.mesh
    if owner is None:
        return
    split = mesh.count(placed.strategy.optim.split) > 1
    apart, cuts = split or mesh.count(("pipe", "tensor", "expert")) > 1, split and placed.parallelism.cut == "element"
    error = None
    try:
        for optimizer in owner.optimizers:
            _check(optimizer, placed, owner, cuts=cuts, apart=apart)
    except ValueError as problem:
        error = problem
    if any(map(declared, owner.optimizers)):  # each rank has tried other pieces
        check_together(placed.comm, error, AXES)
    if error is not None:
        raise error


def _check(optimizer: Optimizer, placed: PlacedModel, owner: OwnedOptimizer, *, cuts: bool, apart: bool) -> None:
    kind = type(optimizer)
    published = any(flat.published for unit in placed.units for flat in unit.flats if flat.trainable)
    if published and all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise ValueError(
            f"{kind.__name__} changes parameters between steps, in train() and eval(), and under this row that would "
            f"reach neither the other ranks nor the forward: use ddp or zero3, in full precision"
        )
    like = owner.owned[0].view.detach() if owner.owned else None
    for group, names in zip(optimizer.param_groups, owner.groups[optimizer], strict=True):
        shapes = [placed.shapes[name] for name in names]
        if apart and kind not in PER_TENSOR and (reason := probe_apart(optimizer, group, shapes, like)):
            raise ValueError(
                f"an update of {kind.__name__} depends on other parameters too, and ranks own different ones here: "
                f"{reason}. Use a row that keeps the optimizer state full (ddp), without pipe, tensor and expert axes; "
                f"if it clips by the norm of all gradients, leave that to Engine(clip=...)"
            )
        if declared(optimizer) and (cuts or any(name in placed.cuts for name in names)):
            pieces = [(piece.place, piece.view) for name in names for piece in owner.by_name.get(name, ())]
            if reason := probe_elementwise(optimizer, group, pieces):
                raise ValueError(
                    f"{kind.__name__} cannot be cut anywhere, though it was declared element-wise: {reason}. Use "
                    f'cut="tensor" (whole tensors on one owner) or a row that keeps the optimizer state full (ddp)'
                )


def probe_elementwise(
    optimizer: Optimizer, group: Mapping[str, Any], pieces: Iterable[tuple[RunPlace, Tensor]]
) -> str | None:
    """The reason why the optimizer is not element-wise on this rank's pieces of a group; None if steps show that it is.

    Args:
        pieces: for each, its place in the whole parameter and the tensor that the optimizer will update.
    """
    seen = set[object]()
    for place, view in pieces:
        shape = tuple(place.shape)
        key = shape, view.dtype, place.run.start, place.run.stop, place.cut, place.tensor_rank
        if view.numel() == math.prod(shape) or key in seen:
            continue
        seen.add(key)
        small = shrunk(shape, LIMIT)
        cut = max(GRAIN, BOUNDARY_BYTES // view.element_size())  # where flat layouts may cut this dtype

        def take(whole: Tensor, place: RunPlace = place, real: bool = small == shape, cut: int = cut) -> Tensor:
            if not real:
                return whole.reshape(-1)[: max(cut, whole.numel() // 2 // cut * cut)].clone()
            piece = whole.new_empty(place.run.numel)
            place.fill(whole, piece)
            return piece.view(place.run.slot.shape) if place.run.whole else piece

        try:
            worst = _difference(optimizer, group, [_values(small, view)], [(0, take)])
        except NotRebuiltError as error:
            return f"nothing shows that it is, for {error}"
        except Exception as error:  # any exception that a class raises on flat pieces is its reason
            return f"{type(error).__name__} on flat pieces of a tensor of shape {small}: {error}"
        if worst:
            return f"steps on a tensor of shape {small} and on this rank's piece of it differ by up to {worst:.3g}"
    return None


def probe_apart(
    optimizer: Optimizer, group: Mapping[str, Any], all_shapes: Sequence[tuple[int, ...]], first: Tensor | None
) -> str | None:
    """The reason why an update of one parameter depends on others (a norm over all, a step size found from all);
    None if probing steps show that it does not, or the class cannot be built for a probe.

    Args:
        all_shapes: the shapes of the group's parameters on all ranks.
        first: has the dtype and the device of the pieces; None: this rank has none.
    """
    shapes = list(dict.fromkeys(shape for shape in all_shapes if math.prod(shape)))
    if not shapes:
        return None
    first = torch.zeros(()) if first is None else first
    shapes = [shrunk(shape, LIMIT // len(shapes)) for shape in (shapes if len(shapes) > 1 else shapes * 2)]
    wholes = [_values(shape, first) * (number + 1) for number, shape in enumerate(shapes)]
    try:
        worst = _difference(optimizer, group, wholes, [(number, Tensor.clone) for number in range(len(wholes))])
    except Exception:
        return None
    text = f"steps on {len(wholes)} tensors, in one optimizer and in several, differ by up to {worst:.3g}"
    return text if worst else None


def shrunk(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """A shape with the same number of dims and at most ``limit`` elements."""
    sizes = list(shape)
    while math.prod(sizes) > max(limit, 1):
        longest = sizes.index(max(sizes))
        sizes[longest] = -(-sizes[longest] // 2)
    return tuple(sizes)


def _values(shape: Sequence[int], like: Tensor) -> Tensor:
    device = "cpu" if like.is_meta else like.device
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=device).sin().to(like.dtype).view(shape)


def _difference(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    wholes: Sequence[Tensor],
    parts: Sequence[tuple[int, Callable[[Tensor], Tensor]]],
) -> float:
    """The largest difference between one optimizer that steps all of ``wholes`` and one for each of their ``parts``;
    0.0: the same bits."""
    settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if "lr" in settings and float(settings["lr"]) == 0:
        settings["lr"] = 0.1  # a schedule that warms up from 0 would let any optimizer pass

    def new(*parameters: nn.Parameter) -> Optimizer:
        one = rebuilt(optimizer, [{**settings, "params": list(parameters)}])
        if callable(mode := getattr(one, "train", None)):
            mode()  # schedule-free
        return one

    together = [nn.Parameter(whole.clone()) for whole in wholes]
    pieces = [nn.Parameter(take(wholes[index])) for index, take in parts]
    optimizers = [new(*together), *map(new, pieces)]
    for step in range(1, STEPS + 1):
        for parameter, first in zip(together, wholes, strict=True):
            parameter.grad = (first * 3 + step).cos() * (LARGE if step == STEPS else 1.0)
        for piece, (index, take) in zip(pieces, parts, strict=True):
            gradient = together[index].grad
            assert gradient is not None
            piece.grad = take(gradient)
        for one in optimizers:
            one.step()
    pairs = [(take(together[i].detach()), p.detach()) for p, (i, take) in zip(pieces, parts, strict=True)]
    apart = [(a - b)[(a != b) & ~(a.isnan() & b.isnan())] for a, b in pairs]  # settings that make NaN show nothing
    return max((float(difference.abs().max()) or math.inf for difference in apart if difference.numel()), default=0.0)
