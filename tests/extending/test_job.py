"""A model family and an optimizer from outside, from the command's flags to a verdict."""

import sys
from pathlib import Path

import pytest
from guide import code_of, run_section

from plait.commands.main import main

LAYOUTS = {
    "data": ["--mesh", "replica=2 shard=2", "--strategy", "hsdp", "--microbatches", "2"],
    "pipe": ["--mesh", "pipe=2 shard=2", "--strategy", "zero3", "--schedule", "zb_h1", "--microbatches", "3"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_family_is_bitwise_the_run_of_one_process(layout: str) -> None:
    run_section("A model family")
    sizes = ["--model", "bigram", "--width", "16", "--layers", "2", "--steps", "2"]
    assert main(["verify", *sizes, *LAYOUTS[layout]]) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_is_bitwise_the_run_of_one_process(layout: str) -> None:
    run_section("An optimizer")
    assert main(["verify", "--optimizer", "rmsprop", "--model", "mlp", "--layers", "4", *LAYOUTS[layout]]) == 0


def test_a_family_trains_and_its_run_can_be_repeated(tmp_path: Path) -> None:
    run_section("A model family")
    run_section("An optimizer")
    rows = ["--model", "bigram", "--optimizer", "rmsprop", "--width", "16", "--steps", "2", "--length", "16"]
    first, second = tmp_path / "first", tmp_path / "second"
    machine = ["--mesh", "shard=2", "--world", "thread"]
    assert main(["train", *rows, *machine, "--verify", "--out", str(first)]) == 0
    assert main(["train", "--config", str(first / "config.toml"), "--out", str(second)]) == 0
    assert (first / "metrics.jsonl").exists() and (second / "metrics.jsonl").exists()


def test_before_they_are_added_they_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for row, said in ((["--model", "bigram"], "unknown model"), (["--optimizer", "rmsprop"], "unknown optimizer")):
        assert main(["verify", *row]) == 2
        assert said in capsys.readouterr().err


def test_a_script_with_rows_of_its_own_is_a_command(tmp_path: Path, start) -> None:
    lines = [code_of("A model family"), code_of("An optimizer"), "import sys", "from plait.commands.main import main"]
    script = tmp_path / "mine.py"
    script.write_text("\n".join([*lines, "sys.exit(main())"]))
    flags = ["--model", "bigram", "--optimizer", "rmsprop", "--width", "16", "--steps", "1", "--mesh", "shard=2"]
    elastic = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for launcher, world in ((elastic, "process"), ([], "thread")):
        process = start(sys.executable, *launcher, str(script), "verify", *flags, "--world", world)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0 and "verdict: bitwise" in out, out + err
