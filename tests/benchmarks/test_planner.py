"""The benchmark of the planner: it reads rows, finds constants again, and writes a page, from files made here."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark, which are beside its script."""
    import importlib

    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("cases", "fit", "judge", "page")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


HEAD = "gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,iteration_ms"
ROWS = [
    f"{t * d * p},{m * d * b},{b},{h},16,{L},1024,{t},{d},{p},1"
    for t, d, p in ((1, 2, 1), (2, 1, 2), (2, 4, 1), (1, 2, 4))
    for m in (4, 8)
    for b in (1, 4)
    for h in (1024, 2048)
    for L in (12, 24)
]


def test_constants_are_found_again(parts: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\n".join([HEAD, *ROWS]))
    cases = parts["cases"].vtrain(tmp_path, "rows.csv").cases
    true = replace(parts["fit"].START, product=0.7, kernels=60.0, passes=1.6, network=0.6)
    cases = [
        replace(case, seconds=float(t)) for case, t in zip(cases, parts["fit"].times(cases, {"": true}), strict=True)
    ]
    fitted, rest = parts["fit"].tenth(cases)
    assert len(fitted) == 6 and len(rest) == 58
    found = parts["fit"].fit(cases[::2])
    assert parts["judge"].time_errors(rest, {"": found}).mean < 0.03
    assert parts["judge"].one_efficiency(rest).mean > 0.1
    assert found.kernels == pytest.approx(60, rel=0.2)


def test_a_pick_is_held_against_the_best_that_was_measured(parts: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\n".join([HEAD, *ROWS[:4]]))
    cases = parts["cases"].vtrain(tmp_path, "rows.csv").cases
    known = {"": parts["fit"].START}
    right = [replace(c, seconds=float(t)) for c, t in zip(cases, parts["fit"].times(cases, known), strict=True)]
    (found,) = parts["judge"].picks(right, known, lambda case: "all").values()
    assert (found.runs, found.first, found.of_three) == (4, 1.0, 1.0) and found.middle < 1
    slow = [replace(case, seconds=1 / case.seconds) for case in right]
    (found,) = parts["judge"].picks(slow, known, lambda case: "all").values()
    assert found.first < found.of_three < 1


def test_a_model_is_split_as_nanotron_splits_it(parts: Any) -> None:
    """Llama 3 8B on eight stages, as its documentation prints it: five blocks first, then four, the head alone."""
    split = parts["cases"].nanotron_split(32, 4096, 14336, 128256, 8)
    assert sum(split) == 35 and split[0] == 6 and min(split[1:-1]) >= 4


def test_a_page_has_the_errors_of_each_kind(parts: Any) -> None:
    errors = parts["judge"].Errors((0.1, -0.2, 0.3))
    assert str(errors) == "20.0 | 20.0 | +10.0"
    assert "| tensor | 2 | 3 | 20.0 | 20.0 | +10.0 |" in parts["page"].kinds({"tensor": {"2": errors}})
    assert parts["page"].goal(0.04, 0.05) == "4.0 % met" and parts["page"].goal(0.06, 0.05) == "6.0 % missed"
    drawn = parts["page"].scatter("<title>", "s", {"one": [(0.1, 0.2), (10.0, 9.0)]})
    assert "&lt;title&gt;" in drawn and drawn.count("<circle") == 3


def test_a_folder_without_the_data_is_refused(tmp_path: Path) -> None:
    asked = [sys.executable, str(FOLDER / "main.py"), "--data", str(tmp_path)]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2 and "vtrain_single_node.csv" in ran.stderr and "Traceback" not in ran.stderr


FAR_HOSTS = Path(__file__).parents[2] / "benchmarks" / "far_hosts"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FAR_HOSTS))
    names = ("sizes", "page")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("page")
    for name in names:
        sys.modules.pop(name, None)


def test_the_page_and_its_picture_are_those_of_the_results(page: Any) -> None:
    text, picture = page.written(json.loads((FAR_HOSTS / "results.json").read_text()))
    assert text in page.PAGE.read_text() and picture == page.PICTURE.read_text()


def test_a_slow_link_costs_each_layout_its_crossing_bytes(page: Any) -> None:
    links = {"meet": 0.0, "inside": 1e12, "inside_latency": 0.0, "between": 1e9, "between_latency": 0.0}
    prediction = page.Prediction([{"links": links, "seconds": {"passes": [0.0], "update": [0.0]}}])
    weights = 4 * page.transformer().num_parameters
    crossing = {layout: prediction.step(layout, weights) for layout in page.NAMES}  # in copies of the weights
    gathers_and_sums = 2 * 3 * 0.5  # two microbatches: forward, backward and gradients, each half the weights
    sizes = page.transformer()
    tied = 2 * 2 * 0.5 * sizes.vocab * sizes.hidden / sizes.num_parameters  # the head gathers the embedding's again
    wanted = {"zero3": gathers_and_sums + tied, "hsdp": 1.0, "psdp": 1.0, "islands": 1 / 8}
    assert crossing == pytest.approx(wanted, rel=1e-3)
    assert page.crossing(prediction, "zero3", "hsdp") is None  # with no update there is none
