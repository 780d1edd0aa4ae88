"""A malicious checkpoint is loaded, or refused in a line with nothing changed."""

from __future__ import annotations

import copy
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hostile import spoil, write
from run_cases import differences
from small_runs import build, ranks

import plait
from plait.comm import Comm

MOST_BYTES = 4 << 20
"""Memory of Python's that any of these loads may take; the checkpoint has a few kilobytes."""


def play(folder: Path) -> None:
    def body(comm: Comm) -> None:
        engine = build(comm, 1.0, sizes=(3, 7))
        ema = plait.EMA(engine, 0.9)

        def state() -> Any:
            whole = engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()
            return copy.deepcopy((*whole, ema.full_state_dict(), ema.decay))

        before = state()
        try:
            plait.load(folder, engine, ema=ema)
        except ValueError as error:
            assert len(str(error)) < 2000 and str(error).isprintable(), f"unclear: {str(error)[:3000]!r}"
            assert not differences(state(), before), error

    ranks(body, 1)


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_random_harm_is_refused_or_loaded(first: int, tmp_path: Path) -> None:
    write(tmp_path / "good")
    for seed in range(first, first + 40):
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / "run"))
        kind = spoil(folder / "step-000001", random.Random(seed))
        tracemalloc.start()
        try:
            play(folder)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        except BaseException as error:
            error.add_note(f"seed {seed}: {kind}")
            raise
        finally:
            tracemalloc.stop()
        shutil.rmtree(folder)
