"""Every planted fault is seen, and placed: the first wrong tensor is where the code is broken."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import loops
import pytest
import shared_faults
import torch
import verify_cases as cases
from engine_cases import Made
from fault_table import LAYOUTS, LOOPS, SHARED, Fault
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait import UserJob
from plait.referee.verify.cases import due
from plait.referee.verify.compare import KINDS
from plait.referee.verify.locate import search
from plait.referee.verify.record import trace_layout
from plait.referee.verify.run import judge, placed, references
from plait.referee.witness.judge import judge as judge_witnessed
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import make_job

Patch = pytest.MonkeyPatch
WAYS = {(fault.seen, fault.step, fault.phase, fault.cause): fault for fault in reversed(LAYOUTS)}
"""A fault for each way in which one is seen and placed."""
CASES = [(fault, fault.layouts[0]) for fault in LAYOUTS if fault in WAYS.values()]
OTHERS = [(fault, config) for fault in LAYOUTS for config in fault.layouts if (fault, config) not in CASES]


def name_of(config: VerifyConfig) -> str:
    task, layout = config.task, config.layout
    sizes = f"{task.network.model}-{config.machine.mesh}-{layout.strategy}-{layout.schedule}-{layout.microbatches}"
    return f"{sizes}-{config.task.network.dtype}{'-sequence' if config.layout.sequence_parallel else ''}"


def ids_of(cases: list[tuple[Fault, VerifyConfig]]) -> list[str]:
    return [f"{fault.put.__name__}-{name_of(config)}" for fault, config in cases]


@pytest.mark.parametrize(("fault", "config"), CASES, ids=ids_of(CASES))
def test_a_fault_in_a_layout_is_seen_and_placed(fault: Fault, config: VerifyConfig) -> None:
    if isinstance(fault.seen, str):
        with pytest.raises((ValueError, TimeoutError), match=fault.seen):
            cases.found_in(config, fault.put)
        return
    result, found = cases.found_in(config, fault.put)
    assert result.verdict.word == "different"
    assert fault.seen <= result.different(), f"seen only by {sorted(result.different())}"
    if fault.phase is None:
        assert result.different() == {"ledger"} and found is None, "the numbers were right"
        return
    assert found is not None
    assert (found.step if fault.step is not None else None, found.phase) == (fault.step, fault.phase), found
    assert found.name.startswith(fault.name) and fault.cause in found.cause, found


@pytest.mark.parametrize(("fault", "config"), OTHERS, ids=ids_of(OTHERS))
def test_other_faults_and_other_layouts(fault: Fault, config: VerifyConfig) -> None:
    test_a_fault_in_a_layout_is_seen_and_placed(fault, config)


@pytest.mark.parametrize("config", list({repr(config): config for _, config in CASES}.values())[::5], ids=name_of)
def test_without_a_fault_the_same_layout_is_right(config: VerifyConfig) -> None:
    """Every fifth of them; the layouts are right in ``verify/test_layouts.py``, and here nothing is placed."""
    result, found = cases.found_in(config)
    assert result.verdict.word == due(config) and found is None, result.different()


@pytest.mark.parametrize("name", [None, *SHARED])
def test_a_fault_that_layout_and_replay_share_is_placed(name: str | None, monkeypatch: Patch) -> None:
    put, changes, *place = SHARED[name] if name else (lambda patch: None, {})
    config = replace(shared_faults.RICH, **changes)
    with monkeypatch.context() as patch:
        put(patch)
        job = make_job(config.task, config.dtypes)
        ranks = cases.record(config, job)
        tree, plain = references(job, config, ranks)
        verdict = judge(job, config, ranks, tree, plain)
    assert [str(finding) for finding in verdict.tree if not finding.bitwise] == []
    assert verdict.word == ("different" if name else "bitwise")
    found = placed(verdict, job, config, ranks, (tree, plain)).first
    assert ([found.step, found.phase] if found else []) == place, found
    if found and found.phase in ("clip", "update"):
        alone = {finding.kind for finding in verdict.plain if not finding.equal}
        assert alone == {KINDS[found.phase]}, "what comes after it begins with the replay's own values"


@pytest.mark.parametrize(("fault", "settings", "step", "phase", "factor", "cause"), LOOPS)
def test_a_wrong_loop_is_named(
    tmp_path: Path, fault: str, settings: dict[str, Any], step: int, phase: str, factor: float | None, cause: str
) -> None:
    settings = dict(settings)
    judged = settings.pop("judged", settings.get("clip"))
    loops.run(tmp_path / "w", fault, **settings)
    found = judge_witnessed(loops.the_job(settings.get("optimizer", "sgd")), tmp_path / "w", clip=judged)
    assert (found.step, found.phase) == (step, phase), found
    assert cause in found.cause and found.cause in found.text, found
    if factor is not None:
        assert found.factor == pytest.approx(factor, rel=1e-2), found


# ---- models of others ---------------------------------------------------------------------------------------------


def frozen() -> nn.Module:
    """A frozen layer without a graph, a dict of outputs, and a module that works in place."""

    def run(m: Any, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            h = m.frozen(x)
        return {"y": m.head(m.inside(h.tanh())), "aux": None, "count": 3}

    inside = nn.Sequential(nn.Linear(7, 7), nn.ReLU(inplace=True))
    return Made(run, frozen=nn.Linear(5, 7).requires_grad_(False), inside=inside, head=nn.Linear(7, 5))


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
    """It counts its calls in this process."""

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


@pytest.mark.parametrize("build", [frozen, Again])
def test_nothing_is_found_in_models_of_others_that_are_right(build: Callable[[], nn.Module]) -> None:
    config = theirs(build)
    job = make_job(config.task, config.dtypes)
    assert search(trace_layout(job, config, range(2)), job, config, range(2)) is None


def test_a_model_that_counts_its_calls_is_named() -> None:
    verdict = plait.verify(theirs(Counting).task.network.job, mesh="shard=3", strategy="zero3", microbatches=2, steps=2)
    assert verdict.word == "different" and verdict.first is not None
    assert (verdict.first.phase, verdict.first.name, verdict.first.step) == ("forward", "", 0)
    assert "still right: the output of 'head'" in str(verdict)
