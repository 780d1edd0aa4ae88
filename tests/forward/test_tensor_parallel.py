"""Stock modules under a tensor axis: every style at once, against one process; and refusals."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import Made, batches, distinct, sgd, train
from pipeline_cases import engine_on
from tensor_models import WIDTH, alone, model, same_run, token_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


Run = Callable[[Any, Tensor], Tensor]


def pair(m: Any, x_BD: Tensor) -> Tensor:
    """up, something in between, down."""
    return m.down(torch.tanh(m.up(x_BD)) * m.gate(x_BD))


def run_pairs(m: Any, x_BD: Tensor) -> Tensor:
    x_BD = m.first(x_BD)
    for pair in m.pairs:
        x_BD = x_BD + pair(x_BD)
    return m.last(x_BD)


PLAN = {"pairs.*.up": "column", "pairs.*.gate": "column", "pairs.*.down": "row"}


def around(run: Run = pair, hidden: int = 6, **between: Any) -> nn.Module:
    """Whole layers around two pairs."""

    def made() -> nn.Module:
        ends = {"up": nn.Linear(WIDTH, hidden), "gate": nn.Linear(WIDTH, hidden), "down": nn.Linear(hidden, WIDTH)}
        return Made(run, **ends, **copy.deepcopy(between))

    pairs = nn.ModuleList(made() for _ in range(2))
    return distinct(Made(run_pairs, first=nn.Linear(WIDTH, WIDTH), pairs=pairs, last=nn.Linear(WIDTH, 3)))


def equal(template: nn.Module, mesh: str = "tensor=2", row: str = "ddp", steps: int = 2, **changes: Any) -> None:
    data = batches(steps)
    settings: dict[str, Any] = {"tensor_plan": PLAN, **changes}
    same_run(train(template, mesh, row, data, sgd, **settings), alone(template, data))


def fails(template: nn.Module, message: str, steps: int = 1, **changes: Any) -> None:
    with pytest.raises(ValueError, match=message):
        train(template, "tensor=2", "ddp", batches(steps), sgd, **{"tensor_plan": PLAN, **changes})


def one_unused(m: Any, x_BD: Tensor) -> Tensor:
    return m.down(torch.tanh(m.up(x_BD)))


def twice(m: Any, x_BD: Tensor) -> Tensor:
    return m.down(torch.tanh(m.up(x_BD)) + m.gate(x_BD)) + m.down(m.up(torch.tanh(x_BD)))


def cross(m: Any, x_BD: Tensor) -> Tensor:
    """Siblings of one module that read different tensors, in turn, as in cross-attention."""
    other = x_BD.sin()
    return m.down(torch.tanh(m.up(x_BD)) * m.gate(other) + m.up(other) * m.gate(x_BD))


def probing(m: Any, x_BD: Tensor) -> Tensor:
    """The same input is read without gradients first."""
    with torch.no_grad():
        m.up(x_BD)
    return pair(m, x_BD)


def checkpointed(m: Any, x_BD: Tensor) -> Tensor:
    return checkpoint(partial(pair, m), x_BD, use_reentrant=False)


@pytest.mark.parametrize(("mesh", "row"), CELLS[:3])
@pytest.mark.parametrize("run", [pair, one_unused, twice, cross, probing, checkpointed])
def test_modules_that_call_their_products_otherwise(run: Run, mesh: str, row: str) -> None:
    equal(around(run), mesh, row)


def now_and_then(m: Any, x_BD: Tensor) -> Tensor:
    """Calls its second column in every other forward; what it leaves then reaches no loss in every fourth."""
    m.calls = getattr(m, "calls", 0) + 1
    h = torch.tanh(m.up(x_BD))
    factor = m.gate(x_BD) if m.calls % 2 else 1.0
    return m.down(h if m.calls % 4 == 1 else h * factor)


@pytest.mark.parametrize("run", [one_unused, now_and_then])
def test_a_sibling_in_a_unit_of_its_own_may_be_left_out(run: Run) -> None:
    units = ["pairs.0.up", "pairs.0.gate", "pairs.1.gate"]
    equal(around(run), "shard=2 tensor=2", "zero3", steps=5, units=units)


def freeze(template: nn.Module, *names: str) -> nn.Module:
    for name, parameter in template.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return template


@pytest.mark.parametrize("frozen", ["up", "up.weight", "up.bias", "down", "first", "gate.bias"])
@pytest.mark.parametrize(("mesh", "row"), [("tensor=2", "ddp"), ("shard=2 tensor=2", "zero3")])
def test_frozen_parameters_stay_and_the_others_train(frozen: str, mesh: str, row: str) -> None:
    equal(freeze(around(), frozen), mesh, row, steps=3)


@each_rank("tensor=3")
def test_a_forward_in_eval_is_the_whole_models(comm: Comm) -> None:
    mine, x_BD = around().eval(), batches()[0]["x"]
    Engine(mine, comm, strategy="ddp", tensor_plan=PLAN)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert cases.close(mine(x_BD).clone(), around()(x_BD), 1e-13)


def normed(m: Any, x_BD: Tensor) -> Tensor:
    """A norm over every 3 features of what is cut."""
    hidden = m.norm(m.up(x_BD).unflatten(-1, (-1, 3))).flatten(-2)
    return m.down(torch.tanh(hidden) * m.gate(x_BD))


def per_head() -> nn.Module:
    return around(normed, 18, norm=nn.LayerNorm(3))


HEADS = {**PLAN, "pairs.*.up": "column by 3", "pairs.*.gate": "column by 3"}


def late(m: Any, x_BD: Tensor) -> Tensor:
    """Scales what is cut, from step 4 on: the sanitizers' first steps have not seen it."""
    m.calls = getattr(m, "calls", 0) + 1
    hidden = torch.tanh(m.up(x_BD)) * m.gate(x_BD)
    return m.down(hidden * m.gain if m.calls > 4 else hidden)


def test_a_whole_parameter_on_a_cut_activation_is_refused_as_soon_as_it_has_a_gradient() -> None:
    fails(per_head(), r"'pairs.0.norm.weight' differs between the tensor ranks.*'summed'", tensor_plan=HEADS)
    behind_zeros = per_head()  # nothing can be seen in the first step
    for pair in behind_zeros.pairs:
        nn.init.zeros_(pair.down.weight)
    fails(behind_zeros, "differs between the tensor ranks", steps=3, tensor_plan=HEADS)
    fails(around(late, gain=nn.Parameter(torch.ones(()))), "'pairs.0.gain' differs between the tensor ranks", steps=6)
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

    for run in train(around(), "tensor=2", "ddp", batches(4), sgd, tensor_plan=PLAN, look=setup):
        phases = run.seen
        assert phases.count("report") == 4
        assert "sanitize" not in phases[phases.index("report") + 2 :], "a message in every step that no ledger predicts"


@pytest.mark.parametrize("how", ["other samples", "fewer samples"])
@each_rank("tensor=2", refused=r"(ranks of a tensor group|tensor only) bring different batches")
def test_tensor_ranks_with_different_batches_are_refused(comm: Comm, how: str) -> None:
    engine = engine_on(around(), comm, tensor_plan=PLAN, count_fn=lambda batch: len(batch["x"]))
    batch = batches()[comm.rank if how == "other samples" else 0]
    if how == "fewer samples":
        batch = {name: tensor[comm.rank :] for name, tensor in batch.items()}
    engine.step([batch])
