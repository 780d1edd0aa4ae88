"""The launcher tells what it sees of its ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from plait.run.launch.rank_monitor import RankMonitor
from plait.run.watch.page import Status
from plait.table.mesh import Mesh


def test_a_signal_to_a_rank_is_told_at_once_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is asked to end has ended with all others before ranks are diagnosed again."""
    monitor = RankMonitor(Mesh(shard=2), tmp_path, 20.0)
    monitor.page.write(Status(1, "a", os.getpid()))
    assert monitor.tell({}, {1: os.getpid()}) is None
    monitor.page.write(Status(1, "a", os.getpid(), signal=int(signal.SIGUSR1)))
    assert monitor.tell({}, {1: os.getpid()}) is None
    assert not capsys.readouterr().err
    monitor.tell_signals()
    monitor.tell_signals()
    assert capsys.readouterr().err == "plait: rank 1 got SIGUSR1: all ranks end after their step\n"
    monitor.page.ask_to_stop(signal.SIGTERM)
    monitor.page.write(Status(0, "a", os.getpid(), signal=int(signal.SIGTERM)))
    monitor.tell_signals()
    assert not capsys.readouterr().err, "the launcher asked, and has said so"
