"""What an optimizer may be given: pieces, or some of the parameters.  It is probed, not looked up in a list.

element-wise    steps on a small matrix, whole and as two flat runs, agree to the bit     AdamW, SGD; not Muon
apart           steps on two matrices, in one optimizer and each in its own, do           Muon too; not what divides
                                                                                          by the norm of all
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.core.flat import BOUNDARY_BYTES, GRAIN

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


def probe_elementwise(optimizer: Optimizer, dtype: torch.dtype | None) -> str | None:
    """Why the optimizer is not element-wise; None when probing steps say that it is.

    The settings of each parameter group are tried on an 8 x 12 matrix, whole and cut where a flat layout may cut, in
    the dtype of what it will update (None: of the group's first parameter).
    """
    for number, settings, values in _probed(optimizer, dtype):
        cut = max(GRAIN, BOUNDARY_BYTES // values.element_size())  # where flat layouts may cut this dtype
        matrix, runs = [values.view(8, 12)], list(values.split([cut, 96 - cut]))
        try:
            rebuilt(optimizer, [{**settings, "params": [nn.Parameter(matrix[0].clone())]}])
            whole, parts = (_updated(optimizer, settings, [one]) for one in (matrix, runs))
        except NotRebuiltError as error:
            return f"nothing shows that it is, for {error}"
        except Exception as error:  # whatever a class raises on flat runs is its reason
            return f"{type(error).__name__} on flat runs of a matrix: {error}"
        if not _same(whole, parts):
            worst = (whole - parts).abs().max().item()
            return f"steps on a matrix and on two flat runs of it differ by up to {worst:.3g} (group {number})"
    return None


def probe_apart(optimizer: Optimizer, dtype: torch.dtype | None) -> str | None:
    """Why an update of one parameter depends on others (a norm over all, a step size that is found from all); None when
    probing steps say that it does not, or the class cannot be built for a probe."""
    for number, settings, values in _probed(optimizer, dtype):
        first, second = values.view(8, 12), values.flip(0).view(6, 16) * 2
        try:
            together = _updated(optimizer, settings, [[first, second]])
            apart = _updated(optimizer, settings, [[first], [second]])
        except Exception:
            return None
        if not _same(together, apart):
            worst = (together - apart).abs().max().item()
            return f"steps on two matrices, in one optimizer and in two, differ by up to {worst:.3g} (group {number})"
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    """To the bit; settings that make NaN of the probe say nothing."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _probed(optimizer: Optimizer, dtype: torch.dtype | None) -> Iterator[tuple[int, dict[str, Any], Tensor]]:
    """The settings of each group, and 96 numbers to try them on."""
    seen = set[str]()
    for number, group in enumerate(optimizer.param_groups):
        own = group["params"][0].dtype if group["params"] else torch.float32
        settings = {k: v for k, v in group.items() if k != "params"}
        if "lr" in settings and float(settings["lr"]) == 0:
            settings["lr"] = 0.1  # a schedule that warms up from 0 would let any optimizer pass
        if (alike := repr((own, {k: v for k, v in settings.items() if k != "param_names"}))) in seen:
            continue
        seen.add(alike)
        yield number, settings, torch.linspace(-1, 1, 96, dtype=torch.float64).sin().to(dtype or own)


def _updated(optimizer: Optimizer, settings: Mapping[str, Any], several: Sequence[Sequence[Tensor]]) -> Tensor:
    """All values, end to end, after steps of one new optimizer for each of several lists of them."""
    parameters = [[nn.Parameter(value.clone()) for value in values] for values in several]
    probes = [rebuilt(optimizer, [{**settings, "params": own}]) for own in parameters]
    every = [parameter for own in parameters for parameter in own]
    values = torch.cat([parameter.detach().view(-1) for parameter in every])
    for step in range(1, STEPS + 1):
        gradients = _gradient(every, values, step).split([parameter.numel() for parameter in every])
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient.clone().view(parameter.shape)
        for probe in probes:
            probe.step()
    return torch.cat([parameter.detach().view(-1) for parameter in every])


def _gradient(parameters: Sequence[Tensor], first: Tensor, step: int) -> Tensor:
    """The gradients of a step, end to end; ``first`` are the values that the parameters began with."""
    if step not in (ORTHOGONAL, NEARLY):
        return (LARGE if step == STEPS else 2.0 ** -(step % FALLING)) * (first * 3 + step).cos()
    values = torch.cat([parameter.detach().view(-1) for parameter in parameters])
    left, right = values.view(-1, 2).unbind(1)
    turned = torch.stack((right, -left), 1).view(-1)
    if step == NEARLY:
        turned = turned + values / 256
    return turned * 2.0 ** -math.frexp(turned.abs().max().item())[1]  # without rounding, to 1 at most


def has_state_at_once(optimizer: Optimizer) -> bool:
    """Whether the class makes its states when it is built (Adagrad) and not at the first step; tried on meta, or of a
    class that cannot be built for that, seen by the optimizer, which is new."""
    groups = []
    for group in optimizer.param_groups:
        on_meta = [nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in group["params"]]
        if on_meta:
            groups.append({**group, "params": on_meta})
    try:
        return bool(rebuilt(optimizer, groups).state)
    except Exception:  # whatever its constructor raises
        return bool(optimizer.state)
