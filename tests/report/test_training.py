"""Lines for a pipe, and for a terminal a bar below them."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from plait.run.report.training import ProgressView


def line(step: int, **more: Any) -> dict[str, Any]:
    made = {"step": step, "loss": 5 / step, "tokens": 100 * step, "seconds": 2.0, "grad_norm": None}
    return made | {"peak_memory": 3 << 20} | more


def console_of(terminal: bool) -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, force_terminal=terminal, width=150, highlight=False, color_system=None)


def shown(terminal: bool, steps: int, **more: Any) -> str:
    file, console = console_of(terminal)
    with ProgressView(console, 1, steps, 3, "tokens") as view:
        for step in range(1, steps + 1):
            view.show(line(step, **(more if step == steps else {})))
            if view._bar is not None:
                view._bar.refresh()
    return file.getvalue()


def test_a_pipe_gets_the_first_the_last_and_every_third_line() -> None:
    text = shown(False, 8)
    assert [int(step) for step in re.findall(r"^step (\d)/8  loss", text, re.MULTILINE)] == [1, 3, 6, 8]
    assert "\x1b" not in text
    assert text.count("\n") == 4
    assert "loss   1.6667        150 tokens/s     10 s left" in text  # 300 tokens in 2 s, five steps to go


def test_an_evaluation_has_a_line_of_its_own() -> None:
    assert "step 2: held-out loss 1.2500 (1,234 tokens)\n" in shown(False, 2, eval_loss=1.25, eval_tokens=1234)


def test_a_terminal_sees_speed_memory_and_time_left() -> None:
    text = shown(True, 8)
    assert re.search(r"7/8 +loss 0\.7143 +350 tokens/s +3\.00 MiB +0:00:02 left", text)
    assert [int(step) for step in re.findall(r"step (\d)/8  loss", text)] == [1, 3, 6, 8]


def test_the_bar_is_at_the_step_of_the_line_above_it() -> None:
    file, console = console_of(terminal=True)
    with ProgressView(console, 1, 9, 1, "tokens") as view:
        for step in (1, 2, 3):
            view.show(line(step))
            after = file.getvalue().rpartition(f"step {step}/9  loss")[2]
            assert re.search(rf"\b{step}/9 ", after)


def test_a_run_that_goes_on_begins_with_its_own_first_step() -> None:
    file, console = console_of(terminal=False)
    with ProgressView(console, 5, 7, 100, "tokens") as view:
        for step in (5, 6, 7):
            view.show(line(step))
    assert re.findall(r"step (\d)/7", file.getvalue()) == ["5", "7"]


def test_the_terminal_is_given_back_when_a_step_raises() -> None:
    file, console = console_of(terminal=True)
    with pytest.raises(RuntimeError, match="in the step"), ProgressView(console, 1, 3, 1, "tokens"):
        raise RuntimeError("in the step")
    assert file.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again
