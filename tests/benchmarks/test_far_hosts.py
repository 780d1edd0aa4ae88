"""The page of far hosts is that of its results, and the prediction knows what crosses the link."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "far_hosts"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("sizes", "page")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("page")
    for name in names:
        sys.modules.pop(name, None)


def test_the_page_and_its_picture_are_those_of_the_results(page: Any) -> None:
    text, picture = page.written(json.loads((FOLDER / "results.json").read_text()))
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
