"""Engines are the run of a single process, ours too; published bugs in them are named, with place and factor."""

from collections.abc import Mapping
from typing import Any

import engine_ranks
import engine_worlds
import pytest
from silent_bugs import BUGS, RIGHT, Bug


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return engine_worlds.outcomes(engine_ranks.CASES, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", engine_ranks.CASES)
def test_an_engine_is_the_run_of_a_single_process(found: Mapping[str, Any], name: str) -> None:
    if not engine_ranks.installed(engine_ranks.CASES[name]):
        pytest.skip(f"{engine_ranks.CASES[name]['engine']} is not installed")
    assert found[name]["equal"], found[name]
    assert found[name]["text"].startswith("2 steps of "), found[name]
    assert found[name]["residual"] <= (1e-13 if "double" in name else 1e-5), found[name]


def test_the_engine_of_the_guide_is_the_example() -> None:
    page = (engine_ranks.EXAMPLES.parent / "docs/guide/judge-any-engine.md").read_text()
    example = (engine_ranks.EXAMPLES / "my_engine.py").read_text()
    code = example.split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in page


def name_of(bug: Bug) -> str:
    return bug.adapter.__name__


@pytest.fixture(scope="module")
def of_bugs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return engine_worlds.outcomes(
        {name_of(bug): bug.config for bug in (*RIGHT, *BUGS)}, tmp_path_factory.mktemp("bugs")
    )


@pytest.mark.parametrize("bug", RIGHT, ids=name_of)
def test_the_engines_below_the_bugs_are_right(of_bugs: Mapping[str, Any], bug: Bug) -> None:
    assert of_bugs[name_of(bug)]["phase"] == "equal", of_bugs[name_of(bug)]


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_published_bug_is_named(of_bugs: Mapping[str, Any], bug: Bug) -> None:
    said = of_bugs[name_of(bug)]
    assert said["phase"] == "gradient" and said["name"].startswith(bug.name), said
    assert bug.words in said["text"], said
    if bug.factor is not None:
        assert said["factor"] == pytest.approx(bug.factor, rel=1e-2), said
