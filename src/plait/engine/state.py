"""Whole tensors in and out of a cut model: state dicts under the model's own names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.core.agreement import DATA_ORDER
from plait.core.collectives import Note
from plait.core.cuts import TensorCut
from plait.engine.gradients import parameters_of
from plait.engine.unit import Unit
from plait.tensor.parallel.pieces import assemble


@dataclass(frozen=True)
class Part:
    """What a rank has of a model: a stage's copy and its units."""

    model: nn.Module
    units: Sequence[Unit]


@dataclass(frozen=True)
class Directory:
    """Where the whole model's tensors are.

    ``aliases`` gives, by every name in its state dict, the name of the parameter; ``homes`` the pipe coordinate that
    has a tensor, by its name.
    """

    aliases: Mapping[str, str]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    homes: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module, homes: Mapping[str, int]) -> Directory:
        """Read off a model before it is cut."""
        names = {id(p): n for n, p in model.named_parameters()}
        state = model.state_dict(keep_vars=True)
        return cls(
            {key: names.get(id(value), key) for key, value in state.items()},
            {key: (tuple(value.shape), value.dtype) for key, value in state.items()},
            homes,
        )


def full_state_dict(directory: Directory, parts: Sequence[Part], comm: Comm) -> dict[str, Tensor]:
    """Every parameter whole and every persistent buffer (data rank 0's), under the keys of ``model.state_dict()``.

    All ranks call it together and all get it, on the CPU; one unit is gathered at a time.
    """
    whole: dict[str, Tensor] = {}
    for part in parts:
        for unit in part.units:
            unit.gather("state", -1)
            unit.show()
            for name, parameter, flat, index in parameters_of([unit]):
                cut, value = flat.cuts[index], parameter.detach()
                whole[name] = value.to("cpu", copy=True) if cut is None else _uncut(name, value, cut, comm)
            if unit.split and not unit.users:
                unit.free()
        for name, buffer in _buffers(part.model).items():
            flat_buffer = buffer.detach().reshape(-1).clone()
            comm.broadcast(flat_buffer, DATA_ORDER, 0, note=Note("state", name)).wait()
            whole.setdefault(name, flat_buffer.view(buffer.shape).cpu())
    state: dict[str, Tensor] = {}
    for key, name in directory.aliases.items():
        if name != key and name in state:
            state[key] = state[name]
            continue
        shape, dtype = directory.shapes[key]
        value = whole[name] if name in whole else torch.empty(shape, dtype=dtype)
        if comm.mesh.pipe > 1:
            travelling = value.to(comm.device).reshape(-1)
            comm.broadcast(travelling, ("pipe",), directory.homes[name], note=Note("state", name)).wait()
            value = travelling.view(shape).cpu()
        state[key] = value
    return state


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a state dict."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {n: v for n, v in model.state_dict(keep_vars=True).items() if n not in parameters}


def _uncut(name: str, value: Tensor, cut: TensorCut, comm: Comm) -> Tensor:
    """A parameter whole, from the pieces of the tensor axis; they travel padded to the largest."""
    numels = [math.prod(cut.local_shape(index)) for index in range(cut.ways)]
    mine = value.new_zeros(max(numels))
    mine[: value.numel()] = value.reshape(-1)
    every = mine.new_empty((cut.ways, len(mine)))
    comm.all_gather(every, mine, ("tensor",), note=Note("state", name)).wait()
    pieces = [every[i, : numels[i]].view(cut.local_shape(i)) for i in range(cut.ways)]
    return assemble(pieces, cut).cpu()


def load_full_state_dict(directory: Directory, parts: Sequence[Part], state: Mapping[str, Tensor]) -> None:
    """Take the values of whole tensors; each rank copies its pieces, and nothing is sent.

    Raises:
        ValueError: missing or surplus names, or shapes that differ.
    """
    own = directory.aliases
    if own.keys() != state.keys():
        missing, surplus = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(
            f"the state does not fit the model: {len(missing)} names are missing {missing[:3]}, "
            f"{len(surplus)} are surplus {surplus[:3]}"
        )
    for name, (shape, _) in directory.shapes.items():
        if shape != tuple(state[name].shape):
            raise ValueError(f"{name!r} has shape {shape}, the state's has {tuple(state[name].shape)}")
    for part in parts:
        for unit in part.units:
            unit.settle()
        for name, parameter, flat, index in parameters_of(part.units):
            flat.write(index, state[name].to(parameter.dtype))
        for name, buffer in _buffers(part.model).items():
            buffer.copy_(state[name])
