"""Compiled units: each layout is, to the bit, the single process whose units the same compiler made, and within the
rounding of fp32 plain PyTorch without any.

Clipping at work, ragged token counts, microbatches of two sizes; one compilation for each shape and mode.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verify_cases import GPT, TINY, Verified, job_of, judged

import plait
from plait.comm import Comm, run
from plait.forward.compiled import missing_compiler
from plait.pipeline.stage import LossFn, Stage
from plait.referee.verify.record import record_run
from plait.run.config.settings import VerifyConfig
from plait.step import Engine
from plait.table.mesh import Mesh

LACKS = missing_compiler(torch.device("cpu"))
pytestmark = [
    pytest.mark.usefixtures("compiler_in_threads"),
    pytest.mark.filterwarnings("ignore", "error:unit"),
    pytest.mark.skipif(bool(LACKS), reason=f"needs {LACKS}"),
]
"""The compiler's own warnings, which it hides for one thread only, and not those of a unit that is not compiled."""

MLP = replace(TINY, steps=2, dropout=0.0, compile=True)
DECODER = replace(GPT, steps=2, batch=12, dropout=0.0, compile=True, layers=1, width=8, length=5)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def runs(config: VerifyConfig, mesh: str, **changes: Any) -> Verified:
    """Threads that compile wait for each other longer than others do."""
    config = replace(config, mesh=mesh, **changes)
    job = job_of(config)
    return judged(config, run(config.machine.parsed_mesh, lambda comm: record_run(job, config, comm), deadline=300))


def is_bitwise(found: Verified) -> None:  # every message as predicted, and clipping came to work
    assert found.verdict.word == "bitwise" and not found.verdict.ledger, found.different()
    assert max(filter(None, found.ranks[0].norms)) > 0.3


@pytest.mark.parametrize("mesh", ["shard=2", "shard=3"])
@pytest.mark.parametrize("row", ["ddp", "zero2", "zero3"])
def test_a_layout_is_the_compiled_process(row: str, mesh: str) -> None:
    is_bitwise(runs(MLP, mesh, strategy=row, microbatches=2))


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("pipe=2 shard=2", {"strategy": "zero2"}),
        ("pipe=2", {"strategy": "zero3", "schedule": "zb_h1"}),
        ("shard=2", {"strategy": "zero3", "recompute": "full"}),
        ("replica=2", {"strategy": "ddp", "dtype": "bf16-mixed"}),
        ("replica=2 shard=2", {"strategy": "hpz"}),
    ],
    ids=["pipeline", "zero bubble", "recomputed", "mixed", "hpz"],
)
def test_what_goes_with_it(mesh: str, settings: dict[str, Any]) -> None:
    is_bitwise(runs(MLP, mesh, microbatches=3, **settings))


@pytest.mark.parametrize("mesh", ["shard=2", "pipe=2"])
def test_a_decoder(mesh: str) -> None:
    """Attention, norms, grouped heads, a tied head that is not compiled."""
    is_bitwise(runs(DECODER, mesh, strategy="zero3", microbatches=2))


def test_processes_through_the_command() -> None:
    layout = "--mesh shard=2 --microbatches 2 --batch 13 --dropout 0 --steps 2 --compile"
    found = command(f"verify --model mlp --layers 3 --width 5 --world process {layout}")
    assert "verdict: bitwise" in found.stdout, found.stdout + found.stderr
    assert found.returncode == 0


def command(words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plait", *words.split()], capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, **env},
    )  # fmt: skip


def test_without_a_compiler_nothing_starts() -> None:
    found = command("train --compile --mesh shard=2", CXX="/there/is/none")
    assert found.returncode == 2 and "compile needs a C++ compiler, and there is none: install g++" in found.stderr


# ---- mutations -----------------------------------------------------------------------------------------------------


def test_a_layout_that_is_not_compiled_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparison to the bit has compiled units on both sides."""
    build = Stage.__init__

    def eager(self: Stage, settings: Any, *args: Any) -> None:
        build(self, replace(settings, parallelism=replace(settings.parallelism, compile=False)), *args)

    monkeypatch.setattr(Stage, "__init__", eager)
    found = runs(DECODER, "shard=1", strategy="ddp", seed=2)  # no other test has this seed, nor its references
    assert found.different() and all(kind.startswith("tree") for kind in found.different())


# ---- the engine ----------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Norm, linear, dropout, residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.drop = nn.LayerNorm(5), nn.Linear(5, 5), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.up(self.norm(x)))


class Telling(Rows):
    """It leaves a term of the loss as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        self.penalty = self.up.weight.square().sum() * y.exp().sum()
        return x


class Peeking(Rows):
    """It depends on a value: no graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > -1e9 else x


def graphs_of(engine: Engine) -> int:
    compiled = engine.placed.stages[0].compiled
    return 0 if compiled is None else compiled.graphs


def square_sum(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum()
    return out


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    out: Tensor = model[1].penalty  # type: ignore[index]
    return out


def losses(
    model: nn.Module, mesh: str, sizes: Sequence[Sequence[int]], loss_fn: LossFn = square_sum, **settings: Any
) -> list[Any]:
    """By rank, for steps whose microbatches have these sizes, and for an evaluation: losses, and how many
    graphs there were after each."""

    def body(comm: Comm) -> tuple[list[float], list[int]]:
        own = copy.deepcopy(model)
        engine = Engine(
            own, comm, optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
            loss_fn=loss_fn, count_fn=len, seed=3, **settings,
        )  # fmt: skip
        found, graphs = [], []
        for step, brought in enumerate(sizes):
            draw = torch.Generator().manual_seed(100 * step + comm.rank)
            found.append(engine.step([torch.randn(size, 5, generator=draw) for size in brought]).loss)
            graphs.append(graphs_of(engine))
        found.append(engine.evaluate([torch.ones(3, 5)]).loss)
        return found, [*graphs, graphs_of(engine)]

    return run(Mesh.parse(mesh), body, deadline=300)


def both(model: nn.Module, sizes: Sequence[Sequence[int]]) -> list[Any]:
    """Compiled and not, on one rank."""
    return [losses(model, "shard=1", sizes, strategy="ddp", compile=compile)[0] for compile in (True, False)]


RAGGED = ((3, 2), (2, 3), (3, 2), (2, 2))


def test_no_step_compiles_again() -> None:
    """Two sizes, and for each a block whose input needs no gradient and two that share their code: four graphs in the
    first step, none in those after it, and one for the evaluation."""
    model = nn.Sequential(Rows(), Rows(), Rows())
    plain = losses(model, "shard=2", RAGGED, strategy="zero3")
    for (found, graphs), (wanted, _) in zip(
        losses(model, "shard=2", RAGGED, strategy="zero3", compile=True), plain, strict=True
    ):
        assert graphs == [4, 4, 4, 4, 5]
        assert found == pytest.approx(wanted, rel=1e-6)


def test_a_unit_that_is_no_graph_runs_without_the_compiler() -> None:
    model = nn.Sequential(Rows(), Peeking())
    with pytest.warns(UserWarning, match="unit '1' runs without the compiler: .*data-dependent"):
        (found, graphs), (wanted, _) = both(model, RAGGED)
    assert graphs == [2, 2, 2, 2, 3]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_units_that_draw_run_without_the_compiler_and_have_their_masks() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Rows(), Rows(0.4))

    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(1))]
    job = plait.UserJob(build, square_sum, batches)
    with pytest.warns(UserWarning, match="runs without the compiler: it draws random numbers"):
        assert plait.verify(job, "pipe=2", "ddp", microbatches=2, compile=True).word in ("bitwise", "equal")


def test_a_hook_inside_of_one_block_runs_in_that_one() -> None:
    """Dynamo itself would give the block the code of its sibling, which has no hook."""
    model = nn.Sequential(Rows(), Rows(), Rows())
    model[2].norm.register_forward_hook(lambda module, args, y: 3 * y)  # type: ignore[union-attr]
    (found, graphs), (wanted, _) = both(model, ((3,),))
    assert graphs[0] == 3
    assert found == pytest.approx(wanted, rel=1e-6)


def test_what_leaves_a_unit_in_another_way_gathers_it_in_the_backward() -> None:
    """The last block returns what it was given, so no gradient of that tells when its backward begins."""
    model = nn.Sequential(Rows(), Telling())
    settings: dict[str, Any] = {"strategy": "zero3", "loss_fn": penalty}
    ((found, _), _), ((wanted, _), _) = (
        losses(model, "shard=2", RAGGED[:2], compile=compile, **settings) for compile in (True, False)
    )
    assert found == pytest.approx(wanted, rel=1e-5)


def test_nothing_to_compile_is_refused() -> None:
    """Each linear of a model without blocks is a unit, and one operator."""
    with pytest.raises(ValueError, match=r"compile has nothing to do: .* name larger units"):
        losses(Rows(), "shard=1", RAGGED, strategy="ddp", compile=True)
