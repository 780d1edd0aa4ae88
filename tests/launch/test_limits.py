"""When a run is started again, and when not any more."""

import pytest

from plait.run.launch.limits import Limits


def test_so_many_restarts_as_were_allowed() -> None:
    faults = [(1, 7, "step-5"), (1, 12, "step-10"), (1, 17, "step-15")]
    assert Limits(restarts=2).refusal(faults[:2]) is None
    assert Limits(restarts=2).refusal(faults) == "not started again: 2 restarts were allowed, and made"


@pytest.mark.parametrize(("step", "said"), [(7, "rank 1 failed in step 7 3 times"), (-1, "in front of the first step")])
def test_three_faults_in_one_step_without_a_new_checkpoint_are_a_loop(step: int, said: str) -> None:
    assert Limits(restarts=100).refusal([(1, step, "step-5")] * 2) is None
    refusal = Limits(restarts=100).refusal([(1, step, "step-5")] * 3)
    assert refusal is not None and said in refusal


def test_other_ranks_in_the_same_step_are_no_loop() -> None:
    assert Limits(restarts=100).refusal([(rank, 19, "step-15") for rank in range(5)]) is None


def test_with_a_new_checkpoint_it_is_no_loop() -> None:
    assert Limits(restarts=100).refusal([(1, 7, f"step-{kept}") for kept in range(5)]) is None
