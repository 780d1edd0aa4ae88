"""Moves whole tensors in and out of a cut model: state dicts under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.comm.padded import start_gather
from plait.table.agreement import DATA_ORDER
from plait.table.collectives import Note
from plait.table.tensor_cut import TensorCut
from plait.tensor.pieces import assemble
from plait.zero.place import write_at_rest
from plait.zero.state.weights import Weights, read_piece, read_whole
from plait.zero.storage import Flat
from plait.zero.transfers import move_by_move, prepare
from plait.zero.unit import State, Unit, parameters_of


@dataclass(frozen=True)
class Part:
    """A rank's part of a model: the module of a stage, and its units."""

    model: nn.Module
    units: Sequence[Unit]


@dataclass(frozen=True)
class Directory:
    """The places of the whole model's tensors."""

    aliases: Mapping[str, str]
    """For every name in the state dict, the name of the parameter (of a tied one, the first)."""
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    homes: Mapping[str, int]
    """For every name, the pipe coordinate that has the tensor."""

    @classmethod
    def of(cls, model: nn.Module, homes: Mapping[str, int]) -> Directory:
        """Reads the names from a model before it is cut."""
        names = {id(p): n for n, p in model.named_parameters()}
        state = model.state_dict(keep_vars=True)
        return cls(
            {key: names.get(id(value), key) for key, value in state.items()},
            {key: (tuple(value.shape), value.dtype) for key, value in state.items()},
            homes,
        )


def full_state_dict(directory: Directory, parts: Sequence[Part], comm: Comm) -> dict[str, Tensor]:
    """Returns every parameter whole and every persistent buffer (data rank 0's), under ``model.state_dict()``'s keys.

    All ranks call it together and all get it, on the CPU; one unit is gathered at a time.  Values are those of the
    master weights if there are any (frozen parameters are rounded, under a row in 16 bits); dtypes are the model's.
    """
    whole = dict(whole_tensors(directory, parts, comm))
    return {key: whole[name] for key, name in directory.aliases.items()}


def whole_tensors(directory: Directory, parts: Sequence[Part], comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """Yields ``full_state_dict``'s tensors one by one, a tied weight once; all ranks iterate together, to the end."""
    here = comm.mesh.coordinates(comm.rank)["pipe"]
    units: dict[str, Unit] = {}
    buffers: dict[str, Tensor] = {}
    for part in reversed(parts):  # of several with the same name, the first wins
        units |= {slot.name: u for u in reversed(part.units) for flat in u.flats for slot in flat.layout.slots}
        buffers |= buffers_of(part.model)
    open_unit: Unit | None = None
    values: dict[str, tuple[Tensor, TensorCut | None, Flat]] = {}
    for name in dict.fromkeys(directory.aliases.values()):
        shape, dtype = directory.shapes[name]
        value = torch.empty(shape, dtype=dtype, device=comm.device)
        if directory.homes[name] == here and name in units:
            if units[name] is not open_unit:
                _reshard(open_unit)
                open_unit, values = units[name], _unsharded(units[name], comm)
            gathered, cut, flat = values[name]
            value = gathered if cut is None else _uncut(name, gathered, cut, flat)
            value = value.to(comm.device, dtype, copy=True)
        elif directory.homes[name] == here:
            value = buffers[name].detach().clone(memory_format=torch.contiguous_format)
            comm.broadcast(value.view(-1), DATA_ORDER, 0, note=Note("state", name)).wait()
        if comm.mesh.pipe > 1:
            comm.broadcast(value.view(-1), ("pipe",), directory.homes[name], note=Note("state", name)).wait()
        yield name, value.cpu()
    _reshard(open_unit)


def _unsharded(unit: Unit, comm: Comm) -> dict[str, tuple[Tensor, TensorCut | None, Flat]]:
    """Returns a unit's parameters, gathered over the data axes, with their cuts over other axes and flats, by name."""
    if unit.state is State.SHARDED:
        unit.unshard("state", -1)
    if unit.state is State.UNSHARDING:
        unit.wait()
    by_name: dict[str, tuple[Tensor, TensorCut | None, Flat]] = {}
    for flat in unit.flats:
        values = [p.detach() for p in flat.parameters] if flat.master is None else _masters(flat, unit, comm)
        for slot, value, cut in zip(flat.layout.slots, values, flat.cuts, strict=True):
            by_name[slot.name] = value, cut, flat
    return by_name


def _reshard(unit: Unit | None) -> None:
    if unit is not None and unit.split and not unit.users and not unit.pins:
        unit.reshard()


def _masters(flat: Flat, unit: Unit, comm: Comm) -> list[Tensor]:
    """Returns the whole master weights of a flat buffer."""
    assert flat.master is not None
    full = torch.empty(flat.layout.numel, dtype=flat.master.dtype, device=comm.device)
    full[slice(*flat.optim_place)].copy_(flat.master)
    for messages in move_by_move(unit.moves.masters, flat.layout, comm):
        for message in messages:
            prepare(comm, message, full, 0, Note("state", unit.name)).start().wait()
    return flat.views(full)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in a model's state dict."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {n: v for n, v in model.state_dict(keep_vars=True).items() if n not in parameters}


def _uncut(name: str, value: Tensor, cut: TensorCut, flat: Flat) -> Tensor:
    """Joins a parameter from the pieces of all ranks that share it, which are padded to the longest."""
    lengths = [cut.local_shape(index)[cut.dim] for index in range(cut.ways)]
    piece = value.reshape(cut.local_shape(flat.tensor_rank))
    pieces = start_gather(flat.comm, piece, cut.dim, lengths, flat.axes.cut, Note("state", name))()
    return assemble(pieces.split(lengths, cut.dim), cut).cpu()


def load_full_state_dict(directory: Directory, parts: Sequence[Part], state: Mapping[str, Tensor]) -> None:
    """Gives each rank's pieces the values of whole tensors; nothing is sent."""
    own = directory.aliases
    if own.keys() != state.keys():
        missing, surplus = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(
            f"the state does not fit the model: {len(missing)} names are missing {missing[:3]}, "
            f"{len(surplus)} are surplus {surplus[:3]}"
        )
    for name, (shape, dtype) in directory.shapes.items():
        if shape != tuple(state[name].shape):
            raise ValueError(f"{name!r} has shape {shape}, the state's has {tuple(state[name].shape)}")
        if state[name].is_complex() and not dtype.is_complex:
            raise ValueError(f"{name!r} is {dtype}, the state's is {state[name].dtype}: give its real part")
    for part in parts:
        for name, _, flat, index in parameters_of(part.units):
            write_at_rest(flat, index, state[name])
        for name, buffer in buffers_of(part.model).items():
            buffer.copy_(state[name])


def load_weights(directory: Directory, parts: Sequence[Part], weights: Weights) -> None:
    """Reads the rows that cover this rank's pieces; a tied parameter goes by its first name."""
    for part in parts:
        for name, _, flat, index in parameters_of(part.units):
            read_piece(weights, directory.aliases.get(name, name), flat, index)
        for name, buffer in buffers_of(part.model).items():
            read_whole(weights, name, buffer)
