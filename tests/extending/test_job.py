"""A model family and an optimizer from outside, from the command's flags to a verdict."""

import sys
from pathlib import Path

import pytest
from guide import code_of, run_section

from plait.run.commands.main import main
from plait.run.config.file import from_toml
from plait.run.config.settings import TrainConfig

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


ROWS = ["--model", "bigram", "--optimizer", "rmsprop", "--width", "16", "--steps", "1", "--mesh", "shard=2"]


def plugin_of(folder: Path, *last: str) -> str:
    """A file with the rows of the guide and these last lines."""
    file = folder / "my_rows.py"
    file.write_text("\n".join([code_of("A model family"), code_of("An optimizer"), *last]))
    return str(file)


def test_a_plugin_has_the_rows_in_every_command_and_in_the_file_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, out = plugin_of(tmp_path), tmp_path / "out"
    with pytest.raises(SystemExit):
        main(["--plugin", mine, "verify", "--help"])
    assert "bigram" in capsys.readouterr().out
    assert main(["train", f"--plugin={mine}", *ROWS, "--world", "thread", "--length", "16", "--out", str(out)]) == 0
    assert from_toml(TrainConfig, str(out / "config.toml")).files.plugin == (mine,)


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("OPTIMIZERS['x'] = nothing", "line 2: NameError: name 'nothing' is not defined"),
        ("def (", "line 2: SyntaxError"),
        ("raise SystemExit(3)", "line 2: SystemExit: 3"),
        ("import sys; sys.exit()", "ended the program"),
        ("import plait; plait.parse_strategy('a: full')", "line 2: ValueError: "),
        (None, "give a file of Python, as in --plugin my_rows.py"),
    ],
)
def test_a_wrong_plugin_is_one_line(
    last: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.py"
    if last is not None:
        file.write_text(f"from plait.run.job.optimizer import OPTIMIZERS\n{last}\n")
    assert main(["--plugin", str(file), "train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("plait: error: plugin ") and says in said and said.count("\n") == 1


def test_processes_run_a_plugin_and_a_script_cannot_lose_its_exit_code(tmp_path: Path, start) -> None:
    mine = plugin_of(tmp_path, "if __name__ == '__main__':", "    from plait.run.commands.main import main; main()")
    for words, code, says in (
        (["-m", "plait", "--plugin", mine, "verify", *ROWS, "--world", "process"], 0, "verdict: bitwise"),
        ([mine, "verify", *ROWS, "--batch", "1"], 2, "plait: error: a batch of 1 samples"),
    ):
        process = start(sys.executable, *words)
        out, err = process.communicate(timeout=100)
        assert process.returncode == code and says in out + err, out + err
