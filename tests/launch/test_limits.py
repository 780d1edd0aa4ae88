"""When a run is started again, and when not any more."""

import pytest

from plait.run.launch.limits import Limits, Restarts


def test_so_many_restarts_as_were_allowed() -> None:
    restarts = Restarts(Limits(restarts=2))
    assert restarts.refusal(1, 7, "step-5") is None
    assert restarts.refusal(1, 12, "step-10") is None
    assert restarts.refusal(1, 17, "step-15") == "not started again: 2 restarts were allowed, and made"


@pytest.mark.parametrize(("step", "said"), [(7, "rank 1 failed in step 7 3 times"), (-1, "in front of the first step")])
def test_three_faults_in_one_step_without_a_new_checkpoint_are_a_loop(step: int, said: str) -> None:
    restarts = Restarts(Limits(restarts=100))
    assert [restarts.refusal(1, step, "step-5") for _ in range(2)] == [None, None]
    refusal = restarts.refusal(1, step, "step-5")
    assert refusal is not None and said in refusal


def test_other_ranks_in_the_same_step_are_no_loop() -> None:
    restarts = Restarts(Limits(restarts=100))
    assert all(restarts.refusal(rank, 19, "step-15") is None for rank in range(5))


def test_with_a_new_checkpoint_it_is_no_loop() -> None:
    restarts = Restarts(Limits(restarts=100))
    assert all(restarts.refusal(1, 7, f"step-{kept}") is None for kept in range(5))
