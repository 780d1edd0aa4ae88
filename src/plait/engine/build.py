"""From a user's model to units: laying the parameters, keeping or making their values, freeing the rest.

Weights that arrive with values are kept, after a check that all ranks brought the same ones.  Parameters that are
still on the meta device are initialised module by module (see ``init``), so that a rank never holds more than its
pieces and one module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.comm import Comm
from plait.core.cells import Cell, Strategy, moves
from plait.core.collectives import Note
from plait.core.cuts import TensorCut
from plait.core.flat import Cut, lay
from plait.core.mesh import AXES
from plait.engine.generator import stream_key
from plait.engine.init import check_buffers, initial_values, replace_parameter
from plait.engine.links import StageModel
from plait.engine.unit import Flat, Unit, dtype_in
from plait.engine.weights import Weights, read_piece
from plait.engine.wrap import wrap
from plait.tensor.parallel import Parallel


@dataclass(frozen=True)
class Whole:
    """The user's model, from which stages are cut.

    ``names`` are its parameters' names by ``id``; ``tied`` are those that several stages use.
    """

    model: nn.Module
    names: Mapping[int, str]
    tied: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Fresh:
    """A parameter that is laid and has no value yet."""

    origin: nn.Parameter
    """The whole model's, on meta."""
    old: nn.Parameter
    """The stage's, on meta."""
    new: nn.Parameter
    """What takes its place."""
    flat: Flat
    index: int


@dataclass(frozen=True)
class Laid:
    """The units of a stage, some of whose values are still to come."""

    model: nn.Module
    units: list[Unit]
    fresh: list[Fresh]
    shapes: dict[int, tuple[int, ...]]
    """Whole shapes, by ``id`` of the whole model's parameter, of those that are cut over the tensor axis."""


_TABLES = (nn.Embedding, nn.EmbeddingBag)


def check_model(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError for what no engine can train: no parameters, or parameters without a shape; empty buffers;
    compiled modules; tables that a forward writes to; replicas that differ.
    """
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise ValueError(
            f"{len(lazy)} parameters have no shape yet ({', '.join(lazy[:3])}): call the model once on a sample before "
            f"its optimizer and Engine are built"
        )
    compiled = [name for name, m in model.named_modules() if m._compiled_call_impl or "_orig_mod" in m._modules]
    if compiled:
        raise ValueError(
            f"{compiled[0] or 'the model'!r} is compiled, and the compiler would trace into the engine's gathers and "
            f"dropout streams: compile functions inside of its modules (as of activations) instead"
        )
    bounded = [name for name, m in model.named_modules() if getattr(m, "max_norm", None) and isinstance(m, _TABLES)]
    if bounded and comm.mesh.size > 1:
        raise ValueError(
            f"{bounded[0]!r} has max_norm: each rank's forward would rewrite the rows that its own samples use, and "
            f"replicas would part; leave max_norm out, and normalise what the table returns"
        )
    check_buffers(model)
    if not any(True for _ in model.parameters()):
        raise ValueError("the model has no parameters: there is nothing to train")
    check_replicas(model, comm)


def build_units(
    part: StageModel,
    whole: Whole,
    comm: Comm,
    strategy: Strategy,
    *,
    names: Iterable[str] | None,
    cut: Cut,
    resting: dict[int, str],
    parallel: Parallel,
) -> Laid:
    """Cut a stage into units whose flat storages hold this rank's pieces; ``give_values`` comes next.

    Args:
        part: the stage; parameters with values, or on meta, or some of each.
        names: the modules that become units; None wraps automatically.
        cut: where pieces may end.
        resting: will hold the names, by ``id``, of parameters whose values are not here at the moment.
        parallel: how tensor parallelism cuts parameters, before they are laid in their units.

    Raises:
        ValueError: unknown unit names.
    """
    model = part.model
    wrapped = wrap(model, names)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(comm.device)
    plan, here = moves(strategy), comm.mesh.index(comm.rank, ("tensor",))
    loads = unloaded = [0] * comm.mesh.data_size  # a tied weight has the same owner on each of its stages
    fresh: list[Fresh] = []
    units: dict[str, Unit] = {}
    for w in wrapped:
        flats = []
        named = [(whole.names[id(part.origin[id(p)])], p) for _, p in w.parameters]
        tied = {id(p) for _, p in named if id(part.origin[id(p)]) in whole.tied}
        for group in _by_kind(named, strategy.params, parallel.summed, tied):
            first = group[0][1]
            alone = id(first) in tied
            itemsize, real = dtype_in(strategy.params, first.dtype).itemsize, first.dtype.is_floating_point
            cuts = [parallel.cuts.get(id(p)) for _, p in group]
            layout, first_rank = (
                lay(shapes, itemsize, comm.mesh.data_size, cut, unloaded if alone else loads, real=real)
                for shapes in (_shapes(group, cuts, index) for index in (here, 0))
            )
            sizes = [(b - a) * itemsize for a, b in pairwise(first_rank.bounds)]  # tensor ranks balance alike
            loads = [load + size for load, size in zip(loads, sizes, strict=True)]
            values = [None if p.is_meta else p.data for _, p in group]
            targets = [_off_meta(p, comm.device) for _, p in group]
            flat = Flat(layout, targets, strategy, comm, resting, cuts, id(first) in parallel.summed)
            for index, ((_, old), value) in enumerate(zip(group, values, strict=True)):
                if value is None:
                    fresh.append(Fresh(part.origin[id(old)], old, targets[index], flat, index))
                else:
                    flat.write(index, value)
            flats.append(flat)
        units[w.name] = Unit(w.name, w.module, flats, plan, comm)
    for w in wrapped:
        unit = units[w.name]
        unit.needs = [unit, *(units[name] for name in w.borrows)]
        unit.ancestors = {units[a].name for a in units if w.name != a and (a == "" or w.name.startswith(a + "."))}
    shapes = {id(part.origin[key]): cut.shape for key, cut in parallel.cuts.items()}
    return Laid(model, list(units.values()), fresh, shapes)


def give_values(
    whole: Whole, laid: Sequence[Laid], seed: int, device: torch.device, weights: Weights | None = None
) -> None:
    """Read or make the values of all parameters that are still on meta, and put real parameters in their places.

    Without ``weights`` each module of the whole model draws once, on its full shapes, whoever has parameters of it.

    Raises:
        ValueError: modules without values.
    """
    wanted: dict[int, list[Fresh]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for one in laid:
        shapes |= one.shapes
        for fresh in one.fresh:
            wanted.setdefault(id(fresh.origin), []).append(fresh)
    if weights is not None:
        for key, places in wanted.items():
            for fresh in places:
                read_piece(weights, whole.names[key], fresh.flat, fresh.index)
    else:
        for old, value in initial_values(whole.model, seed, device, shapes, wanted):
            for fresh in wanted[id(old)]:
                fresh.flat.write(fresh.index, value)
    for one in laid:
        for fresh in one.fresh:
            replace_parameter(one.model, fresh.old, fresh.new)


def _shapes(
    group: Sequence[tuple[str, nn.Parameter]], cuts: Sequence[TensorCut | None], index: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what tensor rank ``index`` holds."""
    return [
        (name, tuple(p.shape) if cut is None else cut.local_shape(index))
        for (name, p), cut in zip(group, cuts, strict=True)
    ]


def _off_meta(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not parameter.is_meta:
        return parameter
    nothing = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    return nn.Parameter(nothing, requires_grad=parameter.requires_grad)


def _by_kind(
    parameters: Sequence[tuple[str, nn.Parameter]], cell: Cell, summed: Collection[int], tied: Collection[int]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Who shares a flat buffer: parameters alike in dtype, in whether they train, and in whether they are summed.

    One that several stages use has a buffer of its own, laid alike on each of them.
    """
    groups: dict[tuple[torch.dtype, bool, bool, str], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        own = name if id(parameter) in tied else ""
        kind = (dtype_in(cell, parameter.dtype), parameter.requires_grad, id(parameter) in summed, own)
        groups.setdefault(kind, []).append((name, parameter))
    return list(groups.values())


def check_settings(comm: Comm, **settings: object) -> None:
    """Raises ValueError, on every rank, where ranks were given different settings, and names them."""
    digests = [stream_key(repr(value)) >> 1 for value in settings.values()]
    mine = torch.tensor(digests, dtype=torch.int64, device=comm.device)
    low, high = mine.clone(), mine.clone()
    comm.all_reduce(low, AXES, op="min", note=Note("setup")).wait()
    comm.all_reduce(high, AXES, op="max", note=Note("setup")).wait()
    if differing := [name for name, same in zip(settings, (low == high).tolist(), strict=True) if not same]:
        values = ", ".join(f"{name}={_short(settings[name])}" for name in differing)
        raise ValueError(f"the ranks were given different settings: rank {comm.rank} has {values}; give all the same")


def _short(value: object) -> str:
    text = getattr(value, "name", None) or repr(value)
    return text if len(text) < 40 else f"{text[:40]}..."


def check_replicas(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError, on every rank, when a parameter that came with values differs between ranks."""
    parameters = list(model.named_parameters())
    hashes = torch.tensor([_fingerprint(n, p) for n, p in parameters], dtype=torch.int64, device=comm.device)
    size = torch.tensor([len(parameters), -len(parameters)], dtype=torch.int64, device=comm.device)
    comm.all_reduce(size, AXES, op="max", note=Note("setup")).wait()
    if size[0] != -size[1]:
        raise ValueError(
            f"ranks brought models of {-int(size[1])} to {int(size[0])} parameters: build the same model everywhere"
        )
    low, high = hashes.clone(), hashes.clone()
    comm.all_reduce(low, AXES, op="min", note=Note("setup")).wait()
    comm.all_reduce(high, AXES, op="max", note=Note("setup")).wait()
    differing = [n for (n, _), same in zip(parameters, (low == high).tolist(), strict=True) if not same]
    if differing:
        raise ValueError(
            f"{len(differing)} parameters differ between ranks ({', '.join(differing[:3])}): give every rank the same "
            f"weights (one seed, or one file; threads share torch's generator, so draw before they start), or build "
            f"the model inside plait.empty_parameters()"
        )


def _fingerprint(name: str, parameter: Tensor) -> int:
    """63 bits of a parameter's name, shape, dtype and values (on meta: without the values)."""
    digest = hashlib.blake2b(
        f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}".encode(), digest_size=8
    )
    if not parameter.is_meta:
        digest.update(bytes(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data))
    return int.from_bytes(digest.digest(), "little") >> 1
