"""Published bugs are called wrong, at their place, with their factor; nothing else is."""

from collections.abc import Mapping
from typing import Any

import engine_worlds
import pytest
from silent_bugs import BUGS, RIGHT, Bug


def name_of(bug: Bug) -> str:
    return bug.adapter.__name__


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return engine_worlds.outcomes(
        {name_of(bug): bug.config for bug in (*RIGHT, *BUGS)}, tmp_path_factory.mktemp("bugs")
    )


@pytest.mark.parametrize("bug", RIGHT, ids=name_of)
def test_the_engines_below_the_bugs_are_right(found: Mapping[str, Any], bug: Bug) -> None:
    assert found[name_of(bug)]["phase"] == "equal", found[name_of(bug)]


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_published_bug_is_named(found: Mapping[str, Any], bug: Bug) -> None:
    said = found[name_of(bug)]
    assert said["phase"] == "gradient" and said["name"].startswith(bug.name), said
    assert bug.words in said["text"], said
    if bug.factor is not None:
        assert said["factor"] == pytest.approx(bug.factor, rel=1e-2), said
