"""Every planted fault, and the judges' expected report: the word, the step, the phase, the tensor, the cause.

LAYOUTS    code broken on purpose while a layout runs; the single process runs without the fault
SHARED     code broken while both run: bitwise, and different from plain PyTorch
LOOPS      training loops that are wrong by hand, under a witness (``loops.run``)

The published bugs that run on torch's own engines are in ``silent_bugs.py``, in the same form.
"""

# ruff: noqa: E501 (a row is a line)

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import data_faults as d
import field_faults as f
import pipeline_faults as p
import shared_faults as s
import tensor_faults as t
from planted import Put
from torch.optim import SGD, AdamW
from verify_cases import GPT, TINY

from plait.run.config.settings import VerifyConfig


@dataclass(frozen=True)
class Fault:
    """One fault in several layouts.

    ``seen`` are the comparisons that must see it, or the words of the error that it raises.  ``step`` is None where it
    depends on the processor, ``name`` begins the tensor's name, ``cause`` is a part of the cause.  Without a ``phase``
    the numbers are right, and the ledger alone names the message.
    """

    put: Put
    layouts: tuple[VerifyConfig, ...]
    seen: frozenset[str] | str
    step: int | None = None
    phase: str | None = None
    name: str = ""
    cause: str = ""


def fault(put: Put, layouts: list[VerifyConfig], seen: set[str] | str, *place: Any) -> Fault:
    return Fault(put, tuple(layouts), seen if isinstance(seen, str) else frozenset(seen), *place)


LEDGER = {"ledger"}
GRADIENT = {"tree: gradient"}
SUMS = {*GRADIENT, "tree: norm"}
LOSS = {"tree: loss"}
VALUES = {*LOSS, *GRADIENT}
NORM = {"tree: norm"}
SPLIT = {*VALUES, *LEDGER}


def data(*layouts: tuple[str, str, int]) -> list[VerifyConfig]:
    return [replace(TINY, mesh=mesh, strategy=row, microbatches=m) for mesh, row, m in layouts]


TWO, FOUR = "shard=2", "replica=2 shard=2"

DATA = [
    fault(d.drop_a_reduction, data((TWO, "ddp", 1), (TWO, "zero3", 3), (FOUR, "hsdp", 3)), {*GRADIENT, *LEDGER}, 0, "sum", "1."),
    fault(d.skip_the_first_layer, data((TWO, "ddp", 1), (TWO, "zero3", 3)), SUMS, 0, "sum", "0.", "nothing is in it"),
    fault(d.average_instead_of_sum, data((TWO, "zero1", 1), (FOUR, "psdp", 3)), SUMS, 0, "sum", "2.", "every part counts 1/"),
    fault(d.swap_two_shards, data((TWO, "zero3", 1), ("shard=4", "hpz", 3)), VALUES, 0, "initial values", "0.", "gathered into the wrong places"),
    fault(d.drop_the_last_microbatch, data((TWO, "ddp", 3), (FOUR, "hsdp", 3)), GRADIENT, 0, "backward", "2.linear", "microbatch 2 of data rank 0"),
    fault(d.keep_only_the_last_microbatch, data((FOUR, "hsdp", 3)), GRADIENT, 0, "sum", "2.", "only microbatch 2"),
    fault(d.never_zero_gradients, data((TWO, "ddp", 1), (TWO, "zero3", 3)), {"tree: gradient", "tree: parameter"}, 1, "sum", "2.", "goes on from the sum of the step before"),
    fault(d.dropout_by_local_sample, data((TWO, "ddp", 1)), VALUES, 0, "forward", "0.dropout", "another mask"),
    fault(d.dropout_the_same_in_every_step, data((TWO, "zero3", 1)), VALUES, 1, "forward", "0.dropout", "another mask"),
    # which runs the ranks sum for the norm is taken from the layout, so only the plain step can see this one:
    fault(d.norm_counts_replicas_twice, data(("replica=2", "hsdp", 1), (TWO, "ddp", 1)), {"plain: norm"}, 0, "norm", "", "counted 2 times"),
    fault(d.norm_of_this_rank_only, data((TWO, "zero2", 1)), NORM, 0, "norm", "", "rank 0's own elements"),
    fault(d.mean_of_means, data((TWO, "ddp", 1)), VALUES, 0, "backward", "2.linear", "a mean of means"),
    fault(d.reduce_across_replicas_every_microbatch, data((FOUR, "hsdp", 3)), LEDGER),
    fault(d.never_publish, data((TWO, "zero1", 1)), {"tree: loss", "tree: parameter", *LEDGER}, 1, "parameter", "0.", "from before the last update"),
    fault(d.every_layer_from_one_seed, data((TWO, "zero3", 1)), LOSS, 0, "initial values", "0."),
    fault(d.add_ranks_in_reverse, data(("shard=3", "zero3", 1)), {*GRADIENT, "tree: parameter"}, 0, "sum", "", "another order"),
]  # fmt: skip

CHAIN = replace(TINY, layers=9, steps=3, batch=12)
"""12 samples: microbatches of one shape, so that one may stand for another."""
DECODER = replace(GPT, layers=3, steps=2, batch=12)
PLAIN: dict[str, Any] = {"mesh": "pipe=2", "schedule": "1f1b", "strategy": "ddp", "microbatches": 3}
DDP = PLAIN | {"mesh": "pipe=2 shard=2"}
V: dict[str, Any] = {"mesh": "pipe=2 shard=2", "schedule": "zbv", "strategy": "zero3", "microbatches": 3}
ZERO2 = V | {"schedule": "zb_h1", "strategy": "zero2"}
GPIPE: dict[str, Any] = {"mesh": "pipe=3", "schedule": "gpipe", "strategy": "ddp", "microbatches": 4}
ROUNDS = V | {"schedule": "interleaved", "microbatches": 4}
HPZ = ROUNDS | {"mesh": "pipe=2 replica=2 shard=2", "strategy": "hpz", "microbatches": 3}
HPZ_V = HPZ | {"schedule": "zbv"}


def pipes(chain: dict[str, Any] | None, decoder: dict[str, Any] | None) -> list[VerifyConfig]:
    found = (replace(job, **layout) for job, layout in ((CHAIN, chain), (DECODER, decoder)) if layout is not None)
    return list(found)


PIPELINES = [
    fault(p.tied_uses_summed_before_the_data_axes, [*pipes(None, DDP), *pipes(None, DDP | {"schedule": "zbv"})], GRADIENT, 0, "sum", "embed", "another order"),
    fault(p.tied_uses_not_summed, pipes(None, PLAIN), {*SUMS, *LEDGER}, 0, "sum", "embed", "its use as"),
    fault(p.tied_uses_not_summed, pipes(None, V), SUMS, 0, "sum", "embed", "its use as"),
    fault(p.tied_uses_summed_twice, pipes(None, PLAIN), {*SUMS, *LEDGER}, 0, "sum", "embed", "every part counts 2 times"),
    fault(p.tied_uses_summed_twice, pipes(None, V), SUMS, 0, "sum", "embed", "every part counts 2 times"),
    fault(p.tied_uses_summed_on_the_first_stage_alone, [*pipes(None, PLAIN), *pipes(None, ROUNDS)], GRADIENT, 0, "sum", "embed", "its use as"),
    fault(p.tied_weight_counted_on_every_stage, [*pipes(None, PLAIN), *pipes(None, V)], {"plain: norm"}, 0, "norm", "", "counted more than once"),
    fault(p.weigh_twice, [*pipes(ZERO2, None), *pipes(V, None)], "has no forward before it"),
    fault(p.double_what_is_weighed, pipes(ZERO2, V), SUMS, 0, "contribution"),
    fault(p.drop_the_last_weight_part, pipes(ZERO2, V), SUMS, 0, "sum", "", "microbatch 2 of each rank is missing"),
    fault(p.no_gradient_for_the_stage_before, pipes(PLAIN, V), SUMS, 0, "backward", "", "no gradient comes back"),
    fault(p.hand_over_the_gradient_of_another_microbatch, pipes(GPIPE, V), SUMS, 0, "backward", "", "it is that of microbatch 0"),
    fault(p.hand_over_the_activation_of_another_microbatch, pipes(GPIPE, ROUNDS), VALUES, 0, "forward", "", "it is that of microbatch 0"),
    fault(p.use_the_first_activation_for_all, pipes(PLAIN, V), VALUES, 0, "forward", "", "it is that of microbatch 0"),
    fault(p.cross_two_messages, pipes(GPIPE, PLAIN | {"schedule": "gpipe"}), SUMS, 0, "backward", "", "it is that of microbatch 1"),
    fault(p.forget_a_message, pipes(PLAIN, None), "waited 2 s in recv .* did not send"),
    fault(p.a_stray_message, pipes(PLAIN, V), LEDGER),
    fault(p.seed_twice_as_much, pipes(PLAIN, V), SUMS, 0, "backward", "", "every part counts 2 times"),
    fault(p.leave_out_the_reduction_of_a_stage, pipes(DDP, DDP | {"schedule": "zbv", "strategy": "zero1"}), {*SUMS, *LEDGER}, 0, "sum", "", "is missing"),
    fault(p.add_microbatches_in_reverse, pipes(V, ROUNDS), GRADIENT, None, "sum", "", "another order"),
    fault(p.report_the_losses_of_a_rank_that_has_none, pipes(PLAIN, V), LOSS, 0, "loss"),
    fault(p.report_losses_in_the_order_of_backwards, pipes(PLAIN, V), LOSS, 0, "loss", "", "it is that of microbatch 2"),
    fault(p.keep_parameters_over_the_update, pipes(V, ROUNDS), SPLIT, 1, "parameter", "", "from before the last update"),
    fault(p.gather_from_what_lies_at_rest, pipes(HPZ, HPZ_V), LEDGER),
    fault(p.count_layers_from_0_in_every_stage, pipes(PLAIN, V), VALUES, 0, "initial values"),
    fault(p.draw_for_the_next_microbatch, pipes(PLAIN, V), VALUES, 0, "forward", "", "another mask"),
]  # fmt: skip


def cut(*jobs: VerifyConfig, sequence: bool = False) -> list[VerifyConfig]:
    return [replace(job, strategy="zero1", sequence_parallel=sequence) for job in jobs]


LOUD, UNLIKE = "differs between the tensor ranks", "different losses"
ALONE, IN_TIME = cut(t.GPT), cut(t.GPT, sequence=True)
BOTH = [*ALONE, *IN_TIME]

TENSOR = [
    fault(t.drop_the_reduction_of_what_enters, ALONE, LOUD),
    fault(t.drop_the_reduction_of_what_enters, IN_TIME, {*GRADIENT, *LEDGER}, 0, "backward", "blocks.1.mlp_norm"),
    fault(t.drop_the_sum_after_a_row, ALONE, LOUD),
    fault(t.drop_the_sum_after_a_row, IN_TIME, SPLIT, 0, "forward", "blocks.0.mlp.down", "a missing sum"),
    fault(t.drop_the_sum_after_the_embedding, ALONE, LOUD),
    fault(t.drop_the_sum_after_the_embedding, IN_TIME, SPLIT, 0, "forward", "embed", "a missing sum"),
    fault(t.forget_to_sum_what_is_summed, IN_TIME, LOUD),
    fault(t.norm_counts_whole_parameters_on_every_tensor_rank, BOTH, NORM, 0, "norm", "", "counted more than once"),
    fault(t.norm_counts_the_first_tensor_rank_alone, ALONE, NORM, 0, "norm", "", "own elements"),
    fault(t.every_rank_draws_the_mask_of_the_first, [*BOTH, *cut(t.DEEP)], VALUES, 0, "forward", "", "another mask"),
    fault(t.skip_a_bias, cut(t.DEEP), VALUES, 0, "forward", "1.linear"),
    fault(t.add_a_row_bias_on_every_rank, cut(t.DEEP), VALUES, 0, "forward", "2.linear"),
    fault(t.swap_the_pieces_of_two_ranks, BOTH, VALUES, 0, "initial values", "blocks.0.attention.output.weight", "wrong places"),
    fault(t.number_the_ranks_the_other_way_round, ALONE, VALUES, 0, "initial values", "embed.weight", "wrong places"),
    fault(t.look_tokens_up_one_row_off, cut(t.FOUR), VALUES, 0, "forward", "embed"),
    fault(t.count_classes_from_the_wrong_one, cut(t.FOUR), VALUES, 0, "loss"),
    fault(t.take_ones_own_largest_logit, ALONE, UNLIKE),
    fault(t.take_ones_own_sum_of_exponentials, ALONE, UNLIKE),
    fault(t.take_ones_own_target_logit, IN_TIME, UNLIKE),
    fault(t.compare_the_inputs_before_every_forward, ALONE, LEDGER),
    fault(t.drop_the_message_of_the_loss, BOTH, UNLIKE),
    fault(t.multiply_with_another_input, BOTH, GRADIENT, 0, "contribution", "blocks.1.mlp.down.weight"),
    fault(t.multiply_siblings_with_each_others_gradients, ALONE, GRADIENT, 0, "contribution", "blocks.1.mlp"),
    fault(t.lay_time_in_the_wrong_order, IN_TIME, VALUES, 0, "forward", "blocks.0.attention"),
    fault(t.add_a_rows_weight_gradient_twice, ALONE, GRADIENT, 0, "contribution", "blocks.1.mlp.down.weight"),
    fault(t.count_targets_on_every_tensor_rank, ALONE, VALUES, 0, "backward", "head", "every part counts 1/2 times"),
    fault(t.enter_for_every_sibling, BOTH, LEDGER),
]  # fmt: skip

RICH = replace(TINY, mesh="shard=3", microbatches=2, weight_decay=0.5, lr_schedule="cosine", warmup=2, steps=4)
UPDATE = "the optimizer made something else"


def rich(of: VerifyConfig = RICH, **settings: Any) -> list[VerifyConfig]:
    return [replace(of, **{"mesh": "shard=3"} | settings)]


FIELD = [
    fault(f.lose_the_last_element, rich(strategy="ddp", width=48), GRADIENT, 0, "sum", "2.linear.bias"),
    fault(f.last_rank_never_updates, rich(strategy="zero1"), {"tree: parameter"}, 0, "clip", "2.linear.bias"),
    fault(f.forget_the_moments, rich(strategy="zero3"), {"tree: parameter"}, 1, "update", "2.linear.bias", UPDATE),
    fault(f.count_steps_from_the_start, rich(strategy="zero2"), {"tree: parameter"}, 1, "update", "2.linear.bias", UPDATE),
    fault(f.never_unscale, rich(strategy="zero3", dtype="fp16-mixed", clip=None), GRADIENT, 0, "sum", "2.linear.bias", "every part counts 65536 times"),
    fault(f.sum_in_16_bits, rich(strategy="ddp", dtype="bf16-mixed"), GRADIENT, 0, "sum", "2.linear.bias"),
    fault(f.forget_the_master_weights, rich(strategy="zero1", dtype="bf16-mixed"), {"tree: parameter"}, 1, "update", "2.linear.bias", UPDATE),
    fault(f.read_the_weights_of_the_step_before, rich(strategy="hpz", mesh=FOUR), {*LOSS, *LEDGER}, 1, "parameter", "0.linear.weight", "from before the last update"),
    fault(f.step_the_schedule_twice, rich(strategy="zero3"), {"tree: parameter"}, 2, "update", "2.linear.bias", UPDATE),
    fault(f.clip_twice, rich(strategy="zero1"), {"tree: parameter"}, 0, "clip", "2.linear.bias"),
    fault(f.mean_of_the_microbatches_means, rich(strategy="ddp", microbatches=3), VALUES, 0, "loss"),
    fault(f.count_what_is_masked, rich(GPT, strategy="zero3"), VALUES, 0, "backward", "head", "the loss is scaled wrongly"),
    fault(f.two_ranks_read_the_same_samples, rich(strategy="zero2"), VALUES, 0, "forward", "0.linear"),
    fault(f.replicas_part_in_odd_steps, rich(strategy="hsdp", mesh=FOUR), GRADIENT, 1, "sum", "2.linear.bias", "data rank 2 and data rank 3 are missing"),
    fault(f.reduce_one_gradient_early, rich(strategy="zero3"), GRADIENT, 0, "sum", "2.linear.bias", "nothing is in it"),
    fault(f.a_units_update_stays_on_the_cpu, rich(strategy="zero1", offload=True), "'1.linear.*' was written to between two steps: this rank's copy"),
    fault(f.flat_pieces_do_not_decay, rich(strategy="zero3"), {"tree: parameter"}, 0, "update", "2.linear.weight", UPDATE),
    fault(f.report_the_last_microbatchs_loss, rich(strategy="hsdp"), LOSS, 0, "loss", "", "it is that of microbatch"),
    fault(f.exchange_the_gradients_of_equal_layers, rich(strategy="ddp"), GRADIENT, 0, "sum", "2.linear.bias"),
    fault(f.scale_the_rate_with_the_ranks, rich(strategy="zero3"), {"tree: parameter"}, 0, "update", "2.linear.bias", "it moved 2 times as far"),
    fault(f.seed_by_rank, rich(strategy="zero1", dropout=0.2), VALUES, 0, "forward", "0.dropout", "another mask"),
    fault(f.round_the_parameters, rich(strategy="ddp"), {"tree: parameter"}, 0, "update", "2.linear.bias", UPDATE),
    fault(f.squares_of_16_bits, rich(strategy="psdp", mesh=FOUR), NORM, 0, "norm", "", "some squares are missing"),
]  # fmt: skip

LAYOUTS = [*DATA, *PIPELINES, *TENSOR, *FIELD]

SHARED: dict[str, tuple[Put, dict[str, Any], int, str]] = {
    # fault, settings, step, phase
    "a sum of squares 1 % too large": (s.sum_of_squares, {}, 0, "norm"),
    "clipped by limit / norm^2": (s.clip_by_the_square, {}, 0, "clip"),
    "never clipped": (s.never_clip, {}, 0, "clip"),
    "dropout without 1 / (1 - p)": (s.dropout_without_its_factor, {}, 0, "loss"),
    "one mask for all seeds": (s.keys_without(1), {"seed": 3}, 0, "loss"),
    "one mask for all steps": (s.keys_without(2), {}, 1, "loss"),
    "one mask for all samples": (s.keys_without(3), {}, 0, "loss"),
    "one mask for all layers": (s.keys_without(4), {}, 0, "loss"),
    "one draw for two elements": (s.one_mask_for_half_the_elements, {}, 0, "loss"),
    "dropped instead of kept": (s.drop_the_others, {}, 0, "loss"),
    "decay groups exchanged": (s.decay_what_must_not, {}, 0, "update"),
    "warmup off by a step": (s.rate_off_by(1), {}, 0, "update"),
    "the rate of the step before": (s.rate_off_by(-1), {"lr_schedule": "linear", "warmup": 1}, 0, "update"),
    "AdamW's second beta": (s.constants("adamw", partial(AdamW, betas=(0.9, 0.99))), {}, 1, "update"),
    "AdamW's epsilon": (s.constants("adamw", partial(AdamW, eps=1e-5)), {}, 0, "update"),
    "AdamW's decay": (s.constants("adamw", partial(AdamW, weight_decay=0.02)), {"weight_decay": None}, 0, "update"),
    "a decay of 20 in the one step": (
        *(s.constants("adamw", partial(AdamW, weight_decay=20.0)), {"weight_decay": None, "steps": 1}, 0, "update"),
    ),
    "SGD's momentum": (s.constants("sgd", partial(SGD, momentum=0.8)), {"optimizer": "sgd"}, 1, "update"),
    "SGD with Nesterov's step": (
        *(s.constants("sgd", partial(SGD, momentum=0.9, nesterov=True)), {"optimizer": "sgd"}, 0, "update"),
    ),
}

LOOPS: list[tuple[str, dict[str, Any], int, str, float | None, str]] = [
    # fault, settings, step, phase, factor, a part of the cause
    ("mean of means", {"calls": 2}, 0, "gradient", None, "means of forwards of different counts are averaged"),
    ("local count", {"calls": 2}, 0, "gradient", None, "each rank divides by its own count"),
    ("local count", {"ranks": 3}, 0, "gradient", None, "means of ranks of different counts"),
    ("not divided", {"calls": 3}, 0, "gradient", 3.0, "not divided by the 3 forwards"),
    ("not divided", {"calls": 2, "ranks": 3}, 0, "gradient", 2.0, "not divided by the 2 forwards"),
    ("sum", {}, 0, "gradient", 18.0, "the sum of the losses is not divided by its count, 18"),
    ("no all-reduce", {}, 0, "gradient", 2.0, "no all-reduce"),
    ("no all-reduce", {"ranks": 3, "calls": 2}, 0, "gradient", 3.0, "no all-reduce"),
    ("last forward", {"calls": 2}, 0, "gradient", 1.0, "gradients are overwritten"),
    ("no zero_grad", {}, 1, "gradient", 1.0, "zero_grad is left out"),
    ("no zero_grad", {"calls": 2, "ranks": 3}, 1, "gradient", 1.0, "zero_grad is left out"),
    ("clip first", {"clip": 0.05}, 0, "gradient", None, "each rank clips its own gradient before they are summed"),
    ("no clip", {"clip": None, "judged": 0.05}, 0, "gradient", None, "it is not clipped"),
    ("norm of all ranks", {"clip": 0.05, "ranks": 3}, 0, "gradient", 1 / 3, "norm that it is clipped by is added up"),
    ("squares of all ranks", {"clip": 0.05}, 0, "gradient", 0.5**0.5, "the squares of the norm that it is clipped by"),
    ("", {"clip": 0.05, "judged": None}, 0, "gradient", None, "judge it with --clip 0.05"),
    ("missing rank", {}, 0, "gradient", 0.5, "divided by the 2 ranks once too often"),
    ("no gradient", {"ranks": 3}, 0, "gradient", 0.0, "never computed, or never sent"),
    ("not finite", {}, 0, "gradient", None, "a different computation from the job's"),
    ("no step", {}, 1, "update", 0.0, "the optimizer's step was left out"),
    ("no step", {"steps": 2}, 1, "update", 0.0, "the optimizer's step was left out"),
    ("two steps", {}, 1, "update", 2.0, "applied twice"),
    ("one rank's two steps", {"ranks": 3}, 1, "update", 2.0, "applied twice"),
    ("twice by hand", {}, 1, "update", 2.0, "applied twice"),
    ("twice by hand", {"steps": 2, "optimizer": "adamw"}, 1, "update", 2.0, "applied twice"),
    ("no sampler", {}, 0, "inputs", 0.0, "the sampler does not cut the data by rank"),
    ("drop_last", {}, 0, "inputs", 0.0, "drop_last"),
    ("ahead", {}, 1, "inputs", None, "its data is 1 step ahead"),
    ("left out", {}, 0, "options", 0.0, "no optimizer has it"),
    ("rate", {}, 1, "options", 0.5, "another schedule"),
    ("own weights", {}, 0, "initial", None, "each rank made its own weights"),
    ("lost weights", {}, 0, "initial", None, "each rank made its own weights"),
]
