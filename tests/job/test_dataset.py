"""From a config to a job: its data, the held-out part, the number of steps, the dtype, the optimizer and its rates."""

import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from plait.messages.ended import EndedError
from plait.run.config.settings import TrainConfig
from plait.run.data.batches import IGNORED
from plait.run.data.corpus import Epochs
from plait.run.data.packing import PackedBatches
from plait.run.data.windows import TextBatches
from plait.run.job.config import JobConfig
from plait.run.job.dataset import make_data
from plait.run.job.families import FAMILIES, _states_of
from plait.run.job.job import build_model, make_job
from plait.run.job.optimizer import lr_factor, make_optimizer, make_scheduler
from plait.run.job.user_code import load_name

PARAGRAPHS = [bytes(97 + (i * i + j) % 26 for j in range(4 + i * 7 % 20)) for i in range(40)]
TEXT = b"\n\n".join(PARAGRAPHS)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "text").write_bytes(TEXT)
    return str(tmp_path / "text")


def config(path: str, **changes: object) -> JobConfig:
    settings = {"data": path, "length": 8, "batch": 16, "seed": 5, **changes}
    return JobConfig(**settings)  # type: ignore[arg-type]


def pairs(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    held = batch["targets"] != IGNORED
    return list(zip(batch["tokens"][held].tolist(), batch["targets"][held].tolist(), strict=True))


def test_steps_run_on_and_epochs_end(path: str) -> None:
    by_steps, by_epochs = make_data(config(path, steps=7)), make_data(config(path, epochs=3))
    assert isinstance(by_steps.batches, TextBatches) and by_steps.steps == 7
    n = by_steps.batches.num_samples
    assert isinstance(by_epochs.batches, Epochs) and by_epochs.steps == 3 * -(-n // 16) and n % 16
    assert make_job(config(path, epochs=3)).steps == by_epochs.steps
    assert make_job(config(path, steps=7)).steps == 7


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (3, 2)])
def test_an_evaluation_sees_what_is_held_out_once_and_training_never(
    path: str, ranks: int, microbatches: int, pack: bool
) -> None:
    job = make_job(config(path, epochs=1, batch=7, pack=pack, ragged=True))
    every = [job.eval_batches(rank, ranks, microbatches) for rank in range(ranks)]
    assert len({len(steps) for steps in every}) == 1
    assert {len(step) for steps in every for step in steps} == {microbatches}
    found = sorted(pair for steps in every for step in steps for batch in step for pair in pairs(batch))
    assert sum(job.count_fn(batch) for steps in every for step in steps for batch in step) == len(found)
    if pack:
        held = [PARAGRAPHS[-1], PARAGRAPHS[-2]]
        assert len(held[0]) < sum(map(len, PARAGRAPHS)) * 5 // 100 <= sum(map(len, held))
        assert found == sorted(pair for text in held for pair in pairwise(text))
        trained = job.batches.corpus  # type: ignore[attr-defined]
        assert isinstance(trained, PackedBatches)
        assert int(trained._pieces[:, 1].sum()) == sum(len(text) - 1 for text in PARAGRAPHS[:-2])
    else:
        held_bytes = max(9, len(TEXT) * 5 // 100)
        whole = (held_bytes - 1) // 8 * 8
        assert found == sorted(pairwise(TEXT[-held_bytes:][: whole + 1]))
        trained = job.batches.corpus  # type: ignore[attr-defined]
        assert trained.num_samples == (len(TEXT) - held_bytes - 1) // 8


@pytest.mark.parametrize("pack", [False, True])
def test_tokens_of_another_encoding(path: str, pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes a token: everything else follows."""

    def encode(text: bytes) -> Tensor:
        row = torch.tensor(list(text[: len(text) // 2 * 2]))
        return row[::2] * 256 + row[1::2]

    monkeypatch.setitem(FAMILIES, "pairs", replace(FAMILIES["gpt"], encoder=lambda sizes: encode))
    data = make_data(config(path, pack=pack, batch=4, model="pairs", vocab=1 << 16))
    batch = data.batches.samples(0, 0, 4, 4)
    assert batch["tokens"].dtype == torch.int64 and batch["tokens"].max() > 256
    assert data.held_out is not None and data.held_out.samples(0, 0, 1, 1)["tokens"].max() > 256


def test_more_samples_than_there_are(path: str) -> None:
    n = make_data(config(path)).batches.num_samples  # type: ignore[attr-defined]
    assert make_data(config(path, batch=n)).steps == 60
    with pytest.raises(ValueError, match=f"a batch of {n + 1} samples, but the data has {n} of length 8: .*epochs"):
        make_data(config(path, batch=n + 1))
    assert make_data(config(path, batch=n + 1, epochs=2)).steps == 2
    with pytest.raises(ValueError, match=rf"a warmup of 3 steps, but 2 epochs of {n} samples are 2 steps of {n + 1}"):
        make_data(config(path, batch=n + 1, epochs=2, warmup=3))


@pytest.mark.parametrize(
    ("dtype", "computed", "stored"),
    [
        ("fp32", torch.float32, torch.float32),
        ("fp64", torch.float64, torch.float64),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("fp16-mixed", torch.float16, torch.float32),
    ],
)
def test_initial_weights_have_the_bits_of_the_master_weights(
    dtype: str, computed: torch.dtype, stored: torch.dtype
) -> None:
    config = TrainConfig(model="mlp", layers=1, width=4, dtype=dtype, strategy="zero1")
    assert config.dtypes.computed == computed
    assert {p.dtype for p in build_model(config.task, config.dtypes).parameters()} == {stored}


def rates(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch's SequentialLR warns of itself
def test_the_rates_are_those_of_torchs_chain_of_schedulers(schedule: str, warmup: int) -> None:
    config = replace(JobConfig(), lr=0.4, steps=13, lr_schedule=schedule, warmup=warmup, min_lr=0.25)
    parameter = nn.Parameter(torch.zeros(3))
    ours = SGD([parameter], lr=config.update.lr)
    theirs = SGD([parameter], lr=config.update.lr)
    long = config.samples.steps - warmup
    after: LRScheduler = {
        "constant": lambda: ConstantLR(theirs, factor=1.0),
        "linear": lambda: LinearLR(theirs, 1.0, config.update.min_lr, long),
        "cosine": lambda: CosineAnnealingLR(theirs, long, eta_min=config.update.lr * config.update.min_lr),
    }[schedule]()
    if warmup > 1:
        grow = LinearLR(theirs, 1 / warmup, 1.0, warmup - 1)
        after = SequentialLR(theirs, [grow, after], [warmup])
    elif warmup == 1:  # one step at the full rate, and then the schedule from its beginning
        after = SequentialLR(theirs, [ConstantLR(theirs, factor=1.0), after], [1])
    want = rates(theirs, after, config.samples.steps)
    assert rates(
        ours, make_scheduler(config.update, config.samples.steps, ours), config.samples.steps
    ) == pytest.approx(want, rel=1e-12)
    assert want[warmup] == pytest.approx(config.update.lr)


def test_the_rates_in_numbers() -> None:
    got = [lr_factor(s, schedule="linear", warmup=2, steps=6, min_lr=0.2) for s in range(8)]
    assert got == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert lr_factor(4, schedule="cosine", warmup=0, steps=8, min_lr=0.0) == pytest.approx(0.5)
    assert [lr_factor(s, schedule="cosine", warmup=3, steps=3, min_lr=0.0) for s in range(3)] == [1 / 3, 2 / 3, 1]


def test_matrices_decay_and_vectors_do_not() -> None:
    config = JobConfig(layers=2, width=32, heads=2, kv_heads=1, weight_decay=0.3)
    model = build_model(config)
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = make_optimizer(config.update, model.parameters())
    decays, rest = optimizer.param_groups
    assert (decays["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {names[id(p)] for p in rest["params"]} == {n for n, p in model.named_parameters() if p.dim() == 1}
    assert len(decays["params"]) + len(rest["params"]) == len(names)
    assert any("embed" in names[id(p)] for p in decays["params"])
    one = make_optimizer(replace(config.update, weight_decay=None), model.parameters())
    assert [group["weight_decay"] for group in one.param_groups] == [0.01]  # torch's default, for all


def test_a_file_that_was_edited_within_a_second_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "job.py"
    for value in (1, 2):
        file.write_text(f"number = {value}\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))  # the same second, the same size
        assert load_name(f"{file}:number", "job") == value
    assert not (tmp_path / "__pycache__").exists(), "nothing is left beside the user's file"


def test_a_file_that_ends_the_program_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(EndedError, match=r"job\.py:2 ended the program in <module> \(SystemExit: 0\)"):
        load_name(f"{tmp_path}/job.py:job", "job")


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3),
        (lambda p: torch.optim.LBFGS(p), 2),
    ],
)
def test_what_an_own_optimizer_keeps_is_seen(make: Any, states: int) -> None:
    """It is predicted, for a user's job too."""
    assert _states_of(make(list(nn.Linear(4, 3).parameters()))) == states
