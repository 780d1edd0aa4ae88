"""Would a checker of types have caught it?  spmd_types on the engines by hand, as docs/silent-bugs.md says."""

from __future__ import annotations

import pytest

pytest.importorskip("spmd_types", reason="pip install spmd_types")

import typed_bugs
from silent_bug_jobs import Bug
from silent_bugs import BUGS, RIGHT
from test_curves import rows

NOT_ADDED = "the optimizer is given a partial gradient of"

SAYS = {
    "means_are_averaged": "",
    "means_are_summed": "",
    "ranks_count_their_own": "",
    "scaled_after_every_forward": "",
    "weights_become_active_late": "",
    "tied_use_after_the_reduction": "requires all operands to be Partial",
    "clipped_by_a_norm_that_counts_twice": "all_reduce: expected input type",
    "measured_and_not_clipped": "",
    "norms_are_not_summed": f"{NOT_ADDED} norm.weight",
    "norms_are_averaged": "",
    "the_shared_key_is_not_summed": f"{NOT_ADDED} key.weight",
    "the_bias_is_not_summed": f"{NOT_ADDED} key.bias",
    "the_gate_is_not_summed": f"{NOT_ADDED} gate.weight",
    "the_gate_is_detached": "all_reduce: expected input type",
    "experts_are_summed_twice": "",
    "the_loss_is_scaled_by_the_context": "",
}
"""What it says of each bug that sums in Python, or nothing; it does not look into DDP, FSDP2 and pipelining."""


@pytest.mark.parametrize("name", SAYS)
def test_what_it_says_of_a_bug(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (bug,) = (bug for bug in BUGS if bug.adapter.__name__ == name)
    said = typed_bugs.refusal(bug, monkeypatch)
    assert said.startswith(SAYS[name]) if SAYS[name].startswith(NOT_ADDED) else SAYS[name] in said
    assert bool(said) == bool(SAYS[name]), said


@pytest.mark.parametrize("name", ["in_time", "ddp_by_hand"])
def test_what_is_right_passes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = next((bug for bug in RIGHT if bug.adapter.__name__ == name), Bug(typed_bugs.ddp_by_hand, "", "", None, ""))
    assert not typed_bugs.refusal(right, monkeypatch)


def test_sums_by_gathering_are_refused_though_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = (bug for bug in RIGHT if bug.adapter.__name__ == "another_tree")
    assert "Partial type" in typed_bugs.refusal(right, monkeypatch)


def test_the_column_of_the_page() -> None:
    for row, bug in zip(rows(), BUGS, strict=True):
        said = SAYS.get(bug.adapter.__name__)
        assert row[-2] == ("not followed" if said is None else "refused" if said else "passes"), row
