"""Whole tensors in and out of a cut model: state dicts under the model's own names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from plait.comm import Comm
from plait.core.agreement import DATA_ORDER
from plait.core.collectives import Note
from plait.core.cuts import TensorCut
from plait.engine.gradients import parameters_of
from plait.engine.unit import Unit
from plait.tensor.parallel.pieces import assemble


def full_state_dict(model: nn.Module, units: Sequence[Unit], comm: Comm) -> dict[str, Tensor]:
    """Every parameter whole and every persistent buffer (data rank 0's), under the keys of ``model.state_dict()``.

    All ranks call it together and all get it, on the CPU; one unit is gathered at a time.
    """
    whole: dict[int, Tensor] = {}
    for unit in units:
        unit.gather("state", -1)
        unit.show()
        for name, parameter, flat, index in parameters_of([unit]):
            cut, value = flat.cuts[index], parameter.detach()
            whole[id(parameter)] = value.to("cpu", copy=True) if cut is None else _uncut(name, value, cut, comm)
        if unit.split and not unit.users:
            unit.free()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in parameters:
            state[name] = whole[id(parameters[name])]
        else:
            buffer = value.detach().reshape(-1).clone()
            comm.broadcast(buffer, DATA_ORDER, 0, note=Note("state", name)).wait()
            state[name] = buffer.view(value.shape).cpu()
    return state


def _uncut(name: str, value: Tensor, cut: TensorCut, comm: Comm) -> Tensor:
    """A parameter whole, from the pieces of the tensor axis; they travel padded to the largest."""
    numels = [math.prod(cut.local_shape(index)) for index in range(cut.ways)]
    mine = value.new_zeros(max(numels))
    mine[: value.numel()] = value.reshape(-1)
    every = mine.new_empty((cut.ways, len(mine)))
    comm.all_gather(every, mine, ("tensor",), note=Note("state", name)).wait()
    pieces = [every[i, : numels[i]].view(cut.local_shape(i)) for i in range(cut.ways)]
    return assemble(pieces, cut).cpu()


def load_full_state_dict(model: nn.Module, units: Sequence[Unit], state: Mapping[str, Tensor]) -> None:
    """Take the values of whole tensors; each rank copies its pieces, and nothing is sent.

    Raises:
        ValueError: missing or surplus names, or shapes that differ.
    """
    own = model.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        missing, surplus = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(
            f"the state does not fit the model: {len(missing)} names are missing {missing[:3]}, "
            f"{len(surplus)} are surplus {surplus[:3]}"
        )
    place = {id(p): (flat, index) for _, p, flat, index in parameters_of(units)}
    for name, value in own.items():
        flat, index = place.get(id(value), (None, 0))
        cut = flat.cuts[index] if flat else None
        shape = tuple(value.shape) if cut is None else cut.shape
        if shape != tuple(state[name].shape):
            raise ValueError(f"{name!r} has shape {shape}, the state's has {tuple(state[name].shape)}")
    for unit in units:
        unit.settle()
    for name, value in own.items():
        if id(value) in place:
            flat, index = place[id(value)]
            flat.write(index, state[name].to(value.dtype))
        else:
            value.copy_(state[name])
