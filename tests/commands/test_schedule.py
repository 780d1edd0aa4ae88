"""``plait schedule`` as its user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.run.commands.main import main
from plait.schedule.orders import ORDERS

SHOWN = """\
rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- F6 B3 -- F7 B4 -- .  B5 -- .  B6 -- .  B7 --
rank 1 | .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- F6 B4 -- F7 B5 -- .  B6 -- .  B7 -- .  .
rank 2 | .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- F6 B5 -- F7 B6 -- .  B7 -- .  .  .  .
rank 3 | .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- F6 B6 -- F7 B7 -- .  .  .  .  .  .
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["schedule", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_show_prints_the_grid_the_idle_share_and_the_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    shown = say(capsys, "show", "1f1b", "--stages", "4", "--microbatches", "8")
    assert shown.startswith(SHOWN)
    words = [line.split() for line in shown.splitlines()]
    assert ["0", "0", "24", "9", "9", "0.2727", "4", "4"] in words
    assert ["3", "3", "24", "0", "0", "0.2727", "1", "1"] in words
    assert "time 33; idle share of rank 0 from its first pass to its last 0.2727 (formula 0.2727)" in shown


@pytest.mark.parametrize("order", ORDERS)
def test_text_is_what_check_show_and_draw_read(order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "mine.txt", tmp_path / "mine.svg"
    for flags in ([], ["--messages", "--strategy", "zero3"]):
        file.write_text(say(capsys, "text", order, "--stages", "5", "--microbatches", "3", *flags))
        proved = say(capsys, "check", str(file), "--in-order")
        assert (
            proved.startswith("proved: 5 stages on ") and "3 microbatches\ngradients are added in the order" in proved
        )
    from_file, from_name = (
        say(capsys, "show", *words) for words in ([str(file)], [order, "--stages", "5", "--microbatches", "3"])
    )
    assert from_file.split("\n\n")[0].splitlines()[0] == from_name.splitlines()[0]
    assert say(capsys, "draw", str(file), "--out", str(picture)) == f"written: {picture}\n"
    assert picture.read_text().startswith("<svg")


def test_check_names_the_mistake_and_marks_its_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    assert main(["schedule", "check", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "plait: error: deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0\n"
        "rank 0 |  0F0  >0B0<  0F1   0B1\n"
        "rank 1 |  1F0  >1F1<  1B0   1B1\n"
    )
    assert main(["schedule", "draw", str(file), "--out", str(tmp_path / "no.svg")]) == 2
    assert not (tmp_path / "no.svg").exists()


def test_check_says_when_gradients_are_added_in_another_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0F1 0B1 0B0\n")
    assert "NOT in the order of microbatches" in say(capsys, "check", str(file))
    assert main(["schedule", "check", str(file), "--in-order"]) == 2
    assert ">0B0<" in capsys.readouterr().err


def test_costs_reach_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("show", "1f1b", "--stages", "2", "--microbatches", "1")
    assert "time 6;" in say(capsys, *words)
    assert "time 15;" in say(capsys, *words, "--forward", "2", "--input", "3", "--weight", "2.5")
    late = say(capsys, *words, "--latency", "0.5")
    assert "time 7;" in late and "(no closed form here)" in late
    assert "no closed form here" in say(capsys, "show", "interleaved", "--stages", "4", "--microbatches", "3")
    assert "2, 4" in say(capsys, "show", "interleaved", "--stages", "6", "--chunks", "3").replace("0, 2, 4", "2, 4")


def test_of_a_huge_pipeline_the_closed_forms_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = say(capsys, "show", "1f1b", "--stages", "4096", "--microbatches", "4096")
    assert "4096 stages x 4096 microbatches: the closed forms alone" in shown
    assert f"idle share of rank 0: {4095 / 8191:.6f}; peak activations: 4096" in shown
    assert "none here" in say(capsys, "show", "interleaved", "--stages", "4096", "--microbatches", "4097")


def test_a_file_has_its_own_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0B0\n")
    assert main(["schedule", "show", str(file), "--stages", "4"]) == 2
    assert "says it: leave it out" in capsys.readouterr().err
    file.write_text("0F0 0Q0\n")
    assert main(["schedule", "check", str(file)]) == 2
    assert "cannot read the action '0Q0'" in capsys.readouterr().err
