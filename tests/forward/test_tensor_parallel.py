"""Stock modules under a tensor axis: every style at once, against one process; and refusals."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import batches, distinct, sgd, train
from pipeline_cases import engine_on
from tensor_models import WIDTH, alone, model, same_run, token_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.comm import Comm
from plait.step import Engine
from plait.table.precision import LossScale

CELLS = [("tensor=2", "ddp"), ("tensor=3", "zero1"), ("shard=2 tensor=2", "zero3"), ("replica=2 tensor=3", "hpz")]


@pytest.mark.parametrize(("mesh", "row"), CELLS)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_style_at_once_is_the_single_process(sequence: bool, mesh: str, row: str) -> None:
    """Fused grouped heads, uneven features and rows, biases, a padding row, gathered output, dropout everywhere."""
    data = token_batches()
    ranks = train(model(), mesh, row, data, sgd, microbatches=2, clip=0.5, sequence_parallel=sequence)
    single = alone(model(), data, clip=0.5)
    assert max(norm for norm in single.norms if norm is not None) > 0.5
    same_run(ranks, single)


def test_fused_heads_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads of 2 cannot be shared by tensor=4 ranks"):
        train(model(), "tensor=4", "ddp", token_batches())


class Pair(nn.Module):
    """up, something in between, down."""

    def __init__(self, hidden: int = 6, **between: nn.Module) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        for name, module in between.items():
            setattr(self, name, module)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x_BD)) * self.gate(x_BD))


class Around(nn.Module):
    """Whole layers around two pairs."""

    def __init__(self, pair: type[Pair], **between: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.ModuleList(pair(**copy.deepcopy(between)) for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.first(x_BD)
        for pair in self.pairs:
            x_BD = x_BD + pair(x_BD)
        return self.last(x_BD)


PLAN = {"pairs.*.up": "column", "pairs.*.gate": "column", "pairs.*.down": "row"}


def around(pair: type[Pair], **between: Any) -> nn.Module:
    return distinct(Around(pair, **between))


def equal(template: nn.Module, mesh: str = "tensor=2", row: str = "ddp", steps: int = 2, **changes: Any) -> None:
    data = batches(steps)
    settings: dict[str, Any] = {"tensor_plan": PLAN, **changes}
    same_run(train(template, mesh, row, data, sgd, **settings), alone(template, data))


def fails(template: nn.Module, message: str, steps: int = 1, **changes: Any) -> None:
    with pytest.raises(ValueError, match=message):
        train(template, "tensor=2", "ddp", batches(steps), sgd, **{"tensor_plan": PLAN, **changes})


class OneUnused(Pair):
    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x_BD)))


class Twice(Pair):
    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x_BD)) + self.gate(x_BD)) + self.down(self.up(torch.tanh(x_BD)))


class Cross(Pair):
    """Siblings of one module that read different tensors, in turn, as in cross-attention."""

    def forward(self, x_BD: Tensor) -> Tensor:
        other = x_BD.sin()
        return self.down(torch.tanh(self.up(x_BD)) * self.gate(other) + self.up(other) * self.gate(x_BD))


class Probing(Pair):
    """The same input is read without gradients first."""

    def forward(self, x_BD: Tensor) -> Tensor:
        with torch.no_grad():
            self.up(x_BD)
        return super().forward(x_BD)


class Checkpointed(Pair):
    def forward(self, x_BD: Tensor) -> Tensor:
        return checkpoint(super().forward, x_BD, use_reentrant=False)


@pytest.mark.parametrize(("mesh", "row"), CELLS[:3])
@pytest.mark.parametrize("pair", [Pair, OneUnused, Twice, Cross, Probing, Checkpointed])
def test_modules_that_call_their_products_otherwise(pair: type[Pair], mesh: str, row: str) -> None:
    equal(around(pair), mesh, row)


class NowAndThen(Pair):
    """Calls its second column in every other forward; what it leaves then reaches no loss in every fourth."""

    calls = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.up(x_BD))
        factor = self.gate(x_BD) if self.calls % 2 else 1.0
        return self.down(h if self.calls % 4 == 1 else h * factor)


@pytest.mark.parametrize("pair", [OneUnused, NowAndThen])
def test_a_sibling_in_a_unit_of_its_own_may_be_left_out(pair: type[Pair]) -> None:
    units = ["pairs.0.up", "pairs.0.gate", "pairs.1.gate"]
    equal(around(pair), "shard=2 tensor=2", "zero3", steps=5, units=units)


def freeze(template: nn.Module, *names: str) -> nn.Module:
    for name, parameter in template.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return template


@pytest.mark.parametrize("frozen", ["up", "up.weight", "up.bias", "down", "first", "gate.bias"])
@pytest.mark.parametrize(("mesh", "row"), [("tensor=2", "ddp"), ("shard=2 tensor=2", "zero3")])
def test_frozen_parameters_stay_and_the_others_train(frozen: str, mesh: str, row: str) -> None:
    equal(freeze(around(Pair), frozen), mesh, row, steps=3)


def test_a_forward_in_eval_is_the_whole_models() -> None:
    x_BD = batches()[0]["x"]

    def body(comm: Comm) -> list[Tensor]:
        mine = around(Pair).eval()
        Engine(mine, comm, strategy="ddp", tensor_plan=PLAN)
        with torch.no_grad():
            first = mine(x_BD)
        with torch.inference_mode():
            return [first, mine(x_BD).clone()]

    wanted = around(Pair)(x_BD)
    for found in plait.run_threads("tensor=3", body):
        assert all(cases.close(y.detach(), wanted.detach(), 1e-13) for y in found)


class PerHead(Pair):
    """A norm over every 3 features of what is cut."""

    def forward(self, x_BD: Tensor) -> Tensor:
        hidden = self.norm(self.up(x_BD).unflatten(-1, (-1, 3))).flatten(-2)
        return self.down(torch.tanh(hidden) * self.gate(x_BD))


per_head = partial(around, PerHead, norm=nn.LayerNorm(3), hidden=18)
HEADS = {**PLAN, "pairs.*.up": "column by 3", "pairs.*.gate": "column by 3"}


class Late(Pair):
    """Scales what is cut, from step 4 on: the sanitizers' first steps have not seen it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.gain, self.calls = nn.Parameter(torch.ones(())), 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.up(x_BD)) * self.gate(x_BD)
        return self.down(hidden * self.gain if self.calls > 4 else hidden)


def test_a_whole_parameter_on_a_cut_activation_is_refused_as_soon_as_it_has_a_gradient() -> None:
    fails(per_head(), r"'pairs.0.norm.weight' differs between the tensor ranks.*'summed'", tensor_plan=HEADS)
    behind_zeros = per_head()  # nothing can be seen in the first step
    for pair in behind_zeros.pairs:
        nn.init.zeros_(pair.down.weight)
    fails(behind_zeros, "differs between the tensor ranks", steps=3, tensor_plan=HEADS)
    fails(around(Late), "'pairs.0.gain' differs between the tensor ranks", steps=6)
    skipped = LossScale(2.0**1023)  # the first steps overflow, which shows nothing
    fails(per_head(), "differs between the tensor ranks", steps=3, tensor_plan=HEADS, loss_scale=skipped)


@pytest.mark.parametrize("missing", ["norm", "blocks.*.norm", "blocks.*.mlp_norm"])
def test_a_norm_on_the_stream_cut_in_time_that_the_plan_forgets_is_refused(missing: str) -> None:
    own: Any = model()
    plan = {name: style for name, style in own.tensor_plan().items() if name != missing}
    settings = {"tensor_plan": plan, "sequence_parallel": True}
    with pytest.raises(ValueError, match=r"norm.(weight|bias)' differs between the tensor ranks.*'sequence'"):
        train(model(), "tensor=2", "ddp", token_batches(1), sgd, **settings)


@pytest.mark.parametrize(("mesh", "row"), CELLS[:3])
def test_said_to_be_summed_it_is_right(mesh: str, row: str) -> None:
    equal(per_head(), mesh, row, tensor_plan={**HEADS, "pairs.*.norm": "summed"})


def test_the_check_ends_when_every_whole_parameter_was_seen() -> None:
    def setup(engine: Engine) -> list[str]:
        return [e.note.phase for e in engine.comm.ledger.entries if e.note.phase in ("sanitize", "report")]

    for run in train(around(Pair), "tensor=2", "ddp", batches(4), sgd, tensor_plan=PLAN, look=setup):
        phases = run.seen
        assert phases.count("report") == 4
        assert "sanitize" not in phases[phases.index("report") + 2 :], "a message in every step that no ledger predicts"


@pytest.mark.parametrize("how", ["other samples", "fewer samples"])
def test_tensor_ranks_with_different_batches_are_refused(how: str) -> None:
    def body(comm: Comm) -> None:
        engine = engine_on(around(Pair), comm, tensor_plan=PLAN, count_fn=lambda batch: len(batch["x"]))
        batch = batches()[comm.rank if how == "other samples" else 0]
        if how == "fewer samples":
            batch = {name: tensor[comm.rank :] for name, tensor in batch.items()}
        engine.step([batch])

    with pytest.raises(ValueError, match=r"(ranks of a tensor group|tensor only) bring different batches"):
        plait.run_threads("tensor=2", body)
