"""From a model and a pipeline to the stages of this rank.

    model ── chain of links ── split ──► parts   the model's own links, one part for each stage here ──► Stage
                                  └────► edges   weights that several stages use

Without a pipeline there is one stage, and its part is the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.comm import Comm
from plait.core.parallelism import Parallelism
from plait.engine.data_parallel.build import SourceModel, build_units
from plait.engine.data_parallel.flat_gradient import FlatGradient
from plait.engine.data_parallel.wrap import automatic, wrap
from plait.engine.forward.recompute import check_recompute
from plait.engine.pipeline.stage import Place, Stage
from plait.engine.pipeline.stage_model import Chain, StageModel, chain_of, cut_off, parallel_of, stages_using
from plait.engine.pipeline.tied_weights import TiedWeight
from plait.engine.state.full import Directory
from plait.engine.state.init import give_values
from plait.engine.state.weights import Weights
from plait.schedule.partition import by_sizes, even
from plait.schedule.pipeline import Pipeline
from plait.tensor_parallel import Parallel, parallel_plan
from plait.tensor_parallel.gemm import Gemm, find_gemm

BeforeForward = Callable[[Sequence[Any], dict[str, Any]], None]

MOST_NAMED = 12
"""Longer chains are named by their first and last links."""


@dataclass(frozen=True)
class Built:
    """The stages of a rank, by number, and what the ranks know of all of them."""

    stages: dict[int, Stage]
    edges: tuple[TiedWeight, ...]
    directory: Directory
    links: Chain
    split: tuple[int, ...]
    """How many of them each stage has."""
    parallel: Parallel
    """How tensor parallelism cuts the whole model."""

    def gradients(self) -> dict[tuple[str, int], FlatGradient]:
        """This rank's copies of tied weights, by name and stage."""
        return {
            (edge.name, number): flat_gradient
            for edge in self.edges
            for number in self.stages.keys() & edge.stages
            for flat_gradient in self.stages[number].gradients.flats
            if any(slot.name == edge.name for slot in flat_gradient.flat.layout.slots)
        }


def split_of(chain: Chain, num_stages: int, sizes: Sequence[int] | None) -> tuple[range, ...]:
    """The links of each stage: equally many, or as many as a user says.

    Raises:
        ValueError: more stages than links, or sizes that do not fit.
    """
    try:
        if sizes is None:
            return even(len(chain), num_stages)
        if len(sizes) != num_stages:
            given = f"a split for {len(sizes)} stages, but the pipeline has {num_stages}"
            raise ValueError(f"{given}: give {num_stages} sizes")
        return by_sizes(sizes, len(chain))
    except ValueError as error:
        names = chain if len(chain) <= MOST_NAMED else (*chain[:3], "...", *chain[-2:])
        raise ValueError(f"{error}; the links are {', '.join(names)}") from None


def build_stages(
    model: nn.Module,
    comm: Comm,
    parallelism: Parallelism,
    pipeline: Pipeline,
    seed: int,
    before_forward: BeforeForward,
    weights: Weights | None = None,
) -> Built:
    """The stages that the pipeline gives this rank; the arguments are the engine's.

    Raises:
        ValueError: a model that does not declare its links, fewer links than stages, a split that does not fit.
    """
    sizes, units = parallelism.split, parallelism.units
    parallel = parallel_plan(model, comm.mesh.tensor, parallelism.tensor_plan, sequence=parallelism.sequence_parallel)
    gemm = find_gemm(parallelism.gemm)
    check_recompute(model, automatic(model) if units is None else units, parallelism.recompute)
    names = {id(p): n for n, p in model.named_parameters()}
    owner, count = pipeline.owner, pipeline.num_stages
    chain: Chain = ()
    split: tuple[range, ...] = (range(1),)
    edges: tuple[TiedWeight, ...] = ()
    if count == 1:
        if sizes is not None:
            raise ValueError(
                f"a split {tuple(sizes)}, but there is one stage: give the mesh a pipe axis, or leave it out"
            )
        directory = Directory.of(model, dict.fromkeys(model.state_dict(), 0))
        parts = {0: StageModel.whole(model)}
        whole = SourceModel(model, names)
    else:
        chain = chain_of(model)
        split = split_of(chain, count, sizes)
        using = stages_using(model, chain, split)
        directory = Directory.of(model, _homes(model, chain, split, owner, using))
        edges = _edges(model, chain, split, using)
        whole = SourceModel(model, names, frozenset(key for key, stages in using.items() if len(stages) > 1))
        here = comm.mesh.coordinates(comm.rank)["pipe"]
        taken: set[int] = set()
        parts = {s: StageModel.part(model, chain, split[s], taken) for s in range(count) if owner[s] == here}
        if units is not None:
            wrap(model, units)  # refuses names that are nowhere
    stages = lay_stages(
        whole, parts, count, comm, parallelism, parallel, gemm, seed, pipeline.splits_backward, before_forward, weights
    )
    if count > 1:
        cut_off(model, list(parts.values()))
    return Built(stages, edges, directory, chain, tuple(map(len, split)), parallel)


def lay_stages(
    whole: SourceModel,
    parts: Mapping[int, StageModel],
    count: int,
    comm: Comm,
    parallelism: Parallelism,
    parallel: Parallel,
    gemm: Gemm,
    seed: int,
    split_backward: bool = False,
    before_forward: BeforeForward = lambda args, kwargs: None,
    weights: Weights | None = None,
) -> dict[int, Stage]:
    """Stages of these parts, of ``count`` in all, with their units laid and their values drawn or read."""
    resting: dict[int, dict[int, str]] = {s: {} for s in parts}
    plans = {s: parallel_of(parallel, part, last=s == count - 1) for s, part in parts.items()}
    laid = {}
    for s, part in parts.items():
        modules = dict(part.model.named_modules())
        laid[s] = build_units(
            part.model,
            part.origin,
            whole,
            comm,
            parallelism.strategy,
            names=None if parallelism.units is None else [name for name in parallelism.units if name in modules],
            cut=parallelism.cut,
            resting=resting[s],
            parallel=plans[s],
        )
    give_values(whole, list(laid.values()), seed, comm.device, weights)
    stages = {
        s: Stage(
            part,
            whole,
            Place(s, count),
            comm,
            laid[s].units,
            resting[s],
            parallelism,
            parallel=plans[s],
            gemm=gemm,
            seed=seed,
            split_backward=split_backward,
            before_root=before_forward,
        )
        for s, part in parts.items()
    }
    for stage in stages.values():
        stage.unsharding.beside([peer.unsharding for peer in stages.values()])
    return stages


def _edges(
    model: nn.Module, chain: Chain, split: Sequence[range], using: Mapping[int, tuple[int, ...]]
) -> tuple[TiedWeight, ...]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    edges = []
    for parameter, own in names.items():
        stages = using[id(parameter)]
        if len(stages) > 1:
            links = [tuple(f"{chain[i]}." for i in split[stage]) for stage in stages]
            keys = tuple(tuple(name for name in own if name.startswith(prefixes)) for prefixes in links)
            edges.append(TiedWeight(own[0], stages, keys))
    return tuple(edges)


def _homes(
    model: nn.Module,
    chain: Chain,
    split: Sequence[range],
    owner: Mapping[int, int],
    using: Mapping[int, tuple[int, ...]],
) -> dict[str, int]:
    """The pipe coordinate that has a parameter (of a tied one: the first) or a buffer."""
    stage_of = {chain[i]: stage for stage, links in enumerate(split) for i in links}
    homes = {}
    for name, value in model.state_dict(keep_vars=True).items():
        inside = [stage for link, stage in stage_of.items() if name.startswith(link + ".")]
        homes[name] = owner[using[id(value)][0] if id(value) in using else min(inside, default=0)]
    return homes
