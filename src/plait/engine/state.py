"""Whole tensors in and out of a cut model: state dicts under the model's own names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.core.agreement import DATA_ORDER
from plait.core.collectives import Note
from plait.core.cuts import TensorCut
from plait.core.flat import lower
from plait.engine.gradients import parameters_of
from plait.engine.unit import Flat, Unit, send
from plait.tensor.parallel.pieces import assemble


@dataclass(frozen=True)
class Part:
    """What a rank has of a model: a stage's part and its units."""

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

    All ranks call it together and all get it, on the CPU; one unit is gathered at a time.  Of parameters that have
    master weights these are the values; frozen ones, which have none, come as a row in 16 bits has rounded them.
    Everything is in the dtype in which the model came.
    """
    whole = dict(whole_tensors(directory, parts, comm))
    return {key: whole[name] for key, name in directory.aliases.items()}


def whole_tensors(directory: Directory, parts: Sequence[Part], comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``full_state_dict`` one after the other, a tied weight once: nobody needs to hold them all.

    All ranks go through it together, to the end.
    """
    here = comm.mesh.coordinates(comm.rank)["pipe"]
    units: dict[str, Unit] = {}
    buffers: dict[str, Tensor] = {}
    for part in parts:
        for unit in part.units:
            units |= {slot.name: unit for flat in unit.flats for slot in flat.layout.slots if slot.name not in units}
        buffers = _buffers(part.model) | buffers
    opened: Unit | None = None
    values: dict[str, tuple[Tensor, TensorCut | None]] = {}
    for name in dict.fromkeys(directory.aliases.values()):
        shape, dtype = directory.shapes[name]
        value = torch.empty(shape, dtype=dtype, device=comm.device)
        if directory.homes[name] == here and name in units:
            if units[name] is not opened:
                _close(opened)
                opened, values = units[name], _opened(units[name], comm)
            found, cut = values[name]
            value = (found if cut is None else _uncut(name, found, cut, comm)).to(comm.device, dtype, copy=True)
        elif directory.homes[name] == here:
            value = buffers[name].detach().clone(memory_format=torch.contiguous_format)
            comm.broadcast(value.view(-1), DATA_ORDER, 0, note=Note("state", name)).wait()
        if comm.mesh.pipe > 1:
            comm.broadcast(value.view(-1), ("pipe",), directory.homes[name], note=Note("state", name)).wait()
        yield name, value.cpu()
    _close(opened)


def _opened(unit: Unit, comm: Comm) -> dict[str, tuple[Tensor, TensorCut | None]]:
    """A unit's parameters, gathered over the data axes, and their cuts over the tensor axis, by name."""
    unit.gather("state", -1)
    unit.show()
    found: dict[str, tuple[Tensor, TensorCut | None]] = {}
    for flat in unit.flats:
        values = [p.detach() for p in flat.parameters] if flat.master is None else _masters(flat, unit, comm)
        names = [slot.name for slot in flat.layout.slots]
        found |= dict(zip(names, zip(values, flat.cuts, strict=True), strict=True))
    return found


def _close(unit: Unit | None) -> None:
    if unit is not None and unit.split and not unit.users:
        unit.free()


def _masters(flat: Flat, unit: Unit, comm: Comm) -> list[Tensor]:
    """The master weights of a flat buffer, whole."""
    assert flat.master is not None
    full = torch.empty(flat.layout.numel, dtype=flat.master.dtype, device=comm.device)
    full[slice(*flat.optim_place)].copy_(flat.master)
    for move in unit.moves.masters:
        for message in lower(move, flat.layout, comm.mesh, comm.rank):
            send(comm, message, full, 0, Note("state", unit.name)).wait()
    return [full[s.offset : s.end].view(s.shape) for s in flat.layout.slots]


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
        for name, _, flat, index in parameters_of(part.units):
            flat.write(index, state[name])
        for name, buffer in _buffers(part.model).items():
            buffer.copy_(state[name])
