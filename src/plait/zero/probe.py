"""What an optimizer may be given: pieces of parameters, or whole parameters of which other ranks have others.

element-wise    torch's own classes by ``ELEMENTWISE``; any other where its user says so (``elementwise``), and steps
                on the real shapes, whole and as the pieces that this rank has, agree to the bit
apart           torch's own classes by ``APART``; any other where steps on the shapes of a group, in one optimizer and
                each in its own, agree to the bit: not what divides by the norm of all

A probe holds one whole tensor, its state and its pieces at a time, of at most ``LIMIT`` elements.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from plait.table.flat import BOUNDARY_BYTES, GRAIN
from plait.zero.place import RunPlace

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam}
    | {optim.RMSprop, optim.Rprop, optim.SGD}
)
"""With any options, fused and foreach too.  A subclass may do anything, and is another class."""
APART = ELEMENTWISE | {optim.Adafactor, optim.Muon}
LIMIT = 1 << 22
"""Elements of a probe; the longest dims of a larger shape are halved."""
STEPS = 12
"""What is found from gradients, or from all states, may count from a later step on only: from the second, or where
gradients are kept for ten steps (AdaShift) from the eleventh."""
ORTHOGONAL, NEARLY = 2, 3
"""The steps with a gradient that is orthogonal to each row of the weights, and nearly so: some project only then
(AdamP; SGDP, for which the first has nothing to take away)."""
FALLING = 5
"""Over so many steps the gradients become smaller, each time by half: some act when norms fall (AdaNorm)."""
LARGE = 100.0
"""The last step's gradients are as many times larger: a limit on norms may let the others pass."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def elementwise(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Declares that an optimizer updates each element from the gradient and state of that element alone.

    An engine may then cut parameters anywhere for it.  It believes torch's own classes; of any other optimizer it makes
    some steps on tensors of the real shapes (of at most 4,194,304 elements; larger ones are shrunk), whole and as the
    pieces that the rank has, and refuses the optimizer if they differ.

    Returns:
        The optimizer.
    """
    vars(optimizer)["_plait_elementwise"] = True
    return optimizer


def declared(optimizer: Optimizer) -> bool:
    """True where the user has called ``elementwise`` on it."""
    return "_plait_elementwise" in vars(optimizer)


class NotRebuiltError(ValueError):
    """The constructor of an optimizer's class cannot be called with its settings alone."""


def rebuilt(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """A new optimizer of the same class and settings on other parameters.

    Raises:
        NotRebuiltError: the constructor asks for more than the parameters and what is in the optimizer's ``defaults``.
    """
    signature = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    settings = {k: v for k, v in optimizer.defaults.items() if takes_any or k in signature}
    own = [dict(group) for group in groups]
    try:
        inspect.signature(type(optimizer).__init__).bind(None, own, **settings)
    except TypeError as error:
        kind = type(optimizer).__name__
        raise NotRebuiltError(
            f"a new {kind} cannot be built on other parameters ({error}): give what its constructor asks for beside "
            f"the parameters a default, or put it into the defaults that {kind} hands to Optimizer"
        ) from None
    return type(optimizer)(own, **settings)


def probe_elementwise(
    optimizer: Optimizer, group: Mapping[str, Any], pieces: Iterable[tuple[RunPlace, Tensor]]
) -> str | None:
    """Why the optimizer is not element-wise on this rank's pieces of a group; None where steps say that it is.

    Args:
        pieces: where each is in its whole parameter, and the tensor that the optimizer will update.
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
        except Exception as error:  # whatever a class raises on flat pieces is its reason
            return f"{type(error).__name__} on flat pieces of a tensor of shape {small}: {error}"
        if worst:
            return f"steps on a tensor of shape {small} and on this rank's piece of it differ by up to {worst:.3g}"
    return None


def probe_apart(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor | None) -> str | None:
    """Why an update of one parameter depends on others (a norm over all, a step size that is found from all); None when
    probing steps say that it does not, or the class cannot be built for a probe.

    Args:
        group: of the optimizer, with all its parameters, wherever they are.
        like: has the dtype and the device of what is updated; None: the first parameter.
    """
    with torch._C.DisableTorchFunctionSubclass():  # parameters at rest
        first = group["params"][0].detach() if like is None and group["params"] else like
        shapes = list(dict.fromkeys(tuple(p.shape) for p in group["params"] if p.numel()))
    if first is None or not shapes:
        return None
    shapes = [shrunk(shape, LIMIT // len(shapes)) for shape in (shapes if len(shapes) > 1 else shapes * 2)]
    wholes = [_values(shape, first) * (number + 1) for number, shape in enumerate(shapes)]
    try:
        worst = _difference(optimizer, group, wholes, [(number, Tensor.clone) for number in range(len(wholes))])
    except Exception:
        return None
    return (
        f"steps on {len(wholes)} tensors, in one optimizer and in several, differ by up to {worst:.3g}"
        if worst
        else None
    )


def shrunk(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """A shape of as many dims and at most so many elements."""
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
    """The largest after steps of one optimizer that has all of ``wholes`` and of one for each of their ``parts``; 0.0:
    none to the bit."""
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
            parameter.grad = _gradient(parameter.detach(), first, step)
        for piece, (index, take) in zip(pieces, parts, strict=True):
            gradient = together[index].grad
            assert gradient is not None
            piece.grad = take(gradient)
        for one in optimizers:
            one.step()
    pairs = [(take(together[i].detach()), p.detach()) for p, (i, take) in zip(pieces, parts, strict=True)]
    apart = [(a - b)[(a != b) & ~(a.isnan() & b.isnan())] for a, b in pairs]  # settings that make NaN say nothing
    return max((float(difference.abs().max()) or math.inf for difference in apart if difference.numel()), default=0.0)


def _gradient(values: Tensor, first: Tensor, step: int) -> Tensor:
    """The gradient of a step for a tensor that began with the values ``first``."""
    if step not in (ORTHOGONAL, NEARLY):
        return (LARGE if step == STEPS else 2.0 ** -(step % FALLING)) * (first * 3 + step).cos()
    rows = values.reshape(values.shape[0] if values.dim() > 1 else 1, -1)
    even, turned = rows.shape[1] // 2 * 2, torch.zeros_like(rows)
    turned[:, 0:even:2], turned[:, 1:even:2] = rows[:, 1:even:2], -rows[:, 0:even:2]
    if step == NEARLY:
        turned = turned + rows / 256
    return (turned * 2.0 ** -math.frexp(turned.abs().max().item())[1]).view(
        values.shape
    )  # without rounding, to 1 at most


def has_state_at_once(optimizer: Optimizer) -> bool:
    """True where the class makes its states when it is built (Adagrad) and not at the first step.  It is tried on meta;
    of a class that cannot be built for that, the optimizer shows it, which is new."""
    groups = []
    for group in optimizer.param_groups:
        on_meta = [nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in group["params"]]
        if on_meta:
            groups.append({**group, "params": on_meta})
    try:
        return any(rebuilt(optimizer, groups).state.values())
    except Exception:  # whatever its constructor raises
        return any(optimizer.state.values())
