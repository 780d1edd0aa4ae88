"""Published bugs are called wrong, at their place, with their factor; nothing else is.  A witness keeps all elements of
each tensor, or two, or one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import silent_bug_ranks
import torch.multiprocessing as mp
from ports import free_port
from silent_bugs import BUGS, NOT_ADDED, RIGHT, Bug


def name_of(bug: Bug) -> str:
    return bug.adapter.__name__


@pytest.fixture(scope="module", params=[None, 2, 1], ids=lambda number: f"{number or 'all'} of each")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What was said of each, by the world of two processes that ran them."""
    path = tmp_path_factory.mktemp("bugs") / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        mp.spawn(silent_bug_ranks.rank_main, (2, free_port(), str(path), request.param), nprocs=2)
    return {"elements": request.param, **json.loads(path.read_text())}


@pytest.mark.parametrize("bug", RIGHT, ids=name_of)
def test_the_engines_below_the_bugs_are_right(found: Mapping[str, Any], bug: Bug) -> None:
    assert found[name_of(bug)]["phase"] == "equal", found[name_of(bug)]


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_published_bug_is_named(found: Mapping[str, Any], bug: Bug) -> None:
    """From two elements on with its cause; from one with its parameter, where any factor fits one number."""
    said = found[name_of(bug)]
    assert said["phase"] == "gradient" and said["name"].startswith(bug.name), said
    if found["elements"] == 1 and bug.words == NOT_ADDED:
        assert "a division or a sum that the job does not have" in said["cause"], said
        return
    assert bug.words in said["text"], said
    if bug.factor is not None:
        assert said["factor"] == pytest.approx(bug.factor, rel=1e-2), said
