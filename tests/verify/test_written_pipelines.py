"""Schedules written by hand, in files; those that verify refuses and train accepts."""

from pathlib import Path

import pytest
from verify_cases import CHAIN, DECODER, verify

from plait.run.commands.main import main
from plait.run.config.settings import VerifyConfig

LATE = """
0F0 0F1 0F2 0B0 0B2 0B1
1F0 1F1 1B0 1F2 1B2 1B1
"""
"""Adds the gradient of microbatch 2 before that of microbatch 1 (the first two would commute)."""
LATE_WEIGHTS = """
0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W2 0W1
1F0 1F1 1B0 1B1 1F2 1B2
"""
"""The same, of the weight parts alone."""
SIZES = {"layers": 6, "width": 24, "heads": 2, "kv-heads": 1, "batch": 13, "length": 7, "steps": 2, "clip": 0.3}


def flags(**words: object) -> list[str]:
    return [f"--{name}={value}" for name, value in {**SIZES, "bucket": 0, **words}.items()]


@pytest.mark.parametrize("command", [["verify"], ["train", "--verify", "--world=thread"]], ids=" ".join)
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_verify_refuses_another_order_of_additions(
    split: bool, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the grid, and the place marked; no rank starts."""
    file = tmp_path / "late.txt"
    file.write_text(LATE_WEIGHTS if split else LATE)
    assert main([*command, *flags(mesh="pipe=2", schedule=file, microbatches=3)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err
    assert "1 adds its gradient after that of microbatch 2: out of order" in shown.err
    assert "rank 0 |" in shown.err and "rank 1 |" in shown.err
    assert (">0W1<" if split else ">0B1<") in shown.err


@pytest.mark.parametrize("config", [CHAIN, DECODER], ids=["mlp", "gpt"])
def test_another_order_of_additions_agrees_to_rounding(config: VerifyConfig, tmp_path: Path) -> None:
    file = tmp_path / "late.txt"
    file.write_text(LATE)
    result = verify(config, mesh="pipe=2 shard=2", schedule=str(file), microbatches=3, strategy="zero3")
    assert all(finding.equal for finding in result.verdict.plain) and not result.verdict.ledger
    assert "tree: gradient" in result.different(), "the order does not matter, and the refusal has no reason"
    worst = max(f.max_rel for f in result.verdict.tree if f.kind == "gradient" and "step 1" in f.name)
    assert 0 < worst < 1e-5


def test_training_takes_any_order_of_additions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "late.txt"
    file.write_text(LATE)
    assert main(["train", *flags(mesh="pipe=2", schedule=file, microbatches=3, world="thread")]) == 0
    assert "mesh pipe=2: 2 ranks" in capsys.readouterr().out
