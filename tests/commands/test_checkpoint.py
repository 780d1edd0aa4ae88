"""``plait checkpoint`` as its user sees it: output, exit codes, one line for each mistake."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.checkpoint import stored as storing
from plait.checkpoint.manifest import signed
from plait.checkpoint.stored import Checkpoint, Stored
from plait.comm import Comm, run
from plait.run.commands.main import main
from plait.run.formats.dcp import write_checkpoint
from plait.step import Engine
from plait.table.mesh import Mesh
from plait.table.region import Region

NASTY = "[red]\x1b[2J\x07a\u202eb\n:smile:"


class Small(nn.Sequential):
    """Two linears, a scalar, a parameter of no element."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 23), nn.Linear(23, 5))
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x)) * self.scale + self.none.sum()


def save_two(path: Path, lr: float = 0.03) -> Path:
    """Checkpoints of steps 1 and 2, of three ranks, with an average and a name that is not nice."""

    def body(comm: Comm) -> None:
        model = Small()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-1, number / 9, parameter.numel()).view(parameter.shape))
        engine = Engine(model, comm, strategy="zero3", optimizer=torch.optim.AdamW(model.parameters(), lr=lr))
        ema = plait.EMA(engine, 0.5)
        for _ in range(2):
            engine.backward(engine.model(torch.ones(2, 5)).square().sum(), 2)
            assert engine.optimizer is not None
            engine.optimizer.step()
            ema.update()
            extra = {NASTY: [1, 2.5, ("x", None)], "order": torch.arange(4), "rate": torch.tensor(0.1)}
            plait.save(path, engine, ema=ema, extra=extra)

    run(Mesh(shard=3), body, deadline=30)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two(tmp_path_factory.mktemp("saved") / "run")


def call(*words: str | Path) -> int:
    return main(["checkpoint", *map(str, words)])


def test_show_says_what_there_is(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", saved) == 0
    text = capsys.readouterr().out
    assert "step 2, 3 files" in text and "seed: 0; extra: '[red]\\x1b[2J" in text and "'order', 'rate'" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "model/0.weight float32 23 x 5 4" in rows and "optimizer/exp_avg_sq/0.weight float32 23 x 5 4" in rows
    assert call("show", saved / "step-000001") == 0 and "step 1, 3 files" in capsys.readouterr().out


def test_nothing_that_a_terminal_obeys_is_printed(
    saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = Checkpoint.find(saved)
    own = {name: tensor.read() for name, tensor in whole.tensors.items()}
    tensors = {f"{NASTY}/{name}": tensor for name, tensor in own.items()} | own
    write_checkpoint(tmp_path / "nasty", 2, whole.manifest.values, tensors)
    nasty = tmp_path / "nasty"
    for words in (("show", nasty), ("diff", nasty, saved), ("show", tmp_path / NASTY), ("verify", nasty)):
        if words[0] == "verify":
            (nasty / "step-000002" / "rank-00000.safetensors").write_bytes(b"")
        call(*words)
        shown = capsys.readouterr()
        both = shown.out + shown.err
        assert all(one.isprintable() or one == "\n" for one in both), words
        if words[1] != tmp_path / NASTY:  # such a path is refused
            assert "red]" in both and "smile:" in both, "no markup and no emoji either"


def test_verify_names_each_damaged_file_and_its_tensors(
    saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = shutil.copytree(saved, tmp_path / "run/checkpoints")  # as plait train keeps them
    for path in (copy, copy.parent):
        assert call("verify", path, "--all") == 0
        assert capsys.readouterr().out.count(": whole, ") == 2
    newest = copy / "step-000002"
    data = bytearray((newest / "rank-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "rank-00001.safetensors").write_bytes(data)
    os.truncate(newest / "rank-00002.safetensors", 9)
    assert call("verify", copy) == 1
    text = capsys.readouterr().out
    assert "damaged, 2 files" in text and "has 9 bytes" in text
    assert "its digest (blake3 of 16 MiB parts) differs" in text
    assert "pieces of 12 tensors" in text and "model/" in text and "rank-00000" not in text
    assert call("verify", copy / "step-000001") == 0
    (newest / "manifest.json").write_text("{}")
    assert call("verify", copy, "--all") == 1
    text = capsys.readouterr().out
    assert "step-000001: whole" in text and "is no manifest that plait wrote" in text
    assert call("verify", tmp_path) == 2


def test_diff_finds_every_element_and_value(saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("diff", saved, saved / "step-000002") == 0
    assert "the same, " in capsys.readouterr().out
    whole = Checkpoint.find(saved)
    weight = whole.tensors["model/0.weight"].read(((0, 23), (0, 5)))
    weight[3, 2] += 0.25
    weight[22, 4] = float("nan")
    weight[0, 0] = -weight[0, 0]
    tensors = {name: tensor.read() for name, tensor in whole.tensors.items() if name != "model/1.bias"}
    tensors["model/0.weight"] = weight
    tensors["ema/scale"] = torch.tensor(1.0, dtype=torch.float64)
    tensors["ema/0.bias"] = torch.ones(22)
    tensors["value/0"] = torch.tensor([0, 1, 5, 3])
    text = json.dumps(whole.manifest.values).replace("0.03", "0.02").replace("2.5", "-0.0")
    write_checkpoint(tmp_path, 2, json.loads(text), tensors)
    assert call("diff", saved, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"{len(lines) - 1} differences: ")
    assert sorted(lines[:-1]) == [
        "ema/0.bias: shape: float32 [23] and float32 [22]",
        "ema/scale: dtype: float32 [] and float64 []",
        "extra.[red]\\x1b[2J\\x07a\\u202eb\\n:smile:[1]: value: 2.5 and -0.0",
        "extra.order: 1 elements of int64 [4], by at most 3",
        "model/0.weight: 3 elements of float32 [23, 5], by at most nan",
        "model/1.bias: missing: float32 [5] and missing",
        "optimizer.param_groups[0].lr: value: 0.03 and 0.02",
    ]


def test_damage_is_not_washed(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(saved, tmp_path / "run")
    (copy / "step-000002" / "rank-00000.safetensors").write_bytes(b"")
    assert call("export-dcp", copy, tmp_path / "again") == 2 and not (tmp_path / "again").exists()
    assert "is neither compared nor converted" in capsys.readouterr().err


def test_a_block_is_in_memory_at_a_time(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    blocks = Stored.blocks

    def few(self: Stored, region: Region, most: int = 100) -> Any:
        for part, block in blocks(self, region, most):
            sizes.append(block.nbytes)
            yield part, block

    monkeypatch.setattr(Stored, "blocks", few)
    assert call("diff", saved, saved / "step-000002") == 0
    assert max(sizes) == 100 and len(sizes) > 30
    assert storing.BLOCK == 1 << 24


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "missing": (("show", "HERE/no"), "there is no checkpoint in"),
    "a pipe": (("show", "HERE/pipe"), "there is no checkpoint in"),
    "half a checkpoint": (("verify", "HERE/step-000009"), "is no whole checkpoint"),
    "a manifest that is a link": (("show", "HERE/linked"), "cannot read the manifest"),
    "a manifest that is a pipe": (("verify", "HERE/piped/step-000001", "--all"), ""),
    "a manifest that is a folder": (("show", "HERE/foldered"), "no plain file"),
    "a long name": (("show", "x" * 300), "File name too long"),
    "no room": (("export-dcp", "RUN", "/proc/nowhere"), "No such file"),
    "export without a source": (("export", "RUN", "HERE/new"), "--source"),
    "export from nowhere": (("export", "RUN", "HERE/new", "--source", "HERE/no"), "no such folder"),
    "no DCP folder": (("import-dcp", "RUN", "HERE/new"), "is not a folder of torch.distributed.checkpoint"),
    "a link for metadata": (("import-dcp", "HERE/dcp", "HERE/new"), "cannot read the metadata"),
    "an output that is there": (("export-dcp", "RUN", "HERE/empty"), "exists already"),
    "a tie of nothing": (
        ("export-dcp", "RUN", "HERE/new", "--tie", "head.weight=no.weight"),
        "has to have 'no.weight'",
    ),
    "half a tie": (("export-dcp", "RUN", "HERE/new", "--tie", "head.weight"), "has to have ''"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("empty", "step-000009", "linked", "piped/step-000001", "foldered/manifest.json", "dcp"):
        (tmp_path / folder).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "piped" / "step-000001" / "manifest.json")
    shutil.copy(saved / "step-000001" / "rank-00000.safetensors", tmp_path / "step-000009")
    (tmp_path / "linked" / "manifest.json").symlink_to(saved / "step-000001" / "manifest.json")
    (tmp_path / "dcp" / ".metadata").symlink_to(saved / "step-000001" / "manifest.json")
    before = sorted(tmp_path.rglob("*"))
    words, says = WRONG[name]
    code = call(*(word.replace("HERE", str(tmp_path)).replace("RUN", str(saved)) for word in words))
    shown = capsys.readouterr()
    if not says:  # a damaged checkpoint is found to be one
        assert code == 1 and "is no plain file" in shown.out
        return
    assert code == 2 and shown.out == "" and says in shown.err
    assert shown.err.startswith("plait: error: ") and shown.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


STEP_ONE = {"number": 1.0, "dtype": "complex64"}
CRAFTED: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "an optimizer that is a number": (("optimizer",), 7),
    "groups that are a number": (("optimizer", "param_groups"), 3),
    "a group that is a number": (("optimizer", "param_groups", 0), 1),
    "parameters of a group that are numbers": (("optimizer", "param_groups", 0, "params"), [1, 2]),
    "state that is a list": (("optimizer", "state", "0.weight"), []),
    "a step that is a list": (("optimizer", "state", "0.weight", "step"), [1]),
    "a step that is a word": (("optimizer", "state", "0.weight", "step"), "one"),
    "a number that is complex": (("optimizer", "state", "0.weight", "step"), STEP_ONE),
    "a run that is a word": (("run",), ".."),
    "steps that are a list": (("run", "step"), [2]),
    "a key that is a tensor": (("extra",), {"dict": [[{"number": 1, "dtype": "int8"}, 1]]}),
    "an average that is a word": (("ema",), "half"),
}


@pytest.mark.parametrize("command", ["show HERE", "export-dcp HERE NEW"])
@pytest.mark.parametrize("name", CRAFTED)
def test_values_that_no_save_writes_are_one_line_though_they_are_signed(
    name: str, command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Path(shutil.copytree(saved / "step-000002", tmp_path / "step-000002"))
    data = json.loads((here / "manifest.json").read_text())
    path, value = CRAFTED[name]
    at: Any = data["values"]
    for word in path[:-1]:
        at = at[word] if isinstance(word, int) else next(one for key, one in at["dict"] if key == word)
    if isinstance(path[-1], int):
        at[path[-1]] = value
    else:
        at["dict"] = [[key, value if key == path[-1] else one] for key, one in at["dict"]]
    (here / "manifest.json").write_text(signed(json.dumps(data)))
    assert call(*command.replace("HERE", str(here)).replace("NEW", str(tmp_path / "new")).split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"plait: error: '{here}': ") and shown.err.count("\n") == 1 and len(shown.err) < 400
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not os.getuid(), reason="root may read everything")
def test_no_permission_is_one_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = shutil.copytree(saved, tmp_path / "run")
    closed.chmod(0)
    assert call("show", closed) == 2
    assert "Permission denied" in capsys.readouterr().err
