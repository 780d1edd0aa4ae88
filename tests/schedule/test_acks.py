"""What a message says of others: held against a run of the lines in which only what must have happened has."""

from __future__ import annotations

import pytest

from plait.schedule.actions import parse_schedule
from plait.schedule.orders import ORDERS, stages_per_rank, write_order
from plait.schedule.passes import add_messages
from plait.schedule.pipeline import acks


def test_an_activation_says_that_a_gradient_has_arrived() -> None:
    """1F1B on two ranks: F2 leaves rank 0 after B0 has run there, and B0 needed rank 1's gradient."""
    schedule = add_messages(write_order("1f1b", 2, 4))
    assert acks(schedule, 1) == {
        ("F", 1, 0): (),
        ("F", 1, 1): (),
        ("F", 1, 2): (("B", 0, 0),),
        ("F", 1, 3): (("B", 0, 1),),
    }
    assert acks(schedule, 0) == {("B", 0, m): (("F", 1, m),) for m in range(4)}


def test_gpipe_says_nothing_of_gradients() -> None:
    assert set(acks(add_messages(write_order("gpipe", 2, 3)), 1).values()) == {()}


def test_nothing_is_said_of_a_message_that_was_not_needed_yet() -> None:
    schedule = add_messages(parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0"))
    assert acks(schedule, 0) == {("B", 0, 1): (("F", 1, 0), ("F", 1, 1)), ("B", 0, 0): ()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 4), (4, 8)])
def test_what_is_said_is_so(order: str, ranks: int, microbatches: int) -> None:
    """The sender of a message had carried out, before, every pass that needed what is said to have arrived; no message
    is said to have arrived twice, and where ranks go on talking, few are left unsaid.
    """
    schedule = add_messages(write_order(order, ranks * stages_per_rank(order), microbatches))
    for rank in range(len(schedule)):
        said = acks(schedule, rank)
        arrived = [message for messages in said.values() for message in messages]
        assert len(arrived) == len(set(arrived))
        for (way, stage, microbatch), messages in said.items():
            send = f"{stage - 1 if way == 'F' else stage + 1}SEND_{way}{microbatch}"
            line = next(words for words in ([str(a) for a in one] for one in schedule) if send in words)
            before = line[: line.index(send)]
            for kind, needed_by, m in messages:
                assert any(f"{needed_by}{k}{m}" in before for k in ("F" if kind == "F" else "BI")), (
                    send,
                    kind,
                    needed_by,
                    m,
                )
