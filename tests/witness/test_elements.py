"""A witness of a few elements finds what one of everything does, but for what is small and beside them; its size."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import RATE, Net, batch, loss_sum, run, run_cut, terms, the_job, user_job
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import plait
from plait.referee.witness.elements import describe_few, places_of
from plait.referee.witness.judge import judge
from plait.referee.witness.judgement import Judgement
from plait.run.commands.main import main

FEW = 4
"""Of each tensor; ``up.weight`` has 35."""
PINNED = [5, 16, 25, 32]


def test_pieces_that_were_cut(tmp_path: Path) -> None:
    run_cut(tmp_path / "right", local_norm=False, elements=2)
    assert judge(the_job(), tmp_path / "right", clip=0.05).equal
    run_cut(tmp_path / "wrong", local_norm=True, elements=2)
    found = judge(the_job(), tmp_path / "wrong", clip=0.05)
    assert "the norm of its own pieces" in found.cause, found


# ---- beside the elements that are kept ---------------------------------------------------------------------------


def beside(name: str = "up.weight") -> tuple[list[int], list[int]]:
    """The elements of a parameter that are kept, and the others."""
    tensor = dict(Net().named_parameters())[name]
    kept = places_of(name, tuple((0, size) for size in tensor.shape), FEW).tolist()
    return kept, [i for i in range(tensor.numel()) if i not in kept]


def one_process(
    folder: Path,
    of_gradient: Callable[[Tensor], None] = lambda flat: None,
    of_update: Callable[[Tensor], None] = lambda flat: None,
    elements: int | None = FEW,
    steps: int = 3,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    build: Callable[[], nn.Module] = Net,
) -> Judgement:
    """What is said of a loop of one process, in three forwards a step.

    Args:
        of_gradient: what is done to ``up.weight``'s flat gradient before the optimizer's step of step 1.
        of_update: what is done to its values inside that step.
    """
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9))
    torch.manual_seed(0)
    model = build()
    target, optimizer = next(model.parameters()), make(model.parameters())
    optimizer.register_step_post_hook(lambda *call: of_update(target.data.view(-1)) if number == 1 else None)
    with plait.witness(model, optimizer, folder, steps=steps, elements=elements):
        for number in range(steps):
            optimizer.zero_grad()
            whole = batch(number)
            for rows in (slice(0, 3), slice(3, 7), slice(7, None)):
                part = {name: value[rows] for name, value in whole.items()}
                (loss_sum(model, part) / terms(whole)).backward()  # type: ignore[no-untyped-call]
            if number == 1:
                assert target.grad is not None
                of_gradient(target.grad.view(-1))
            optimizer.step()
    return plait.judge(plait.UserJob(build, loss_sum, batch, terms, make), folder)


def test_what_is_beside_the_kept_elements_shows_in_the_norm(tmp_path: Path) -> None:
    kept, others = beside()
    assert len(kept) == FEW and one_process(tmp_path / "right").equal

    def zeros(flat: Tensor) -> None:
        flat[others] = 0

    def infinite(flat: Tensor) -> None:
        flat[others[0]] = torch.nan

    for number, (change, times) in enumerate([(zeros, r"is 0\.\d+ times"), (infinite, "is nan times")]):
        found = one_process(tmp_path / f"gradient {number}", of_gradient=change)
        assert (found.step, found.phase, found.name) == (1, "gradient", "up.weight"), found
        assert "the 4 elements that were kept are right" in found.text, found
        assert re.search(f"its norm {times}", found.text), found
        found = one_process(tmp_path / f"update {number}", of_update=change)
        assert (found.step, found.phase, found.name) == (1, "update", "up.weight"), found
        assert "and the elements that were kept are right" in found.text, found


def test_what_is_small_and_beside_them_is_found_by_the_whole_alone(tmp_path: Path) -> None:
    """The honest limit: one element in 35 is off by a little, and the norm does not tell it from rounding."""

    def little(flat: Tensor) -> None:
        flat[beside()[1][0]] += 1e-4 * flat.abs().max()

    assert one_process(tmp_path / "few", of_gradient=little).equal
    found = one_process(tmp_path / "whole", of_gradient=little, elements=None)
    assert (found.step, found.phase, found.name) == (1, "gradient", "up.weight"), found


def test_rows_are_told_as_far_as_the_elements_tell() -> None:
    true = torch.arange(1.0, 21.0)
    observed = true.clone()
    observed[8:12] *= 2
    places = torch.tensor([0, 3, 8, 10, 11, 13, 19])
    found = describe_few(observed[places], true[places], places, (5, 4))
    assert (found.pattern, found.region, found.factor) == ("region", (0, 2, 3), 2.0)
    assert found.text == "only index 2 of 5 of dim 0, of the elements that were kept: 2 times what it should be"
    assert describe_few(true[places].flip(0), true[places], places, (5, 4)).pattern == "noise"
    assert describe_few(3 * true[places], true[places], places, (5, 4)).factor == 3
    scalar = describe_few(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0]), ())
    assert scalar.pattern == "factor" and scalar.factor == 2


# ---- what the judge carries itself -------------------------------------------------------------------------------


def test_parameters_that_are_loaded_behind_the_start(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with plait.witness(model, optimizer, tmp_path / "w", elements=FEW):
        model.load_state_dict(other.state_dict())
        for step in range(3):
            optimizer.zero_grad()
            whole = batch(step)
            (loss_sum(model, whole) / terms(whole)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert plait.judge(user_job("adamw"), tmp_path / "w").equal


def factorised(parameters: Any) -> torch.optim.Optimizer:
    """No element is updated by itself."""
    return torch.optim.Adafactor(parameters, lr=1e-2)


def test_an_optimizer_that_does_not_go_element_by_element(tmp_path: Path) -> None:
    assert one_process(tmp_path / "right", make=factorised, steps=20).equal

    def twice(flat: Tensor) -> None:
        flat.mul_(1.1)

    found = one_process(tmp_path / "wrong", make=factorised, of_update=twice)
    assert (found.step, found.phase, found.name) == (1, "update", "up.weight"), found


class Wild(nn.Module):
    """Sines of sines, in which rounding grows from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(6)])
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(4 * layer(x))
        y: Tensor = self.last(x)
        return y


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def test_where_rounding_has_grown_the_judge_says_that_it_stops(tmp_path: Path) -> None:
    found = one_process(tmp_path / "few", make=adamw, build=Wild, steps=40)
    assert found.equal and "; not judged from step " in found.text, found
    count = int(found.text.split()[0])
    assert 1 <= count < 40 and f"from step {count} on, where rounding alone may be " in found.text, found
    whole = one_process(tmp_path / "whole", make=adamw, build=Wild, steps=40, elements=None)
    assert whole.equal and whole.text.startswith("40 steps of 1 rank"), whole


class Compared(Net):
    """Samples are held against the batch, so that parts of it do not add up."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def at_once(folder: Path, factor: float, elements: int | None) -> Judgement:
    """What is said of a loop of one forward a step, whose gradients are ``factor`` times what they should be."""
    torch.manual_seed(0)
    model = Compared()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with plait.witness(model, optimizer, folder, steps=2, elements=elements):
        for number in range(2):
            optimizer.zero_grad()
            (factor * loss_sum(model, batch(number)) / terms(batch(number))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    job = plait.UserJob(Compared, loss_sum, batch, terms, lambda ps: torch.optim.SGD(ps, lr=RATE))
    return judge(job, folder)


def test_a_loss_that_compares_samples_is_not_taken_for_rounding(tmp_path: Path) -> None:
    assert at_once(tmp_path / "right", 1.0, None).equal
    assert round(at_once(tmp_path / "wrong", 1.005, None).factor or 0, 4) == 1.005
    with pytest.raises(ValueError, match=r"no step can be judged by a few elements.*without elements="):
        at_once(tmp_path / "few", 1.0, 4)


# ---- what is written ---------------------------------------------------------------------------------------------


def test_a_step_takes_the_bytes_that_the_docstring_says(tmp_path: Path) -> None:
    sizes = {}
    for width in (100, 1000):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with plait.witness(model, optimizer, tmp_path / str(width), elements=64):
            model(torch.ones(7, width)).square().mean().backward()
            optimizer.step()
        place = tmp_path / str(width) / "rank-00000"
        sizes[width] = (place / "step-000000.safetensors").stat().st_size
        assert sizes[width] <= 2 * 6 * (64 * 4 + 16) + 7 * 20 + 1024
        assert (place / "start.safetensors").stat().st_size > 4 * 3 * width * (width + 1)
    assert sizes[100] == sizes[1000]


def test_which_elements_are_kept_is_the_same_for_ever() -> None:
    """They are in no file: another drawing would judge old folders wrong."""
    assert places_of("up.weight", ((0, 7), (0, 5)), 4).tolist() == PINNED
    assert places_of("up.weight", ((7, 14), (0, 5)), 4).tolist() != PINNED
    assert places_of("x", ((3, 9),), 6).tolist() == places_of("x", ((3, 9),), 7).tolist() == [0, 1, 2, 3, 4, 5]
    assert places_of("x", (), 4).tolist() == [0] and places_of("x", ((2, 2), (0, 4)), 4).tolist() == []
    many = places_of("x", ((0, 10**6), (0, 10**6)), 64)
    assert len(set(many.tolist())) == 64 and int(many.min()) >= 0 and int(many.max()) < 10**12
    assert int(many.max()) > 10**11 * 8


def test_mistakes_are_refused_before_the_first_step(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in (0, 10_001):
        with pytest.raises(ValueError, match=f"elements is {number}: give a whole number from 1 to 10,000, or None"):
            plait.witness(model, optimizer, tmp_path / "w", elements=number)


# ---- what is read ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few") / "w"
    run(folder, elements=FEW)
    return folder


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "jobs.py").write_text("from loops import user_job\njob = user_job()\n")
    return f"{tmp_path / 'jobs.py'}:job"


def test_the_command_says_which_recording_it_judged(
    witnessed: Path, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "whole")
    for folder, recording in ((witnessed, "4 elements of each piece, and its norm"), (tmp_path / "whole", "whole")):
        assert main(["judge", str(folder), "--job", job, "--json", str(tmp_path / "told.json")]) == 0
        assert f"\nrecording: {recording}\n" in capsys.readouterr().out
        assert json.loads((tmp_path / "told.json").read_text())["recording"] == recording


def told(file: Path) -> str:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return str(json.loads(data[8 : 8 + size])["__metadata__"]["plait"])


def changed(name: str, key: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        file = folder / "rank-00001" / name
        tensors, about = load_file(file), told(file)
        value = change(tensors.pop(key, torch.zeros(7, 5)))
        save_file(tensors | ({key: value} if value is not None else {}), file, {"plait": about})

    return harm


def elements_told(value: object) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        file = folder / "rank-00001/start.safetensors"
        tensors, about = load_file(file), json.loads(told(file))
        save_file(tensors, file, {"plait": json.dumps({**about, "elements": value})})

    return harm


STEP, DAMAGED = "step-000001.safetensors", "step-000001.safetensors' is damaged"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (elements_told(None), "rank 1 kept everything, and rank 0 elements=4: witness the run again"),
        (elements_told(5), "rank 1 kept elements=5, and rank 0 elements=4"),
        (elements_told(-1), "it says '-1' elements of each piece"),
        (elements_told("x"), "it says 'x' elements of each piece"),
        (elements_told(10**9), "it says '1000000000' elements of each piece"),
        (changed(STEP, "gradient", lambda x: x[1:]), f"{DAMAGED}, its gradient has another number of elements"),
        (changed(STEP, "gradient", lambda x: x[None]), f"{DAMAGED}, its gradient has another number of elements"),
        (changed(STEP, "gradient norms", lambda x: x[1:]), f"{DAMAGED}, its gradient has another number of norms"),
        (changed(STEP, "gradient pieces", lambda x: x + 1), f"{DAMAGED}, its gradient is of no pieces"),
        (changed(STEP, "gradient pieces", lambda x: x * 0), f"{DAMAGED}, its gradient is of no pieces"),
        (changed(STEP, "gradient pieces", lambda x: -x), f"{DAMAGED}, its gradient is of no pieces"),
        (changed(STEP, "gradient pieces", lambda x: x.double()), f"{DAMAGED}, its gradient is of no pieces"),
        (changed(STEP, "gradient pieces", lambda x: x[None]), DAMAGED),
        (changed(STEP, "gradient pieces", lambda x: None), DAMAGED),
        (changed(STEP, "after", lambda x: None), f"{DAMAGED}, it has no 'down.bias' after the step"),
        (changed(STEP, "after norms", lambda x: None), f"{DAMAGED}, its after has no norms"),
        (changed(STEP, "before/up.weight", lambda x: x), f"{DAMAGED}, its 'before/up.weight' is no piece"),
    ],
)
def test_harm_is_refused(
    witnessed: Path,
    job: str,
    tmp_path: Path,
    harm: Callable[[Path], None],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(witnessed, tmp_path / "w")
    harm(tmp_path / "w")
    assert main(["judge", str(tmp_path / "w"), "--job", job]) == 2
    shown = capsys.readouterr().err
    assert says in shown and shown.count("\n") == 1, shown
