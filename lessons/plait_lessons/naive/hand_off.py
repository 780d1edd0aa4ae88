"""A model in parts, with the activation handed over by hand.

A message carries values, never the graph that made them.  So each part has a graph of its own, and the two are joined
by one tensor each way:

    part 1      x ──► y                         y.backward(received.grad)
                      │  values                 ▲
    ──────────────────┼─────────────────────────┼─────────────  another rank, later
                      ▼                         │  values
    part 2      received ──► loss               loss.backward() leaves received.grad

That is the chain rule cut at y, nothing more: gradients are those of the whole model to the bit.

Every function leaves the gradients in ``.grad``, added to what is there, as ``loss.backward()`` would.  The
``without_...`` ones are wrong, each named for what it lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.schedule.partition import even

LossOf = Callable[[Tensor, Any], Tensor]
"""From the model's output and the target to a scalar, the sum of the losses."""


def cut(model: nn.Sequential, num_parts: int) -> tuple[nn.Sequential, ...]:
    """The model in parts that run one after the other, the first ones a module longer.

    Modules, parameters and names are the model's own: ``model["4.weight"]`` is ``4.weight`` of its part as well.

    Raises:
        ValueError: more parts than modules.
    """
    children = [(name, child) for name, child in model._modules.items() if child is not None]  # one may come twice
    return tuple(nn.Sequential(OrderedDict(children[i] for i in links)) for links in even(len(children), num_parts))


def receive(sent: Tensor) -> Tensor:
    """What arrives of a tensor: its values, no graph, and ready to collect a gradient."""
    return sent.detach().requires_grad_()


def two_parts(part1: nn.Module, part2: nn.Module, x: Tensor, target: Any, loss_of: LossOf) -> Tensor:
    """Forward and backward of a model in two parts; returns the loss."""
    y = part1(x)
    received = receive(y)
    loss = loss_of(part2(received), target)
    loss.backward()
    y.backward(received.grad)
    return loss.detach()


def many_parts(parts: Sequence[nn.Module], x: Tensor, target: Any, loss_of: LossOf) -> Tensor:
    """The same for any number of parts: forward through all, then the gradient from hand to hand back."""
    handed: list[tuple[Tensor, Tensor]] = []
    for part in parts[:-1]:
        y = part(x)
        x = receive(y)
        handed.append((y, x))
    loss = loss_of(parts[-1](x), target)
    loss.backward()
    for y, received in reversed(handed):
        if y.requires_grad:  # else nothing before it is trained
            y.backward(received.grad)
    return loss.detach()


# ---- wrong ------------------------------------------------------------------------------------------------


def without_the_way_back(part1: nn.Module, part2: nn.Module, x: Tensor, target: Any, loss_of: LossOf) -> Tensor:
    """Wrong: the gradient arrives at ``received`` and stays there.

    The cut graph ends at the hand-off, so part 1 has no gradient at all.  The loss still falls, since part 2 learns.
    """
    y = part1(x)
    received = receive(y)
    loss = loss_of(part2(received), target)
    loss.backward()
    return loss.detach()


def without_requires_grad(part1: nn.Module, part2: nn.Module, x: Tensor, target: Any, loss_of: LossOf) -> Tensor:
    """Wrong: what arrives asks for no gradient, so there is none to hand back.

    Raises:
        RuntimeError: by torch, about an implicit gradient: ``received.grad`` is None, and y is no scalar.
    """
    y = part1(x)
    received = y.detach()
    loss = loss_of(part2(received), target)
    loss.backward()
    y.backward(received.grad)
    return loss.detach()


def without_the_gradient(part1: nn.Module, part2: nn.Module, x: Tensor, target: Any, loss_of: LossOf) -> Tensor:
    """Wrong: part 1 runs backward, but from ones, as torch's error above seems to ask for.

    It gets a gradient of the right shape: that of y's sum, which the loss has no part in.
    """
    y = part1(x)
    received = receive(y)
    loss = loss_of(part2(received), target)
    loss.backward()
    y.backward(torch.ones_like(y))
    return loss.detach()
