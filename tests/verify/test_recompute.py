"""Faults of a recomputation are seen.

That recomputation itself changes no bit is held by test_layouts.py and the matrix.
"""

from dataclasses import replace

import pytest
from verify_cases import GPT, HEADS, verify

from plait.forward.context import ForwardContext
from plait.predict import tensor
from plait.referee.verify import record
from plait.zero.unit import State, Unit
from plait.zero.unshard import Unsharding

MODES = ("full", "selective")
TWO_STEPS = replace(GPT, steps=2)


@pytest.mark.parametrize("recompute", MODES)
def test_masks_that_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """The recomputation stands one sample further than the forward."""
    again = ForwardContext.again

    def elsewhere(self: ForwardContext, *, whole: bool) -> ForwardContext:
        assert self.position is not None
        moved = replace(self.position, first_sample=self.position.first_sample + 1)
        return again(self, whole=whole)._replace(position=moved)

    monkeypatch.setattr(ForwardContext, "again", elsewhere)
    found = verify(replace(TWO_STEPS, recompute=recompute, mesh="shard=2"))  # type: ignore[arg-type]
    assert "tree: gradient" in found.different()


def test_a_unit_that_is_gathered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the recomputation and again for the backward after it: right values, but too many messages."""
    begins = Unsharding._begin_backward_of

    def again(self: Unsharding, unit: Unit) -> None:
        known = unit in self.backward_open
        begins(self, unit)
        if known and unit.state is State.UNSHARDED:
            unit.reshard()
            unit.unshard("backward", self.current.context.microbatch)
            unit.wait()

    monkeypatch.setattr(Unsharding, "_begin_backward_of", again)
    assert verify(replace(TWO_STEPS, recompute="full", mesh="shard=2")).different() == {"ledger"}


def test_messages_of_a_recomputation_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    once = tensor.predict_tensor
    monkeypatch.setattr(record, "predict_tensor", lambda *args, twice, **sizes: once(*args, **sizes))
    assert verify(replace(HEADS, recompute="full", mesh="tensor=2")).different() == {"ledger"}
