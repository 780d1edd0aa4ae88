"""The first and the second signal."""

import os
import signal
import time

import pytest

from plait.run.launch.signals import ASKING, Asked, heard


def test_every_signal_asks_once_and_a_second_sigint_ends_at_once() -> None:
    told: list[int] = []
    asked = Asked(told.append, grace=100)
    with heard(asked):
        for number in ASKING:
            if number != signal.SIGINT:
                os.kill(os.getpid(), number)
        assert told == [asked.number] and asked.number in ASKING
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
        asked = Asked(told.append, grace=100)
        others = {number: signal.getsignal(number) for number in ASKING}
        with heard(asked):
            os.kill(os.getpid(), signal.SIGHUP)  # nohup
            os.kill(os.getpid(), signal.SIGUSR1)
        assert told == [signal.SIGUSR1]
        assert {number: signal.getsignal(number) for number in ASKING} == others
    finally:
        signal.signal(signal.SIGHUP, before)


def test_when_the_time_is_over_it_ends_at_once() -> None:
    asked = Asked(lambda _: None, grace=0.1)
    with pytest.raises(SystemExit) as left, heard(asked):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert left.value.code == 128 + signal.SIGTERM and asked.late


def test_who_has_ended_in_time_is_left_alone() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        with heard(Asked(lambda _: None, grace=0.1)):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        assert told == []
    finally:
        signal.signal(signal.SIGTERM, before)
