"""Faults of a pipeline: tied weights, backwards in two parts, messages, sums, parameters, masks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import verify_cases as cases
from torch import Tensor

from plait.comm import run
from plait.comm.base import DONE
from plait.comm.thread import ThreadComm
from plait.forward.context import RNGPosition
from plait.forward.products import WeightGradNode
from plait.pipeline.message import Handed
from plait.pipeline.p2p import PipelineP2P
from plait.pipeline.runtime import Runtime
from plait.pipeline.stage import Stage
from plait.pipeline.tied_weights import TiedWeights
from plait.schedule.actions import ACTIVATION, Action, Kind
from plait.step.engine import Engine
from plait.step.exchange import Exchange
from plait.step.norm import Norm
from plait.table.collectives import Note
from plait.zero.flat_gradient import FlatGradient
from plait.zero.gradients import Gradients
from plait.zero.unit import State, Unit
from plait.zero.unshard import Unsharding

Patch = pytest.MonkeyPatch


# ---- tied weights -------------------------------------------------------------------------------------------------


def tied_uses_summed_before_the_data_axes(patch: Patch) -> None:
    """The same sum in another order: a few last bits, which only the replay of the tree can see."""
    add_uses, reduce, finish = TiedWeights.reduce, Gradients.reduce, Engine.before_update

    def before_update(self: Engine, optimizer: Any) -> None:
        add_uses(self.placed.ties)
        for stage in self.placed.stages.values():
            reduce(stage.gradients)
        finish(self, optimizer)

    patch.setattr(TiedWeights, "reduce", lambda self: None)
    patch.setattr(Gradients, "reduce", lambda self: None)
    patch.setattr(Engine, "before_update", before_update)


def tied_uses_not_summed(patch: Patch) -> None:
    patch.setattr(TiedWeights, "reduce", lambda self: None)


def tied_uses_summed_twice(patch: Patch) -> None:
    original = TiedWeights.reduce

    def twice(self: TiedWeights) -> None:
        original(self)
        original(self)

    patch.setattr(TiedWeights, "reduce", twice)


def tied_uses_summed_on_the_first_stage_alone(patch: Patch) -> None:
    original = TiedWeights.reduce

    def first_alone(self: TiedWeights) -> None:
        others = {key: g for key, g in self.gradients.items() if key[1] != self.edges[0].stages[0]}
        kept = {key: g.accumulated.clone() for key, g in others.items()}
        original(self)
        for key, g in others.items():
            g.accumulated.copy_(kept[key])

    patch.setattr(TiedWeights, "reduce", first_alone)


def tied_weight_counted_on_every_stage(patch: Patch) -> None:
    original = Norm.__init__

    def without_copies(self: Norm, *args: Any, copies: Any = (), **rest: Any) -> None:
        original(self, *args, **rest)

    patch.setattr(Norm, "__init__", without_copies)


# ---- backward in two parts ----------------------------------------------------------------------------------------


def weigh_twice(patch: Patch) -> None:
    original = Stage.weight

    def twice(self: Stage, microbatch: int, *, last: bool) -> None:
        original(self, microbatch, last=False)
        original(self, microbatch, last=last)

    patch.setattr(Stage, "weight", twice)


def double_what_is_weighed(patch: Patch) -> None:
    original = WeightGradNode.backward
    patch.setattr(WeightGradNode, "backward", staticmethod(lambda ctx, g: (2 * original(ctx, g)[0], None)))


def drop_the_last_weight_part(patch: Patch) -> None:
    original = Stage.weight

    def weight(self: Stage, microbatch: int, *, last: bool) -> None:
        if not last:
            original(self, microbatch, last=last)

    patch.setattr(Stage, "weight", weight)


def drop_the_last_use_of_a_weight(patch: Patch) -> None:
    """Of a sum of pending products only the first is made."""
    original = WeightGradNode.forward

    def forward(ctx: Any, parameter: Tensor, waiting: list[Any]) -> Tensor:
        return original(ctx, parameter, waiting[:1])

    patch.setattr(WeightGradNode, "forward", staticmethod(forward))


def like(handed: Handed, tensors: list[Tensor]) -> Handed:
    """The same hand-over with other tensors."""
    return handed._replace(tensors=tensors)


def no_gradient_for_the_stage_before(patch: Patch) -> None:
    original = PipelineP2P.put

    def put(self: PipelineP2P, way: str, stage: int, microbatch: int, handed: Handed) -> None:
        nothing = like(handed, [torch.zeros_like(tensor) for tensor in handed.tensors])
        original(self, way, stage, microbatch, nothing if way == "B" else handed)

    patch.setattr(PipelineP2P, "put", put)


# ---- what is handed over ------------------------------------------------------------------------------------------


def one_late(patch: Patch, which: str) -> None:
    """A stage leaves what it made for the microbatch before."""
    original = PipelineP2P.put

    def put(self: PipelineP2P, way: str, stage: int, microbatch: int, handed: Handed) -> None:
        held = self.__dict__.setdefault("held", {})
        before = held.get((way, stage), handed)
        held[way, stage] = like(handed, [tensor.clone() for tensor in handed.tensors])
        original(self, way, stage, microbatch, before if way == which else handed)

    patch.setattr(PipelineP2P, "put", put)


def hand_over_the_gradient_of_another_microbatch(patch: Patch) -> None:
    one_late(patch, "B")


def hand_over_the_activation_of_another_microbatch(patch: Patch) -> None:
    one_late(patch, "F")


def use_the_first_activation_for_all(patch: Patch) -> None:
    """A stage goes on computing on memory that it got for microbatch 0."""
    original = PipelineP2P.get

    def get(self: PipelineP2P, way: str, stage: int, microbatch: int) -> Handed:
        came = original(self, way, stage, microbatch)
        if way == "F":
            copy = like(came, [tensor.clone() for tensor in came.tensors])
            came = self.__dict__.setdefault("first", {}).setdefault(stage, copy)
            came = like(came, [tensor.clone() for tensor in came.tensors])
        return came

    patch.setattr(PipelineP2P, "get", get)


def cross_two_messages(patch: Patch) -> None:
    """The gradient of microbatch 1 overtakes that of microbatch 0."""
    original = PipelineP2P.start

    def start(self: PipelineP2P, message: Action) -> None:
        if message.kind is Kind.SEND_B and message.microbatch == 0:
            self.__dict__["waits"] = message
            return
        original(self, message)
        if message.kind is Kind.SEND_B and message.microbatch == 1:
            original(self, self.__dict__["waits"])

    patch.setattr(PipelineP2P, "start", start)


def forget_a_message(patch: Patch) -> None:
    original = ThreadComm._send

    def send(self: ThreadComm, operation: Any, tensor: Tensor, dst: int) -> Any:
        if operation.note.phase == ACTIVATION and operation.note.microbatch == 1:
            return DONE
        return original(self, operation, tensor, dst)

    patch.setattr(ThreadComm, "_send", send)
    patch.setattr(cases, "run", lambda mesh, body, deadline: run(mesh, body, deadline=2))


def a_stray_message(patch: Patch) -> None:
    """Right numbers, and a message that nobody asked for."""
    original = PipelineP2P.wait_all

    def wait_all(self: PipelineP2P) -> None:
        original(self)
        every = torch.empty(self.comm.mesh.pipe)
        self.comm.all_gather(every, torch.zeros(1), ("pipe",), note=Note("activation", "stage 0", 0)).wait()

    patch.setattr(PipelineP2P, "wait_all", wait_all)


# ---- sums ---------------------------------------------------------------------------------------------------------


def seed_twice_as_much(patch: Patch) -> None:
    original = Runtime.run

    def run(self: Runtime, *rest: Any) -> None:
        *others, seed, update = rest
        original(self, *others, 2 * seed, update)

    patch.setattr(Runtime, "run", run)


def leave_out_the_reduction_of_a_stage(patch: Patch) -> None:
    reduce_all, build = Gradients.reduce, Stage.__init__
    left_out: set[int] = set()

    def built(self: Stage, *args: Any, **rest: Any) -> None:
        build(self, *args, **rest)
        if self.number == 0:
            left_out.add(id(self.gradients))

    def reduce(self: Gradients) -> None:
        if id(self) not in left_out:
            reduce_all(self)

    patch.setattr(Stage, "__init__", built)
    patch.setattr(Gradients, "reduce", reduce)


def add_ranks_in_reverse(patch: Patch) -> None:
    import plait.comm.thread as thread

    original = thread.ordered_sum

    def backwards(parts: list[Tensor], sizes: Any, op: str, out: Tensor) -> None:
        original(parts[::-1], tuple(sizes)[::-1], op, out)

    patch.setattr(thread, "ordered_sum", backwards)


def add_microbatches_in_reverse(patch: Patch) -> None:
    def accumulate(self: FlatGradient, piece: Tensor) -> None:
        pieces = self.__dict__.setdefault("pieces", [])
        if not self.started:
            pieces.clear()
        pieces.append(piece.clone())
        total = pieces[-1].clone()
        for earlier in pieces[-2::-1]:
            total += earlier
        self.accumulated.copy_(total)
        self.started = True

    patch.setattr(FlatGradient, "accumulate", accumulate)


def keep_only_the_last_microbatch(patch: Patch) -> None:
    def accumulate(self: FlatGradient, piece: Tensor) -> None:
        self.accumulated.copy_(piece)
        self.started = True

    patch.setattr(FlatGradient, "accumulate", accumulate)


def report_the_losses_of_a_rank_that_has_none(patch: Patch) -> None:
    original = Exchange.__init__

    def elsewhere(self: Exchange, comm: Any, names: Any, losses_at: int = 0) -> None:
        original(self, comm, names, (losses_at + 1) % comm.mesh.pipe)

    patch.setattr(Exchange, "__init__", elsewhere)


def report_losses_in_the_order_of_backwards(patch: Patch) -> None:
    original = Engine._update

    def update(self: Engine) -> None:
        losses = self.placed.runtime.losses
        self.placed.runtime.losses = dict(zip(losses, reversed(losses.values()), strict=True))
        original(self)

    patch.setattr(Engine, "_update", update)


# ---- parameters ---------------------------------------------------------------------------------------------------


def keep_parameters_over_the_update(patch: Patch) -> None:
    """RESHARD leaves the stage gathered, and nobody throws it away after the update."""

    def release(self: Unsharding) -> None:
        self.held = False
        for unit in self.units:
            unit.users -= 1
            if unit.state is State.UNSHARDING:
                unit.wait()

    patch.setattr(Unsharding, "release", release)
    patch.setattr(Unsharding, "forget", lambda self: None)


def gather_from_what_lies_at_rest(patch: Patch) -> None:
    """Right numbers; hpz keeps a copy nearby and does not use it."""
    patch.setattr(Unit, "keep", lambda self: None)


def go_on_from_kept_parameters(patch: Patch) -> None:
    """hpz begins the next step from what it kept in this one."""
    patch.setattr(Unit, "forget", lambda self: None)


def count_layers_from_0_in_every_stage(patch: Patch) -> None:
    """Initial values drawn under a name that a stage might give its first layer."""
    import plait.zero.state.init as init

    original = init.PrivateGenerator

    def generator(device: Any, what: str, seed: int, name: str) -> Any:
        return original(device, what, seed, re.sub(r"\d+", lambda number: str(int(number[0]) % 2), name))

    patch.setattr(init, "PrivateGenerator", generator)


# ---- dropout ------------------------------------------------------------------------------------------------------


def draw_for_the_next_microbatch(patch: Patch) -> None:
    """In flight: behind the first stage, forwards draw the masks of the samples that come next."""
    original = Stage.forward

    def forward(self: Stage, m: int, loss_fn: Any, batch: Any, position: RNGPosition, *rest: Any, **kw: Any) -> Any:
        if self.number > 0:
            position = replace(position, first_sample=position.first_sample + position.num_samples)
        return original(self, m, loss_fn, batch, position, *rest, **kw)

    patch.setattr(Stage, "forward", forward)


def recompute_with_the_latest_draw(patch: Patch) -> None:
    """What is recomputed in a backward draws what the last forward drew."""
    original = Stage._resume

    def resume(self: Stage, microbatch: int, **rest: Any) -> Any:
        latest, flight = self.current.context.position, original(self, microbatch, **rest)
        self.current.replace(position=latest)
        return flight

    patch.setattr(Stage, "_resume", resume)


def recompute_for_another_microbatch(patch: Patch) -> None:
    original = Stage._resume

    def resume(self: Stage, microbatch: int, **rest: Any) -> Any:
        flight = original(self, microbatch, **rest)
        position = flight.context.position
        assert position is not None
        self.current.replace(position=replace(position, first_sample=position.first_sample + 1))
        return flight

    patch.setattr(Stage, "_resume", resume)
