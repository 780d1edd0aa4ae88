"""What the first and the second signal do."""

import os
import signal

import pytest

from plait.launch.signals import ASKING, Asked, heard


def test_every_signal_asks_once_and_a_second_sigint_ends_at_once() -> None:
    told: list[int] = []
    asked = Asked(told.append, grace=100)
    with heard(asked):
        for number in ASKING:
            if number != signal.SIGINT:
                os.kill(os.getpid(), number)
        assert told == [asked.number] and asked.number in ASKING
        assert not asked.late
        with pytest.raises(SystemExit) as left:
            os.kill(os.getpid(), signal.SIGINT)
    assert left.value.code == 128 + signal.SIGINT


def test_without_grace_the_first_one_ends_at_once() -> None:
    with heard(Asked(lambda _: None, grace=0)), pytest.raises(SystemExit) as left:
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM


def test_the_handlers_of_before_come_back_and_what_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        told: list[int] = []
        others = {number: signal.getsignal(number) for number in ASKING}
        with heard(told.append):
            os.kill(os.getpid(), signal.SIGHUP)  # nohup
            os.kill(os.getpid(), signal.SIGUSR1)
        assert told == [signal.SIGUSR1]
        assert {number: signal.getsignal(number) for number in ASKING} == others
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_time_is_over_after_the_grace() -> None:
    asked = Asked(lambda _: None, grace=1e-9)
    assert not asked.late
    asked(signal.SIGTERM)
    while not asked.late:
        pass
