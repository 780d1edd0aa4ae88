"""Builds this rank's stages from a model and a pipeline.

    model ── blocks ── split ──► parts   the model's own modules, one part for each stage here ──► Stage
                          └────► edges   weights that several stages use

Without a pipeline there is one stage, and its part is the model itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

from torch import nn

from plait.comm import Comm
from plait.comm.texts import check_together
from plait.forward.compiled import check_compile, check_units
from plait.forward.random_ops import OwnLayer
from plait.forward.recompute import check_recompute
from plait.forward.sites import Sites
from plait.pipeline.blocks import cut
from plait.pipeline.pipeline_stage import PipelineStage
from plait.pipeline.program import BeforeForward, Blocks, StagePart, StageSettings, whole
from plait.pipeline.stage import Stage
from plait.pipeline.tied_weights import TiedWeight
from plait.schedule.partition import by_sizes, even
from plait.schedule.pipeline import Pipeline
from plait.table.mesh import AXES
from plait.table.parallelism import Parallelism
from plait.tensor import Parallel, parallel_plan
from plait.tensor.expert_axis import cut_experts, give_expert_axis
from plait.tensor.time_axis import give_time_axis
from plait.zero.build import SourceModel, build_units
from plait.zero.flat_gradient import FlatGradient
from plait.zero.state.full import Directory
from plait.zero.state.init import give_values
from plait.zero.state.weights import Weights
from plait.zero.unit import GatheredBytes
from plait.zero.wrap import automatic, wrap

Uses = Mapping[int, tuple[int, ...]]
"""The stages that use each parameter of the whole model, by its ``id``, in order."""


@dataclass(frozen=True)
class Built:
    """The stages of a rank, by number, with facts that all ranks know: the names of the blocks (``links``), their
    number on each stage (``split``), and how tensor parallelism cuts the whole model (``parallel``)."""

    stages: dict[int, Stage]
    edges: tuple[TiedWeight, ...]
    directory: Directory
    links: tuple[str, ...]
    split: tuple[int, ...]
    parallel: Parallel

    def gradients(self) -> dict[tuple[str, int], FlatGradient]:
        """This rank's copies of tied weights, by name and stage."""
        return {
            (edge.name, number): flat_gradient
            for edge in self.edges
            for number in self.stages.keys() & edge.stages
            for flat_gradient in self.stages[number].gradients.flats
            if any(slot.name == edge.name for slot in flat_gradient.flat.layout.slots)
        }


def split_of(blocks: Blocks, num_stages: int, sizes: Sequence[int] | None) -> tuple[range, ...]:
    """The blocks of each stage, equally many or as given by ``sizes``; raises ValueError if that does not fit."""
    try:
        if sizes is None:
            return even(len(blocks), num_stages)
        if wrong := [size for size in sizes if not isinstance(size, SupportsIndex)]:
            raise ValueError(f"a split with {wrong[0]!r}: give whole numbers, the blocks of each stage, as in (5, 4)")
        if len(sizes) != num_stages:
            raise ValueError(f"a split for {len(sizes)} stages, but the pipeline has {num_stages}: give as many sizes")
        return by_sizes(sizes, len(blocks))
    except ValueError as error:
        names = blocks.names if len(blocks) <= 12 else (*blocks.names[:3], "...", *blocks.names[-2:])
        raise ValueError(f"{error}; the blocks are {', '.join(names)}") from None


def build_stages(
    model: nn.Module,
    comm: Comm,
    parallelism: Parallelism,
    pipeline: Pipeline,
    seed: int,
    before_forward: BeforeForward,
    weights: Weights | None = None,
) -> Built:
    """Builds the stages that the pipeline gives this rank; the arguments are the engine's.  Raises ValueError for a
    model that cannot be cut, fewer blocks than stages, or a split that does not fit."""
    sizes, units = parallelism.split, parallelism.units
    parallel = parallel_plan(model, comm.mesh.tensor, parallelism.tensor_plan, sequence=parallelism.sequence_parallel)
    parallel = cut_experts(model, comm.mesh, parallel)
    check_compile(parallelism, comm.mesh.tensor, comm.device)
    wrapped = automatic(model) if units is None else ("", *units)
    check_recompute(model, wrapped, parallelism.recompute)
    names = {id(p): n for n, p in model.named_parameters()}
    owner, count = pipeline.owner, pipeline.num_stages
    if count == 1 and sizes is not None:
        raise ValueError(f"a split {tuple(sizes)}, but there is one stage: give the mesh a pipe axis, or leave it out")
    cutter = cut(model) if count > 1 else whole(model)
    blocks = cutter.blocks
    if parallelism.compile:
        check_units(model, wrapped, blocks.names)
    split = split_of(blocks, count, sizes) if count > 1 else (range(0),)
    using = stages_using(model, blocks, split)
    homes = _homes(model, blocks, split, using)
    directory = Directory.of(model, {name: owner[stage] for name, stage in homes.items()})
    edges = _edges(model, blocks, split, using)
    source = SourceModel(model, names, frozenset(key for key, stages in using.items() if len(stages) > 1))
    here, taken = comm.mesh.coordinates(comm.rank)["pipe"], set[int]()
    mine = [stage for stage in range(count) if owner[stage] == here]
    parts = {s: cutter.part(split[s], taken, comm.device) for s in mine}
    if units is not None:
        wrap(model, units)  # refuses unknown names
    settings = StageSettings(source, comm, parallelism, count, seed, pipeline.splits_backward, before_forward)
    stages = lay_stages(settings, parts, parallel, weights, make=Stage if pipeline.plain else PipelineStage)
    _give_axes([(model, parallel), *((stage.model, stage.parallel) for stage in stages.values())], settings)
    cutter.release(list(parts.values()))
    sizes = tuple(map(len, split)) if count > 1 else (1,)
    return Built(stages, edges, directory, blocks.names, sizes, parallel)


def _give_axes(placed: Sequence[tuple[nn.Module, Parallel]], settings: StageSettings) -> None:
    """Gives modules the context axis and the expert axis that they ask for."""
    mesh, parallelism = settings.comm.mesh, settings.parallelism
    for axis, setting in (("context", "ring_attention"), ("expert", "all_to_all")):
        if getattr(parallelism, setting) and mesh.axis(axis) == 1:
            raise ValueError(f"{setting} goes over the {axis} axis, and mesh '{mesh}' has none")
    if settings.time_axis is not None:
        give_time_axis([model for model, _ in placed], settings.time_axis)
    if mesh.count(("expert", "context", "tensor")) > 1:
        sequence, all_to_all = parallelism.sequence_parallel, parallelism.all_to_all
        give_expert_axis(placed, settings.comm, sequence=sequence, all_to_all=all_to_all)


def lay_stages(
    settings: StageSettings,
    parts: Mapping[int, StagePart],
    parallel: Parallel,
    weights: Weights | None,
    make: type[Stage],
) -> dict[int, Stage]:
    """Returns the stages of these parts, by number, with their units laid and their values drawn or read."""
    whole, comm = settings.whole, settings.comm
    plans = {s: parallel_of(parallel, part, settings.sites, last=s == settings.count - 1) for s, part in parts.items()}
    cut = settings.parallelism
    laid = {s: build_units(part.model, part.origin, whole, comm, cut, plans[s]) for s, part in parts.items()}
    error: Exception | None = None
    try:
        give_values(whole, list(laid.values()), settings.seed, weights)
    except Exception as problem:
        if weights is None:
            raise
        error = problem
    if weights is not None:  # a rank reads its own rows, and an error in them is an error for all
        check_together(comm, error, AXES)
    stages = {s: make(settings, s, part, plans[s], laid[s]) for s, part in parts.items()}
    gathered = GatheredBytes()
    for stage in stages.values():  # at rest so far
        stage.unsharding.open_units.gathered = gathered
    return stages


def _edges(model: nn.Module, blocks: Blocks, split: Sequence[range], using: Uses) -> tuple[TiedWeight, ...]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    edges, inside = [], _prefixes(blocks, split)
    for parameter, own in names.items():
        stages = using[id(parameter)]
        if len(stages) > 1:
            keys = tuple(tuple(name for name in own if f"{name}.".startswith(inside[stage])) for stage in stages)
            edges.append(TiedWeight(own[0], stages, keys))
    return tuple(edges)


def _homes(model: nn.Module, blocks: Blocks, split: Sequence[range], using: Uses) -> dict[str, int]:
    """The stage of each parameter and buffer; the first if there are several."""
    homes, inside = {}, _prefixes(blocks, split)
    for name, value in model.state_dict(keep_vars=True).items():
        here = [stage for stage, prefixes in enumerate(inside) if f"{name}.".startswith(prefixes)]
        homes[name] = min(using.get(id(value)) or here, default=0)
    return homes


def _prefixes(blocks: Blocks, split: Sequence[range]) -> list[tuple[str, ...]]:
    """For each stage, the prefixes of the names of its modules and parameters."""
    return [tuple(f"{part}." for part in blocks.on_stage(here)) for here in split]


def stages_using(model: nn.Module, blocks: Blocks, split: Sequence[range]) -> Uses:
    found: dict[int, set[int]] = {}
    inside = _prefixes(blocks, split)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        here = (stage for stage, prefixes in enumerate(inside) if f"{name}.".startswith(prefixes))
        found.setdefault(id(parameter), set()).update(here)
    return {key: tuple(sorted(stages)) for key, stages in found.items()}


def parallel_of(parallel: Parallel, part: StagePart, sites: Sites, *, last: bool) -> Parallel:
    """The whole model's tensor plan as it applies to one stage's part; the ``last`` stage has the loss."""
    here = [name for name, module in part.model.named_modules() if not isinstance(module, OwnLayer)]
    own = {sites.key(name): name for name in here}
    names = dict(part.model.named_parameters(remove_duplicate=False))
    origin = {key: id(p) for key, p in part.origin.items()}
    return replace(
        parallel,
        styles={name: style for name in (*here, *names) if (style := parallel.styles.get(sites.key(name))) is not None},
        cuts={key: parallel.cuts[old] for key, old in origin.items() if old in parallel.cuts},
        summed=frozenset(key for key, old in origin.items() if old in parallel.summed),
        experts=frozenset(name for name in here if sites.key(name) in parallel.experts),
        pieces=frozenset(key for key, old in origin.items() if old in parallel.pieces),
        sites=tuple(
            replace(s, name=own.get(s.name, s.name))
            for s in parallel.sites
            if s.name in own or (last and s.kind == "loss")
        ),
    )
