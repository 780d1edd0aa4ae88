"""Layouts for the parameters of an unmodified module.

    annotate(model, {"fc1.weight": "out/tensor in", "fc1.bias": "out/tensor", "fc2.weight": "out in/tensor"}, comm)

After it every parameter is a ShardedTensor, unnamed ones replicated, and the module's own forward computes on shards:
``F.linear(x, weight, bias)`` meets the rule of ``linear``.  Inputs and buffers may stay plain tensors.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from plait.comm import Comm
from plait.messages.wording import did_you_mean
from plait.sharded.layout import Layout
from plait.sharded.sharded_tensor import ShardedTensor

Module = TypeVar("Module", bound=nn.Module)


def annotate(module: Module, layouts: Mapping[str, Layout | str], comm: Comm) -> Module:
    """Cuts the module's parameters in place and returns it.  A parameter with several names stays one parameter.

    Args:
        module: its parameters are whole and equal on every rank.
        layouts: by the names of ``module.named_parameters()``; parameters that are not named are replicated.
        comm: this rank's access to the others.

    Raises:
        ValueError: a name that no parameter has, a layout that does not fit, a parameter that is cut already.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    wanted: dict[int, tuple[str, Layout]] = {}
    for name, text in layouts.items():
        if name not in parameters:
            hint = did_you_mean(name, parameters, f"there are {', '.join(parameters) or 'none'}")
            raise ValueError(f"no parameter is called {name!r}: {hint}")
        layout = Layout.parse(text) if isinstance(text, str) else text
        shape = tuple(parameters[name].shape)
        if len(layout.dims) != len(shape):
            raise ValueError(
                f"{name} has {len(shape)} dims, {list(shape)}, but the layout '{text}' has {len(layout.dims)}: write a "
                f"word for each dim"
            )
        if layout.pending:
            raise ValueError(f"{name} cannot be pending over {', '.join(layout.pending)}: a parameter has its value")
        other = wanted.setdefault(id(parameters[name]), (name, layout))
        if other[1] != layout:
            raise ValueError(f"{name} and {other[0]} are one parameter: give both the layout '{other[1]}'")
    made: dict[int, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, ShardedTensor):
            raise ValueError(f"{name} is a ShardedTensor already: annotate() takes whole parameters")
        if id(parameter) not in made:
            _, layout = wanted.get(id(parameter), (name, Layout.replicated(parameter.dim())))
            with torch.no_grad():
                piece = ShardedTensor.from_full(parameter.detach(), layout, comm)
            made[id(parameter)] = nn.Parameter(piece, requires_grad=parameter.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, made[id(parameter)])
    return module
