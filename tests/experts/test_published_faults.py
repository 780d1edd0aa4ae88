"""Published faults of expert axes, each put into plait's own; docs/silent-bugs.md has their threads, and more of them in
an engine by hand."""

# ruff: noqa: E501 (a row is a line)
from pathlib import Path
from typing import Any

import pytest
import torch
from each_rank import each_rank
from planted import Patch, Put, instead
from published import Fault, check
from test_own_engine import judged
from torch import Tensor
from verify_cases import found_in, not_sent

import plait
from plait.run.config.settings import VerifyConfig
from plait.run.models.gpt import IGNORED, token_count
from plait.run.models.moe import MixtureOfExperts, MoE, MoEConfig, loss_sum
from plait.tensor.expert_axis import ExpertAxis, scatter
from plait.zero.flat_gradient import FlatGradient

SAMPLES, LENGTH = 8, 8
SIZES = MoEConfig(
    vocabulary=37, num_layers=2, width=16, num_heads=4, num_kv_heads=2, hidden=12, max_length=LENGTH, dropout=0.0,
    num_experts=4, num_chosen=2, balance_weight=0.3, z_weight=0.1,
)  # fmt: skip


def batch(step: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES.vocabulary, (SAMPLES, LENGTH + 1), generator=numbers)
    left_out = torch.rand(SAMPLES, LENGTH, generator=numbers) < 0.3
    return {"tokens": tokens[:, :-1].clone(), "targets": tokens[:, 1:].masked_fill(left_out, IGNORED)}


LAYOUT = VerifyConfig(
    job=plait.UserJob(lambda: MoE(SIZES), loss_sum, batch, token_count), mesh="shard=4 expert=2", strategy="zero1",
    dtype="fp64", batch=SAMPLES, steps=2, clip=0.3,
)  # fmt: skip


@instead(FlatGradient, "take")
def experts_are_not_divided(original: Any, self: FlatGradient, index: int, gradient: Tensor) -> None:
    original(self, index, gradient * (2 if ".experts." in self.flat.layout.slots[index].name else 1))


def copies_of_experts_keep_their_own(patch: Patch) -> None:
    not_sent(patch, lambda message, note: "expert_shard" in message.axes)


@instead(ExpertAxis, "_send")
def weights_get_the_gradient_of_own_experts(
    original: Any, self: ExpertAxis, tensor: Tensor, there: Any, back: Any
) -> Any:
    def mine(gradient: Tensor, axis: ExpertAxis, phase: str) -> Tensor:
        return gradient.chunk(axis.comm.mesh.count(axis.tokens_over))[axis.index]

    return original(self, tensor, there, mine if back is scatter else back)


@instead(ExpertAxis, "experts")
def weights_are_detached(
    original: Any, self: ExpertAxis, run: Any, num: int, x: Tensor, expert: Tensor, weight: Tensor
) -> Any:
    return original(self, run, num, x, expert, weight.detach())


@instead(MixtureOfExperts, "losses")
def router_losses_times_axis(original: Any, self: MixtureOfExperts, *given: Tensor) -> Any:
    return original(self, *given) * (1 if self.expert_axis is None else self.expert_axis.ways)


@instead(MixtureOfExperts, "forward")
def shared_expert_on_every_rank(original: Any, self: MixtureOfExperts, x: Tensor) -> Any:
    out, losses = original(self, x)
    return (out if self.expert_axis is None else out + self.shared(x)), losses


@instead(ExpertAxis, "part")
def every_rank_has_the_first_experts(original: Any, self: ExpertAxis, num: int, index: int | None = None) -> Any:
    return original(self, num, 0)


COMPUTED = "it computes something else"
ROUTED = "still right: what one microbatch adds to the gradient of 'blocks.1.mlp.experts.gate_up'"
FAULTS = [
    Fault(experts_are_not_divided, LAYOUT, "DeepSpeed #5618, Megatron-LM #5956", "sum", "blocks.1.mlp.experts.down", "every part counts 2 times"),
    Fault(copies_of_experts_keep_their_own, LAYOUT, "Megatron-LM #5916", "sum", "blocks.1.mlp.experts.down", "data rank 0 and data rank 1 are missing"),
    Fault(weights_get_the_gradient_of_own_experts, LAYOUT, "transformers #48205", "backward", "blocks.1.mlp.router", ROUTED),
    Fault(weights_are_detached, LAYOUT, "NeMo Automodel #2995", "backward", "blocks.1.mlp.router", ROUTED),
    Fault(router_losses_times_axis, LAYOUT, "Megatron-LM #5047", "forward", "blocks.0.mlp[1]", "2 times"),
    Fault(shared_expert_on_every_rank, LAYOUT, "sglang #26845", "forward", "blocks.0.mlp[0]", "still right: the output of 'blocks.0.mlp.shared'"),
    Fault(every_rank_has_the_first_experts, LAYOUT, "DeepSpeed #6589", "forward", "blocks.0.mlp.experts", COMPUTED),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.threads for fault in FAULTS])
def test_a_published_fault_is_named_and_placed(fault: Fault) -> None:
    check(fault)


@pytest.mark.parametrize(("mesh", "microbatches"), [("shard=4 expert=2", 2), ("shard=4 expert=2 context=2", 1)])
def test_without_a_fault_nothing_is_found(mesh: str, microbatches: int) -> None:
    found, first = found_in(LAYOUT.with_flags(mesh=mesh, microbatches=microbatches))
    assert found.verdict.word == "equal" and first is None


@pytest.mark.parametrize(
    ("mesh", "row", "microbatches"), [("shard=2 expert=2", "ddp", 2), ("shard=4 expert=2", "zero3", 1)]
)
def test_a_judge_finds_nothing_either(mesh: str, row: str, microbatches: int, tmp_path: Path) -> None:
    found = judged(LAYOUT.with_flags(mesh=mesh, strategy=row, microbatches=microbatches), tmp_path)
    assert found.equal and found.residual < 1e-12, found


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (experts_are_not_divided, "it is divided by the 2 ranks that have it, and not by all 4"),
        (copies_of_experts_keep_their_own, "blocks.1.mlp.experts.down: ranks 2 and 3: off by"),
        (every_rank_has_the_first_experts, "is a different computation from the job's"),
    ],
)
def test_a_judge_names_it(put: Put, words: str, tmp_path: Path) -> None:
    found = judged(LAYOUT, tmp_path, put)
    assert (found.step, found.phase) == (0, "gradient") and words in found.text, found


@each_rank("shard=2 expert=2", refused=r"mlp\.experts.* or updated whole on one rank")
def test_a_judge_refuses_updates_of_the_whole(comm: plait.Comm, tmp_path: Path) -> None:
    with plait.empty_parameters():
        model = MoE(SIZES)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    engine = plait.Engine(model, comm, strategy="ddp", cut="tensor", optimizer=optimizer)
    plait.witness(engine, optimizer, tmp_path)
