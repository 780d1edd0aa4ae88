"""Every fault of the mutation tests is placed: the first wrong tensor lies where the code is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_mutations as data
import test_pipeline_mutations as pipes
import test_tensor_mutations as tensors
import torch
import verify_cases as cases
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait import UserJob
from plait.referee.verify.locate import first_step, locate_in_plain, search, window_of
from plait.referee.verify.plain import run_plain
from plait.referee.verify.traced import trace_layout
from plait.referee.wrong import FirstWrong
from plait.run.config import VerifyConfig
from plait.run.job.job import make_job

Patch = pytest.MonkeyPatch

PLACES: dict[str, tuple[str, str, str]] = {
    # fault: phase, what the name of the tensor begins with, words of the cause
    "drop_a_reduction": ("sum", "1.", ""),
    "skip_the_first_layer": ("sum", "0.", "nothing is in it"),
    "average_instead_of_sum": ("sum", "2.", "every part counts 1/"),
    "swap_two_shards": ("initial values", "0.", "gathered into the wrong places"),
    "drop_the_last_microbatch": ("backward", "2.linear", "microbatch 2 of data rank 0"),
    "never_zero_gradients": ("sum", "2.", "goes on from the sum of the step before"),
    "dropout_by_local_sample": ("forward", "0.dropout", "another mask"),
    "dropout_the_same_in_every_step": ("forward", "0.dropout", "another mask"),
    "norm_counts_replicas_twice": ("norm", "", "counted 2 times"),
    "norm_of_this_rank_only": ("norm", "", "what rank 0 owns alone"),
    "mean_of_means": ("backward", "2.linear", "a mean of means"),
    "never_publish": ("parameter", "0.", "from before the last update"),
    "every_layer_from_one_seed": ("initial values", "0.", ""),
    "tied_uses_summed_before_the_data_axes": ("sum", "embed", "another order"),
    "tied_uses_not_summed": ("sum", "embed", "its use as"),
    "tied_uses_summed_twice": ("sum", "embed", "every part counts 2 times"),
    "tied_uses_summed_on_the_first_stage_alone": ("sum", "embed", "its use as"),
    "tied_weight_counted_on_every_stage": ("norm", "", "counted more than once"),
    "double_what_is_weighed": ("contribution", "", ""),
    "drop_the_last_weight_part": ("sum", "", "microbatch 2 of each rank is missing"),
    "no_gradient_for_the_stage_before": ("backward", "", "no gradient comes back"),
    "hand_over_the_gradient_of_another_microbatch": ("backward", "", "it is that of microbatch 0"),
    "hand_over_the_activation_of_another_microbatch": ("forward", "", "it is that of microbatch 0"),
    "use_the_first_activation_for_all": ("forward", "", "it is that of microbatch 0"),
    "cross_two_messages": ("backward", "", "it is that of microbatch 1"),
    "seed_twice_as_much": ("backward", "", "every part counts 2 times"),
    "leave_out_the_reduction_of_a_stage": ("sum", "", "is missing"),
    "add_ranks_in_reverse": ("sum", "", "another order"),
    "add_microbatches_in_reverse": ("sum", "", "another order"),
    "keep_only_the_last_microbatch": ("sum", "", "only microbatch 2"),
    "report_the_losses_of_a_rank_that_has_none": ("loss", "", ""),
    "report_losses_in_the_order_of_backwards": ("loss", "", "it is that of microbatch 2"),
    "keep_parameters_over_the_update": ("parameter", "", "from before the last update"),
    "go_on_from_kept_parameters": ("parameter", "", "from before the last update"),
    "count_layers_from_0_in_every_stage": ("initial values", "", ""),
    "draw_for_the_next_microbatch": ("forward", "", "another mask"),
    "drop_the_reduction_of_what_enters": ("backward", "blocks.1.mlp_norm", ""),
    "drop_the_sum_after_a_row": ("forward", "blocks.0.mlp.down", "a missing sum"),
    "drop_the_sum_after_the_embedding": ("forward", "embed", "a missing sum"),
    "norm_counts_whole_parameters_on_every_tensor_rank": ("norm", "", "counted more than once"),
    "norm_counts_the_first_tensor_rank_alone": ("norm", "", "alone"),
    "every_rank_draws_the_mask_of_the_first": ("forward", "", "another mask"),
    "skip_a_bias": ("forward", "1.linear", ""),
    "add_a_row_bias_on_every_rank": ("forward", "2.linear", ""),
    "swap_the_pieces_of_two_ranks": ("initial values", "blocks.0.attention.output.weight", "wrong places"),
    "number_the_ranks_the_other_way_round": ("initial values", "embed.weight", "wrong places"),
    "look_tokens_up_one_row_off": ("forward", "embed", ""),
    "count_classes_from_the_wrong_one": ("loss", "", ""),
    "multiply_with_another_input": ("contribution", "blocks.1.mlp.down.weight", ""),
    "multiply_siblings_with_each_others_gradients": ("contribution", "blocks.1.mlp", ""),
    "lay_time_in_the_wrong_order": ("forward", "blocks.0.attention", ""),
    "add_a_rows_weight_gradient_twice": ("contribution", "blocks.1.mlp.down.weight", ""),
    "count_targets_on_every_tensor_rank": ("backward", "head", "every part counts 1/2 times"),
}

Case = tuple[Callable[[Patch], None], VerifyConfig]

CASES: list[Case] = [
    *((f, replace(data.TINY, mesh=mesh, strategy=row, microbatches=m)) for f, mesh, row, m, _ in data.FAULTS),
    *((f, replace(job, **layout)) for f, job, layout, seen in pipes.FAULTS if isinstance(seen, set)),
    *(
        (f, replace(job, strategy="zero1", sequence_parallel=sequence))
        for f, job, sequence, seen in tensors.FAULTS
        if isinstance(seen, set)
    ),
]
MESSAGES_ALONE = {
    *("reduce_across_replicas_every_microbatch", "a_stray_message", "gather_from_what_lies_at_rest"),
    *("compare_the_inputs_before_every_forward", "enter_for_every_sibling"),
}
"""The numbers are right, and the ledger names the message."""


def name_of(case: Case) -> str:
    fault, config = case
    layout = f"{config.mesh}-{config.strategy}-{config.schedule}-{config.microbatches}"
    return f"{fault.__name__}-{config.model}-{layout}{'-sequence' if config.sequence_parallel else ''}"


def located(config: VerifyConfig, fault: Callable[[Patch], None] | None) -> FirstWrong | None:
    """The first wrong tensor of a layout that runs with the fault; the references run without it."""
    job = cases.job_of(config)

    def broken(run: Callable[[], Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                fault(patch)
            return run()

    ranks = broken(lambda: cases.record(config, job))
    verified = cases.judged(config, ranks)
    if all(finding.equal for finding in verified.verdict.tree) and fault is not None:
        return locate_in_plain(job, ranks, verified.tree, run_plain(job, config), verified.verdict.plain)
    window = window_of(first_step(config, ranks, verified.tree))
    return search(broken(lambda: trace_layout(job, config, window)), job, config, window, ranks[0].ties)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_fault_is_placed(case: Case) -> None:
    fault, config = case
    found = located(config, fault)
    if fault.__name__ in MESSAGES_ALONE:
        assert found is None
        return
    assert found is not None
    phase, name, cause = PLACES[fault.__name__]
    assert found.phase == phase, found
    assert found.name.startswith(name) and cause in found.cause, found


@pytest.mark.parametrize("config", list({repr(c): c for _, c in CASES}.values()), ids=lambda c: name_of((located, c)))
def test_nothing_is_found_in_a_layout_that_is_right(config: VerifyConfig) -> None:
    assert located(config, None) is None


# ---- models of others ---------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A frozen layer without a graph, a dict of outputs, and a module that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.inside = nn.Sequential(nn.Linear(7, 7), nn.ReLU(inplace=True))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            h = self.frozen(x)
        return {"y": self.head(self.inside(h.tanh())), "aux": None, "count": 3}


class Again(nn.Module):
    """A module that is called twice, once recomputed; the head is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(5, 5), nn.Dropout(0.3), nn.Linear(5, 5)
        self.head.weight = self.layer.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)
        return {"y": self.head(self.drop(self.layer(x)))}


class Counting(Again):
    """What it computes depends on how often this process has called it."""

    calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        return {"y": super().forward(x)["y"] * (1 + 0.1 * self.calls)}


def theirs(build: Callable[[], nn.Module]) -> VerifyConfig:
    def batch(step: int) -> Tensor:
        return torch.randn(13, 5, generator=torch.Generator().manual_seed(step))

    def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x)["y"] - x.sin()).square().sum()

    job = UserJob(build=build, loss_fn=loss_sum, batches=batch)
    return VerifyConfig(job=job, mesh="shard=3", strategy="zero3", microbatches=2, steps=2, clip=0.3)


@pytest.mark.parametrize("build", [Frozen, Again])
def test_nothing_is_found_in_models_of_others_that_are_right(build: Callable[[], nn.Module]) -> None:
    config = theirs(build)
    job = make_job(config)
    assert search(trace_layout(job, config, range(2)), job, config, range(2), {}) is None


def test_a_model_that_counts_its_calls_is_named() -> None:
    verdict = plait.verify(theirs(Counting).job, mesh="shard=3", strategy="zero3", microbatches=2, steps=2)
    assert verdict.word == "different" and verdict.first is not None
    assert (verdict.first.phase, verdict.first.name, verdict.first.step) == ("forward", "", 0)
    assert "still right: the output of 'head'" in str(verdict)
