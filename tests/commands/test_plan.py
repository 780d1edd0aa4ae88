"""``plait plan`` and ``plait schedule``: what they print, and what they refuse."""

import json
from pathlib import Path

import pytest

from plait.run.commands.main import main
from plait.run.config.file import from_toml
from plait.run.config.settings import TrainConfig
from plait.run.job.outline import outline
from plait.run.job.own import load_job
from plait.schedule.orders import ORDERS

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Runs a command that ends with this code; returns what it prints on both streams."""
    assert main(["plan", *words]) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_ten_billion_parameters_on_a_24_gb_card(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, 1, "--params", "10B", "--gpus", "1xrtx4090", "--dtype", "fp32")
    assert "10,000,000,000 parameters in fp32 are 40.0 GB, and 160 GB with their gradients and Adam's state" in shown
    assert "of 24.0 GB" in shown and "136 GB over" in shown and "zero3 fits on 7 of these devices" in shown


def test_a_ranked_list_and_the_file_that_train_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    toml, file = tmp_path / "run.toml", tmp_path / "plan.json"
    words = ["--model", f"hf:{folder}", "--hosts", "16", "--gpus", "8xh100", "--batch", "1024", "--length", "8192"]
    shown = said(capsys, 0, *words, "--toml", str(toml), "--json", str(file), "--top", "5", "--write-script", "slurm")
    assert "8,030,261,248 parameters on 16 hosts of 8 x h100; 1,024 samples of 8,192 tokens a step" in shown
    assert "bytes of rank 0, the fullest, of 75.2 GB" in shown and "between hosts" in shown and "loses" in shown
    assert toml.read_text() in shown
    script = (tmp_path / "run.sh").read_text()
    assert script in shown and "--nodes=16" in script and "--ntasks-per-node=8" in script
    assert f"srun python -m plait train --config {toml}" in script
    best, *others = json.loads(file.read_text())["layouts"]
    assert best["fits"] and len(others) == 4
    assert all(best["seconds"]["total"] <= one["seconds"]["total"] for one in others)
    read = from_toml(TrainConfig, str(toml))
    assert str(read.machine.parsed_mesh) == best["mesh"] and read.row.name == best["strategy"]
    assert read.task.network.model == f"hf:{folder}" and read.layout.microbatches == best["microbatches"]
    assert read.pipeline.num_stages == read.machine.parsed_mesh.pipe and read.task.samples.batch == 1024


def test_sizes_by_flags_become_a_model_of_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    words = ["--layers", "6", "--width", "256", "--heads", "8", "--kv-heads", "4", "--vocab", "512", "--gpus", "4xh100"]
    mesh = ["--mesh", "pipe=2 tensor=2", "--batch", "8", "--microbatches", "8", "--schedule", "interleaved"]
    more = ["--chunks", "2", "--length", "128", "--sequence-parallel", "--recompute", "full", "--strategy", "ddp"]
    more.append("--offload")
    assert "1 layouts judged, 1 fit" in said(capsys, 0, *words, *mesh, *more, "--toml", str(toml))
    read = from_toml(TrainConfig, str(toml))
    assert read.task.sizes.num_layers == 6 and read.task.sizes.num_kv_heads == 4
    assert read.pipeline.num_stages == 4 and read.layout.sequence_parallel and read.layout.recompute == "full"
    assert read.layout.offload and read.row.optim.device == "cpu"


def test_train_runs_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "run.toml"
    words = ["--layers", "2", "--width", "64", "--heads", "4", "--vocab", "256", "--gpus", "2xh100", "--batch", "8"]
    said(capsys, 0, *words, "--length", "32", "--mesh", "shard=2", "--microbatches", "2", "--toml", str(toml))
    assert main(["train", "--config", str(toml), "--device", "cpu", "--world", "thread", "--steps", "1"]) == 0
    assert "to the byte" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["", " bf16"])
def test_a_row_of_your_own_is_written_as_train_reads_it(
    dtype: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    toml = tmp_path / "run.toml"
    wide = dtype and " fp32"
    row = f"mine: shard{dtype} | full{dtype} | shard{wide}, pending(replica) | shard/replica{wide}"
    words = ["--layers", "4", "--width", "64", "--heads", "4", "--vocab", "64", "--gpus", "4xh100", "--hosts", "2"]
    said(capsys, 0, *words, "--batch", "8", "--length", "32", "--strategy", row, "--toml", str(toml))
    read = from_toml(TrainConfig, str(toml))
    assert read.row.params.dtype == "bf16" and read.machine.parsed_mesh.replica > 1


def test_what_does_not_fit_is_told_with_the_change_that_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", f"hf:{folder}", "--gpus", "8xa100-40", "--mesh", "shard=8", "--batch", "64"]
    shown = said(capsys, 1, *words, "--microbatches", "4", "--toml", str(folder / "run.toml"))
    assert "run.toml is not written" in shown and "plait train --config" not in shown
    assert not (folder / "run.toml").exists()
    assert "GB over" in shown and "it does not fit: " in shown and "; --microbatches 8 --" not in shown
    assert "--recompute full" in shown
    assert "\nit does not fit: no one or two" in said(capsys, 1, *words[:2], "--gpus", "1xrtx4090", "--mesh", "shard=1")


def test_a_file_that_train_could_not_read_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").rename(folder / "llama.json")
    assert "give a folder with a config.json" in said(capsys, 2, "--model", f"hf:{folder}/llama.json")
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 10**9}))
    line = "config.json, line 1, num_hidden_layers: 1000000000: give a whole number from 1 to 1,000"
    assert line in said(capsys, 2, "--model", f"hf:{folder}")


JOB = """
import torch, plait
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, 8)
    def forward(self, x):
        return self.head(self.first(x).relu())

def job():
    return plait.UserJob(build=Own, loss_fn=lambda model, x: model(x).square().sum(), batches=[torch.ones(16, 4, 32)])

chain = plait.UserJob(build=lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)),
                      loss_fn=lambda model, x: model(x).square().sum(), batches=[torch.ones(16, 4, 32)])
reads = plait.UserJob(build=Own, loss_fn=lambda model, x: model(x).sum() * model(x).sum().item(),
                      batches=[torch.ones(16, 4, 32)])
"""
CPUS = 'preset = "h100"\ndevices = 2\nkind = "cpu"\nworld = "thread"\n'


def test_a_job_of_your_own_is_counted_on_meta_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, result = tmp_path / "own.py", tmp_path / "plan.json"
    file.write_text(JOB)
    (tmp_path / "cpus.toml").write_text(CPUS)
    words = ["--cluster", str(tmp_path / "cpus.toml"), "--dtype", "fp32", "--json", str(result)]
    shown = said(
        capsys, 0, "--job", f"{file}:job", *words, "--strategy", "zero3", "--mesh", "shard=2", "--measure", "1"
    )
    assert "2,632 parameters on 2 x h100; 16 samples a step" in shown and f'job = "{file}:job"' in shown
    run = json.loads(result.read_text())["measured"][0]
    assert run["state"][0] == 2632 * 16 / 2
    for said_and_ran in (run["state"], run["sent"]):  # a unit is padded to whole pieces
        assert said_and_ran[1] == pytest.approx(said_and_ran[0], rel=0.03)
    said(capsys, 0, "--job", f"{file}:chain", *words)
    assert {"pipe=2", "shard=2"} <= {one["mesh"] for one in json.loads(result.read_text())["layouts"]}
    assert "does not run on meta" in said(capsys, 2, "--job", f"{file}:reads", *words)
    assert "batch beside job" in said(capsys, 2, "--job", f"{file}:job", "--batch", "8", *words)


def test_experts_are_counted_by_their_matrices() -> None:
    """A token passes two experts, of two matrices each, and the router."""
    chain, samples = outline(load_job("examples/my_mixture.py:job"))
    assert samples == 16 and chain.links[1].flops == 12 * (2 * 2 * 2 * 16 * 64 + 2 * 16 * 4)
    assert chain.links[1].parameters == 2 * 4 * 16 * 64 + 16 * 4 + 4


def test_a_sequential_is_counted_link_by_link(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(JOB)
    chain, samples = outline(load_job(f"{tmp_path / 'own.py'}:chain"))
    assert samples == 16 and chain.cuts and [one.parameters for one in chain.links] == [2112, 0, 520]
    assert [one.flops for one in chain.links] == [2 * 4 * 32 * 64, 0, 2 * 4 * 64 * 8]
    assert [one.handed for one in chain.links] == [4 * 64, 4 * 64, 4 * 8]
    assert [one.kept for one in chain.links] == [0, 4 * 64, 4 * 8]  # the batch is there anyway; the square of the loss


def test_a_sample_longer_than_the_models_positions_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 8192}))
    words = ("--model", f"hf:{folder}", "--length")
    assert "length 8,193 is beyond the 8,192 positions of the model's config" in said(capsys, 2, *words, "8193")
    said(capsys, 0, *words, "8192")


def test_no_value_of_the_list_is_cut_at_the_screens_edge(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--layers", "4", "--width", "512", "--heads", "8", "--vocab", "1000", "--hosts", "2", "--batch", "64")
    out = said(capsys, 0, *words)
    assert "…" not in out and "tokens/s" in out and "products" in out


SHOWN = """\
rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- F6 B3 -- F7 B4 -- .  B5 -- .  B6 -- .  B7 --
rank 1 | .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- F6 B4 -- F7 B5 -- .  B6 -- .  B7 -- .  .
rank 2 | .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- F6 B5 -- F7 B6 -- .  B7 -- .  .  .  .
rank 3 | .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- F6 B6 -- F7 B7 -- .  .  .  .  .  .
"""


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
    file.write_text(say(capsys, "text", order, "--stages", "5", "--microbatches", "3"))
    proved = say(capsys, "check", str(file))
    assert proved.startswith("proved: 5 stages on ") and "3 microbatches\ngradients are added in the order" in proved
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


def test_an_order_may_have_no_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
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
