"""A model placed on one rank of a mesh: built, counted, saved and loaded.  ``engine`` makes the steps.

model ── check ──► stages of this rank ──► units, flat storage, gradients
                        │
                        ├── runtime        carries out the schedule
                        ├── ties, norm     sums over stages, over everything
                        └── owned          the runs that this rank's optimizer updates
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.comm.agree import gather_ints
from plait.comm.texts import gather_texts
from plait.forward.stays import StaysHere
from plait.pipeline.build_stages import build_stages
from plait.pipeline.p2p import PipelineP2P
from plait.pipeline.pipeline_runtime import runtime_of
from plait.pipeline.tied_weights import TiedWeights
from plait.schedule.pipeline import Pipeline, RankProgram
from plait.step.batch_norm import synchronise
from plait.step.exchange import Exchange
from plait.step.norm import Norm
from plait.step.step import whole_count
from plait.table.collectives import Note
from plait.table.flat import UnitLayout
from plait.table.mesh import AXES, DATA_AXES
from plait.table.parallelism import Parallelism
from plait.torch_private import DisableTorchFunctionSubclass
from plait.zero.optim import OwnedOptimizer
from plait.zero.owned import owned_runs
from plait.zero.planned import layouts_of
from plait.zero.state.checks import check_model, check_settings
from plait.zero.state.full import Part
from plait.zero.state.identity import optimizer_fields
from plait.zero.state.optimizer_state import OptimizerState
from plait.zero.state.pieces import StatePiece, frozen_pieces
from plait.zero.state.weights import Weights
from plait.zero.storage import dtype_in
from plait.zero.unit import Unit


class PlacedModel(StaysHere):
    """This rank's part of a model, and the code that moves its values.  Takes the arguments of ``Engine``.

    Args:
        settings: settings of the step, which must be the same on all ranks.
        agreed: texts that must also be the same on all ranks.
        before_forward: called with the model's arguments before each forward of the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        parallelism: Parallelism,
        optimizers: Sequence[Optimizer],
        *,
        seed: int,
        weights: Weights | None,
        settings: Mapping[str, object],
        agreed: Mapping[str, str],
        before_forward: Callable[[Sequence[Any], dict[str, Any]], None],
    ) -> None:
        self.model, self.comm, self.parallelism, self.seed = model, comm, parallelism, seed
        self.strategy, self.optimizers = parallelism.strategy, tuple(optimizers)
        names = {id(p): n for n, p in model.named_parameters()}
        settings = {**parallelism.compared(), "seed": seed, **settings}
        check_settings(comm, settings, {**agreed, **optimizer_fields(optimizers, names)})
        check_model(model, comm)
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self.num_parameters = sum(p.numel() for p in model.parameters())
        """The number of elements of the whole model."""
        trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        dtypes = {dtype_in(self.strategy.grads, dtype_in(self.strategy.params, p.dtype)) for p in model.parameters()}
        self.pipeline = Pipeline.of(parallelism, comm.mesh.pipe)
        self.num_stages = self.pipeline.num_stages
        """The number of stages on all ranks."""
        built = build_stages(model, comm, parallelism, self.pipeline, seed, before_forward, weights)
        self.stages, self.directory = built.stages, built.directory
        self.time_axis = next((stage.time_axis for stage in self.stages.values()), None)
        """The context axis, if the mesh has one."""
        synchronise((m for stage in self.stages.values() for m in stage.model.modules()), comm)
        self.modified = 0
        """The number of times that parameters got new values outside of their modules: updates, loads, a program's."""
        self.links, self.split = built.links, built.split
        """The names of the model's links, and the number of links of each stage."""
        self.shapes, self.cuts = shapes, {names[key]: cut for key, cut in built.parallel.cuts.items()}
        self.p2p = PipelineP2P(comm, self.pipeline.owner)
        self.runtime = runtime_of(self.stages, None if self.pipeline.plain else self.p2p)
        self.exchange = Exchange(comm, trainable, self.pipeline.owner[self.num_stages - 1])
        self.owned = owned_runs(g for stage in self.stages.values() for g in stage.gradients.flats)
        """The runs of parameters that this rank's optimizers update."""
        self.owned_optimizer = self._owner_of(self.optimizers, names) if self.optimizers else None
        self.ties = TiedWeights(built.edges, comm, built.gradients(), self.p2p.rank_of)
        self.norm = Norm(comm, self.strategy, dtypes, copies=self.ties.copies)
        self.parallel = built.parallel
        """The cuts of the whole model by tensor parallelism."""
        self.optimizer_state = self._state_of_optimizers()
        """Reads and writes the optimizers' state; None without optimizers."""
        self._programs: dict[tuple[int, bool], RankProgram] = {}
        self._trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]

    def _owner_of(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> OwnedOptimizer:
        cuts = self.comm.mesh.count(self.strategy.optim.split) > 1 and self.parallelism.cut == "element"
        return OwnedOptimizer(optimizers, names, self.owned, cuts=cuts, over_tensor=self.cuts)

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes optimizers that were built after the model was placed."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        check_settings(self.comm, {}, optimizer_fields(optimizers, names))
        on_pieces = any(
            hasattr(p, "piece") for one in optimizers for group in one.param_groups for p in group["params"]
        )
        self.owned_optimizer = self._owner_of(optimizers, names)
        if any(row[0] for row in gather_ints(self.comm, [on_pieces], AXES, Note("setup"))):
            self._unite_groups(self.owned_optimizer)
        self.optimizers = tuple(optimizers)
        self.optimizer_state = self._state_of_optimizers()

    def _unite_groups(self, owner: OwnedOptimizer) -> None:
        """Renames the groups of optimizers that were built on pieces: they get the names of all ranks' pieces."""
        mine = json.dumps([owner.groups[one] for one in owner.optimizers])
        rows = [json.loads(text) for text in gather_texts(self.comm, mine, Note("setup"))]
        for number, one in enumerate(owner.optimizers):
            groups = range(len(owner.groups[one]))
            names = [{name for row in rows for name in row[number][group]} for group in groups]
            owner.groups[one] = [[name for name in self.shapes if name in here] for here in names]

    def _state_of_optimizers(self) -> OptimizerState | None:
        if self.owned_optimizer is None:
            return None
        owner, trainable = self.owned_optimizer, self.exchange.names
        first = [piece for piece in owner.owned if self.norm.counts(piece)]
        return OptimizerState(self.comm, owner, self.shapes, self.cuts, first, trainable=trainable)

    def needed_optimizer_state(self) -> OptimizerState:
        """Reads and writes the optimizers' state; raises ValueError without optimizers."""
        if self.optimizer_state is None:
            raise ValueError("the engine has no optimizer: give Engine(optimizer=...) or call engine.use(optimizer)")
        return self.optimizer_state

    def program(self, num_microbatches: int, *, backward: bool = True) -> RankProgram:
        """This rank's actions in a step of this many microbatches, or an evaluation; made at the first call."""
        key = num_microbatches, backward
        if key not in self._programs:
            complete = self.pipeline.completed if backward else self.pipeline.evaluated
            here = self.comm.mesh.coordinates(self.comm.rank)["pipe"]
            self._programs[key] = RankProgram.of(complete(num_microbatches, self.strategy), here)
        return self._programs[key]

    def cut_in_time(
        self, microbatches: Sequence[Any], count_fn: Callable[[Any], int]
    ) -> tuple[Sequence[Any], int | None]:
        """This rank's steps of time of the microbatches, and the number of targets of the whole ones; without a context
        axis, the microbatches as they are."""
        if self.time_axis is None:
            return microbatches, None
        whole = sum(whole_count(count_fn(batch)) for batch in microbatches)
        return [self.time_axis.cut_batch(batch) for batch in microbatches], whole

    def frozen(self) -> list[str]:
        """The parameters that were frozen since the engine was built.

        Raises:
            ValueError: a parameter was thawed that was frozen when the engine was built.
        """
        with DisableTorchFunctionSubclass():  # parameters at rest answer slowly otherwise
            changed = [(name, trained) for name, p, trained in self._trained if p.requires_grad != trained]
        if thawed := [name for name, trained in changed if not trained]:
            raise ValueError(
                f"parameter {thawed[0]!r} was thawed, and was frozen when the Engine was built, so its gradient has no "
                f"memory: build the Engine while it trains, and freeze it afterwards"
            )
        return [name for name, _ in changed]

    @property
    def units(self) -> list[Unit]:
        """The units of all stages of this rank."""
        return [unit for stage in self.stages.values() for unit in stage.units]

    def layouts(self) -> tuple[UnitLayout, ...]:
        """The units of this rank as the planner sees them."""
        return tuple(layout for stage in self.stages.values() for layout in layouts_of(stage.unsharding))

    def bytes_held(self) -> dict[str, int]:
        """Bytes on this rank: ``params``, ``grads`` and ``optimizer`` between steps; and the most so far of whole
        parameters (``gathered_peak``) and of whole gradients (``gradient_buffers``).
        """
        stages = self.stages.values()
        masters = sum(f.master.nbytes for unit in self.units for f in unit.flats if f.master is not None)
        return {
            "params": sum(flat.rest.nbytes for unit in self.units for flat in unit.flats),
            "grads": sum(sums.nbytes for stage in stages for g in stage.gradients.flats for sums in g.sums()),
            "optimizer": masters + (0 if self.owned_optimizer is None else self.owned_optimizer.state_bytes()),
            "gathered_peak": max(stage.unsharding.open_units.gathered.peak for stage in stages),
            "gradient_buffers": sum(stage.gradients.buffers.bytes for stage in stages),
        }

    def put_away(self, what: str) -> None:
        """Reshards, before values are written at rest, everything that a forward without a backward left gathered."""
        self.unpin()
        if any(unit.pins for unit in self.units):
            raise ValueError(f"{what} inside of `with engine.gathered(...)`: leave the block first")
        self.comm.wait_for_readers()
        self._got_values()

    def unpin(self) -> None:
        """Reshards parameters that a forward without a backward, or a read with gradients, left gathered."""
        for stage in self.stages.values():
            stage.unsharding.drop_step()
            stage.unsharding.forget()

    def pieces(self) -> Iterator[StatePiece]:
        """Yields this rank's parameters and optimizer state, region by region, in their own memory.

        The ``first`` regions of all ranks together are every parameter, and every state that has a value per element.
        Numbers (``step``) and groups are in ``optimizer_state_dict(elements=False)``.
        """
        state, names = self.optimizer_state, set[str]()
        for o in self.owned:
            yield from StatePiece.of(o.name, "", o.place, o.view.detach(), first=self.norm.counts(o))
        for o, states in () if state is None else ((o, state.elements_of(o)) for o in state.owner.owned):
            for key, values in states.items():
                yield from StatePiece.of(o.name, key, o.place, values, first=self.norm.counts(o))
        here = self.comm.mesh.coordinates(self.comm.rank)
        copied = [axis for axis in DATA_AXES if axis not in self.strategy.params.split]
        for flat in (flat for unit in self.units for flat in unit.flats if not flat.trainable):
            home = self.directory.homes[flat.layout.slots[0].name] == here["pipe"]
            alone = self.comm.mesh.index(self.comm.rank, flat.axes.of(copied)) == 0
            yield from frozen_pieces(flat, first=alone and home, names=names)

    def publish(self) -> None:
        """Sends the values of the optimizers' pieces to where the row keeps parameters; all ranks call it together."""
        self.unpin()
        for work in [work for unit in self.units for work in unit.publish()]:
            work.wait()  # waits before a rank reads a parameter, or exits
        self.comm.wrote_common()
        self._got_values()

    def _got_values(self) -> None:
        """Notes new values as if written in place, so that autograd refuses the graphs of older forwards."""
        self.modified += 1
        if self.num_stages == 1:  # in a pipeline no program has a graph
            torch.autograd.graph.increment_version([p for _, p, _ in self._trained])

    @torch.no_grad()
    def exchange_values(self, others: Sequence[Tensor]) -> None:
        """Swaps the values of every owned run with ``others``; all ranks call it together."""
        self.put_away("an average")
        for piece, other in zip(self.owned, others, strict=True):
            before = piece.view.clone()
            piece.view.copy_(other)
            other.copy_(before)
        self.publish()

    def parts(self) -> list[Part]:
        """This rank's stages, for whole tensors in and out (see ``zero/state``)."""
        return [Part(stage.model, stage.units) for stage in self.stages.values()]
