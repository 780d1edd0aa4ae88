"""Engines are the run of a single process, ours too; one that sends nothing is not; what does not fit is refused."""

from collections.abc import Mapping
from typing import Any

import engine_ranks
import engine_worlds
import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return engine_worlds.outcomes(engine_ranks.CASES, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", [name for name in engine_ranks.CASES if name != "wrong"])
def test_an_engine_is_the_run_of_a_single_process(found: Mapping[str, Any], name: str) -> None:
    if not engine_ranks.installed(engine_ranks.CASES[name]):
        pytest.skip(f"{engine_ranks.CASES[name]['engine']} is not installed")
    assert found[name]["equal"], found[name]
    assert found[name]["text"].startswith("2 steps of "), found[name]
    assert found[name]["residual"] <= (1e-13 if "double" in name else 1e-5), found[name]


def test_an_engine_that_sends_nothing_is_named(found: Mapping[str, Any]) -> None:
    assert not found["wrong"]["equal"] and "no all-reduce" in found["wrong"]["text"], found["wrong"]


def test_the_engine_of_the_guide_is_the_example() -> None:
    page = (engine_ranks.EXAMPLES.parent / "docs/guide/judge-any-engine.md").read_text()
    example = (engine_ranks.EXAMPLES / "my_engine.py").read_text()
    code = example.split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in page
