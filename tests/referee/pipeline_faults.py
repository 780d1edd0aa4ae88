"""Faults of a pipeline: tied weights, backwards in two parts, messages, sums, parameters, masks."""

import re
from dataclasses import replace
from typing import Any

import torch
import verify_cases as cases
from planted import Patch, after, before, instead
from torch import Tensor

from plait.comm import run
from plait.comm.base import DONE
from plait.comm.thread import ThreadComm
from plait.forward.context import RNGPosition
from plait.forward.products import WeightGradNode
from plait.pipeline.message import Handed
from plait.pipeline.p2p import PipelineP2P
from plait.pipeline.pipeline_runtime import PipelineRuntime
from plait.pipeline.pipeline_stage import PipelineStage
from plait.pipeline.stage import Stage
from plait.pipeline.tied_weights import TiedWeights
from plait.schedule.actions import ACTIVATION, Action, Kind
from plait.step.engine import Engine
from plait.step.exchange import Exchange
from plait.step.norm import Norm
from plait.table.collectives import Note
from plait.zero.flat_gradient import FlatGradient
from plait.zero.gradients import Gradients
from plait.zero.state import init
from plait.zero.unit import State, Unit
from plait.zero.unshard import Unsharding

# ---- tied weights -------------------------------------------------------------------------------------------------


def tied_uses_summed_before_the_data_axes(patch: Patch) -> None:
    """The same sum in another order: a few last bits, which only the replay of the tree can see."""
    add_uses, reduce = TiedWeights.add_uses, Gradients.finish_sums

    def late(self: Engine, optimizer: Any) -> None:
        add_uses(self.placed.ties)
        for stage in self.placed.stages.values():
            reduce(stage.gradients)

    tied_uses_not_summed(patch)
    patch.setattr(Gradients, "finish_sums", lambda self: None)
    before(Engine, "before_update")(late)(patch)


def tied_uses_not_summed(patch: Patch) -> None:
    patch.setattr(TiedWeights, "add_uses", lambda self: None)


@instead(TiedWeights, "add_uses")
def tied_uses_summed_twice(original: Any, self: TiedWeights) -> None:
    original(self)
    original(self)


@instead(TiedWeights, "add_uses")
def tied_uses_summed_on_the_first_stage_alone(original: Any, self: TiedWeights) -> None:
    others = {key: g for key, g in self.gradients.items() if key[1] != self.edges[0].stages[0]}
    kept = {key: g.accumulated.clone() for key, g in others.items()}
    original(self)
    for key, g in others.items():
        g.accumulated.copy_(kept[key])


@instead(Norm, "__init__")
def tied_weight_counted_on_every_stage(original: Any, self: Norm, *args: Any, copies: Any = (), **rest: Any) -> None:
    original(self, *args, **rest)


# ---- backward in two parts ----------------------------------------------------------------------------------------


@instead(PipelineStage, "weight")
def weigh_twice(original: Any, self: PipelineStage, microbatch: int, *, last: bool) -> None:
    original(self, microbatch, last=False)
    original(self, microbatch, last=last)


@instead(WeightGradNode, "backward")
def double_what_is_weighed(original: Any, ctx: Any, gradient: Tensor) -> Any:
    return 2 * original(ctx, gradient)[0], None


@instead(PipelineStage, "weight")
def drop_the_last_weight_part(original: Any, self: PipelineStage, microbatch: int, *, last: bool) -> None:
    if not last:
        original(self, microbatch, last=last)


def like(handed: Handed, tensors: list[Tensor]) -> Handed:
    """The same hand-over with other tensors."""
    return handed._replace(tensors=tensors)


def cloned(handed: Handed) -> Handed:
    return like(handed, [tensor.clone() for tensor in handed.tensors])


@instead(PipelineP2P, "put")
def no_gradient_for_the_stage_before(
    original: Any, self: PipelineP2P, way: str, s: int, m: int, handed: Handed
) -> None:
    nothing = like(handed, [torch.zeros_like(tensor) for tensor in handed.tensors])
    original(self, way, s, m, nothing if way == "B" else handed)


# ---- what is handed over ------------------------------------------------------------------------------------------


def one_late(patch: Patch, which: str) -> None:
    """A stage leaves what it made for the microbatch before."""

    def put(original: Any, self: PipelineP2P, way: str, stage: int, microbatch: int, handed: Handed) -> None:
        held = self.__dict__.setdefault("held", {})
        before = held.get((way, stage), handed)
        held[way, stage] = cloned(handed)
        original(self, way, stage, microbatch, before if way == which else handed)

    instead(PipelineP2P, "put")(put)(patch)


def hand_over_the_gradient_of_another_microbatch(patch: Patch) -> None:
    one_late(patch, "B")


def hand_over_the_activation_of_another_microbatch(patch: Patch) -> None:
    one_late(patch, "F")


@instead(PipelineP2P, "get")
def use_the_first_activation_for_all(original: Any, self: PipelineP2P, way: str, stage: int, microbatch: int) -> Handed:
    """A stage goes on computing on memory that it got for microbatch 0."""
    came: Handed = original(self, way, stage, microbatch)
    return cloned(self.__dict__.setdefault("first", {}).setdefault(stage, cloned(came))) if way == "F" else came


@instead(PipelineP2P, "start")
def cross_two_messages(original: Any, self: PipelineP2P, message: Action) -> None:
    """The gradient of microbatch 1 overtakes that of microbatch 0."""
    if message.kind is Kind.SEND_B and message.microbatch == 0:
        self.__dict__["waits"] = message
        return
    original(self, message)
    if message.kind is Kind.SEND_B and message.microbatch == 1:
        original(self, self.__dict__["waits"])


def forget_a_message(patch: Patch) -> None:
    def send(original: Any, self: ThreadComm, operation: Any, tensor: Tensor, dst: int) -> Any:
        lost = operation.note.phase == ACTIVATION and operation.note.microbatch == 1
        return DONE if lost else original(self, operation, tensor, dst)

    instead(ThreadComm, "_send")(send)(patch)
    patch.setattr(cases, "run", lambda mesh, body, deadline: run(mesh, body, deadline=2))


@after(PipelineP2P, "wait_all")
def a_stray_message(self: PipelineP2P) -> None:
    """Right numbers, and a message that no rank asked for."""
    every = torch.empty(self.comm.mesh.pipe)
    self.comm.all_gather(every, torch.zeros(1), ("pipe",), note=Note("activation", "stage 0", 0)).wait()


# ---- sums ---------------------------------------------------------------------------------------------------------


@instead(PipelineRuntime, "run")
def seed_twice_as_much(original: Any, self: PipelineRuntime, *rest: Any) -> None:
    *others, seed, update = rest
    original(self, *others, 2 * seed, update)


def leave_out_the_reduction_of_a_stage(patch: Patch) -> None:
    left_out: set[int] = set()

    def built(self: Stage, *args: Any) -> None:
        if self.number == 0:
            left_out.add(id(self.gradients))

    def reduce(original: Any, self: Gradients) -> None:
        if id(self) not in left_out:
            original(self)

    after(Stage, "__init__")(built)(patch)
    instead(Gradients, "finish_sums")(reduce)(patch)


@instead(FlatGradient, "accumulate")
def add_microbatches_in_reverse(original: Any, self: FlatGradient, piece: Tensor) -> None:
    pieces = self.__dict__.setdefault("pieces", [])
    if not self.started:
        pieces.clear()
    pieces.append(piece.clone())
    total = pieces[-1].clone()
    for earlier in pieces[-2::-1]:
        total += earlier
    self.accumulated.copy_(total)
    self.started = True


@instead(Exchange, "__init__")
def report_the_losses_of_a_rank_that_has_none(
    original: Any, self: Exchange, comm: Any, names: Any, losses_at: int = 0
) -> None:
    original(self, comm, names, (losses_at + 1) % comm.mesh.pipe)


@before(Engine, "_update")
def report_losses_in_the_order_of_backwards(self: Engine) -> None:
    losses = self.placed.runtime.losses
    self.placed.runtime.losses = dict(zip(losses, reversed(losses.values()), strict=True))


# ---- parameters ---------------------------------------------------------------------------------------------------


def keep_parameters_over_the_update(patch: Patch) -> None:
    """RESHARD leaves the stage gathered, and it is not discarded after the update."""

    def release(self: PipelineStage) -> None:
        self.unsharding.hold(False)
        for unit in self.units:
            unit.users -= 1
            if unit.state is State.UNSHARDING:
                unit.wait()

    patch.setattr(PipelineStage, "release", release)
    patch.setattr(Unsharding, "forget", lambda self: None)


def gather_from_what_lies_at_rest(patch: Patch) -> None:
    """Right numbers; hpz keeps a copy nearby and does not use it."""
    patch.setattr(Unit, "keep", lambda self: None)


@instead(init, "PrivateGenerator")
def count_layers_from_0_in_every_stage(original: Any, device: Any, what: str, seed: int, name: str) -> Any:
    """Initial values drawn under a name that a stage might give its first layer."""
    return original(device, what, seed, re.sub(r"\d+", lambda number: str(int(number[0]) % 2), name))


# ---- dropout ------------------------------------------------------------------------------------------------------


@instead(PipelineStage, "forward")
def draw_for_the_next_microbatch(
    original: Any,
    self: PipelineStage,
    m: int,
    loss_fn: Any,
    batch: Any,
    position: RNGPosition,
    *rest: Any,
    **options: Any,
) -> Any:
    """In flight: after the first stage, forwards draw the masks of the samples that come next."""
    if self.number > 0:
        position = replace(position, first_sample=position.first_sample + position.num_samples)
    return original(self, m, loss_fn, batch, position, *rest, **options)
