"""Cuts a user's model into units, and lays their parameters in flat buffers.

    model ── wrap ──► units ── by dtype, training, sums ──► flat layouts ──► buffers, with this rank's pieces of values
                                                                              └─ parameters on meta get theirs later

Parameters on the meta device get their values afterwards (see ``zero.state.init``), so that a rank never has more
than its pieces and one module.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.table.cells import DENSE, EXPERTS, Cell, moves
from plait.table.flat import lay
from plait.table.mesh import DATA_AXES
from plait.table.parallelism import Parallelism
from plait.table.tensor_cut import TensorCut
from plait.tensor import CutWeight, Parallel
from plait.zero.place import write_at_rest
from plait.zero.storage import Flat, dtype_in, placeholder
from plait.zero.unit import Unit
from plait.zero.wrap import bucketed, wrap


@dataclass(frozen=True)
class SourceModel:
    """The user's model, from which stages are cut."""

    model: nn.Module
    names: Mapping[int, str]
    """The names of its parameters, by ``id``."""
    tied: frozenset[int] = frozenset()
    """The parameters that several stages use, by ``id``."""


@dataclass(frozen=True)
class Unmaterialized:
    """A parameter with a place in a flat buffer, but no value yet."""

    origin: nn.Parameter
    """The whole model's parameter, on meta."""
    old: nn.Parameter
    """The stage's parameter, on meta; the one in the buffer takes its place."""
    flat: Flat
    index: int


@dataclass(frozen=True)
class BuiltUnits:
    """The units of a stage, some of whose values may not be there yet."""

    model: nn.Module
    units: list[Unit]
    fresh: list[Unmaterialized]
    shapes: dict[int, tuple[int, ...]]
    """The whole shapes of the parameters that the tensor axis cuts, by ``id`` of the whole model's parameter."""
    names: list[str]
    """The names of the modules that are units, without the model itself; a bucket joins several of them."""


def build_units(
    model: nn.Module,
    origin: Mapping[int, nn.Parameter],
    whole: SourceModel,
    comm: Comm,
    parallelism: Parallelism,
    parallel: Parallel,
) -> BuiltUnits:
    """Cuts a stage into units whose flat buffers have this rank's pieces of the parameters with values.

    Args:
        origin: the whole model's parameters, by ``id`` of the stage's.
        parallel: the cuts by tensor parallelism, which are made before parameters are laid in their units.
    """
    strategy, cut, modules, mesh = parallelism.strategy, parallelism.cut, dict(model.named_modules()), comm.mesh
    asked = parallelism.units and [name for name in parallelism.units if name in modules]
    wrapped = wrap(model, asked, parallel.experts)
    names = [w.name for w in wrapped if w.name]
    if mesh.count(strategy.params.split) == 1:
        apart = [w for w in wrapped if w.name in parallel.experts]
        wrapped = (*bucketed([w for w in wrapped if w not in apart], parallelism.bucket), *apart)
    for module in modules.values():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(comm.device)
    loads_of = {axes: [0] * mesh.count(axes.of(DATA_AXES)) for axes in (DENSE, EXPERTS)}
    fresh: list[Unmaterialized] = []
    units: dict[str, Unit] = {}
    for w in wrapped:
        axes = EXPERTS if w.name in parallel.experts else DENSE
        tensor_rank = mesh.index(comm.rank, axes.cut)
        flats = []
        named = [(whole.names[id(origin[id(p)])], p) for _, p in w.parameters]
        tied = {id(p) for _, p in named if id(origin[id(p)]) in whole.tied}
        for group in _by_kind(named, strategy.params, parallel.summed, tied):
            alone = id(first := group[0][1]) in tied
            itemsize, real = dtype_in(strategy.params, first.dtype).itemsize, first.dtype.is_floating_point
            cuts = [parallel.cuts.get(id(p)) for _, p in group]
            loads = loads_of[axes] if not alone else [0] * len(loads_of[axes])  # each stage gives it the same owner
            here, there = (_shapes(group, cuts, index) for index in (tensor_rank, 0))
            first_rank = lay(there, itemsize, len(loads), cut, loads, real=real)
            layout = lay(here, itemsize, len(loads), cut, real=real, like=first_rank)
            sizes = [(b - a) * itemsize for a, b in pairwise(first_rank.bounds)]  # the same balance on all tensor ranks
            loads_of[axes] = [load + size for load, size in zip(loads_of[axes], sizes, strict=True)]
            values = [None if p.is_meta else p.data for _, p in group]
            off_meta = ((p, placeholder(p.dtype, comm.device).expand(p.shape)) for _, p in group)
            targets = [another(p, nothing) if p.is_meta else p for p, nothing in off_meta]
            for (_, old), new, tensor_cut in zip(group, targets, cuts, strict=True):
                if tensor_cut is not None and id(old) not in parallel.pieces:
                    CutWeight.adopt(new, tensor_cut)
            flat = Flat(layout, targets, strategy, comm, cuts, id(first) in parallel.summed, axes, alone)
            for index, ((_, old), value) in enumerate(zip(group, values, strict=True)):
                if value is None:
                    fresh.append(Unmaterialized(origin[id(old)], old, flat, index))
                else:
                    write_at_rest(flat, index, value)
            flats.append(flat)
        units[w.name] = Unit(w.name, w.module, flats, moves(strategy, mesh, axes), comm)
    for w in wrapped:
        around = [units[a] for a in units if w.name != a and (a == "" or w.name.startswith(a + "."))]
        units[w.name].relate([units[name] for name in w.borrows], around)
    shapes = {id(origin[key]): cut.shape for key, cut in parallel.cuts.items()}
    return BuiltUnits(model, list(units.values()), fresh, shapes, names)


def _shapes(
    group: Sequence[tuple[str, nn.Parameter]], cuts: Sequence[TensorCut | None], index: int
) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors that tensor rank ``index`` holds."""
    pairs = zip(group, cuts, strict=True)
    return [(name, tuple(p.shape) if cut is None else cut.local_shape(index)) for (name, p), cut in pairs]


def another(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Returns another parameter with these values, and the same attributes and hooks."""
    new = nn.Parameter(values, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    new._backward_hooks = copy.copy(parameter._backward_hooks)
    new._post_accumulate_grad_hooks = copy.copy(parameter._post_accumulate_grad_hooks)
    return new


def _by_kind(
    parameters: Sequence[tuple[str, nn.Parameter]], cell: Cell, summed: Collection[int], tied: Collection[int]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Groups parameters by dtype, by whether they train and by whether they are summed: a group shares a flat buffer.

    A parameter that several stages use has its own buffer, with the same layout on each of them.
    """
    groups: dict[tuple[torch.dtype, bool, bool, str], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        own = name if id(parameter) in tied else ""
        kind = (dtype_in(cell, parameter.dtype), parameter.requires_grad, id(parameter) in summed, own)
        groups.setdefault(kind, []).append((name, parameter))
    return list(groups.values())
