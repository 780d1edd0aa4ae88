"""Published bugs are called wrong, at their place, with their factor; nothing else is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import silent_bug_ranks
import torch.multiprocessing as mp
from ports import free_port
from silent_bugs import BUGS, RIGHT, Bug


def name_of(bug: Bug) -> str:
    return bug.adapter.__name__


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What was said of each, by the world of two processes that ran them."""
    path = tmp_path_factory.mktemp("bugs") / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        mp.spawn(silent_bug_ranks.rank_main, (2, free_port(), str(path)), nprocs=2)
    known: Mapping[str, Any] = json.loads(path.read_text())
    return known


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
