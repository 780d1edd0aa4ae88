"""Stock Hugging Face decoders train as any model does; a document in a packed row is computed as if it were alone."""

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.referee.verify.observed import Record
from plait.referee.verify.reference import run_reference
from plait.run.commands.main import main
from plait.run.config.settings import VerifyConfig
from plait.run.data.batches import IGNORED
from plait.run.data.packing import PackedBatches
from plait.run.job.job import make_job
from plait.run.models import gpt, hf
from plait.run.models.documents import attention_mask, positions
from plait.step import Engine, empty_parameters
from plait.table.additions import additions
from plait.table.cells import find_strategy
from plait.table.mesh import Mesh
from plait.zero.state.init import materialise
from plait.zero.wrap import automatic, wrap

KINDS = ("llama", "qwen2")
TINY = VerifyConfig(
    layers=3, width=32, heads=4, kv_heads=2, dropout=0.1, ragged=True, batch=13, length=16, steps=3, clip=0.3
)

TOKENS_BT = torch.arange(32).view(2, 16) * 7 % 256


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("transformers")


def sizes(kind: str, **changes: object) -> hf.HFConfig:
    config = replace(TINY, model=kind).task.sizes
    assert isinstance(config, hf.HFConfig)
    return replace(config, **changes)


def empty(kind: str, **changes: object) -> nn.Module:
    with empty_parameters():
        return hf.build(sizes(kind, **changes))


def single(kind: str, seed: int = 0, **changes: object) -> nn.Module:
    model = empty(kind, **changes)
    materialise(model, seed, torch.device("cpu"))
    return model


def alone(kind: str, **changes: object) -> Record:
    config = replace(TINY, model=kind, **changes)
    order = additions(find_strategy(config.layout.strategy))
    return run_reference(
        make_job(config.task, config.dtypes), Mesh(), 1, order, config.task.samples.steps, clip=config.task.update.clip
    )


@pytest.mark.parametrize("kind", KINDS)
def test_attention_drops_and_the_seed_decides(kind: str) -> None:
    first, again = alone(kind), alone(kind)
    assert first.losses == again.losses and all(map(math.isfinite, first.losses))
    assert first.losses[-1] < first.losses[0]
    assert alone(kind, dropout=0.0).losses[0] != first.losses[0]
    assert alone(kind, seed=1).losses[0] != first.losses[0]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_stock_model(kind: str, tie: bool) -> None:
    """Same names, same weights, same numbers: from one process, and from ranks that each hold a third."""
    weights = single(kind, tie=tie).state_dict()
    stock = hf.build(sizes(kind, tie=tie)).eval()
    stock.load_state_dict(weights, strict=True)
    expected_BTV = stock(input_ids=TOKENS_BT).logits

    def body(comm: Comm) -> Tensor:
        model = empty(kind, tie=tie).eval()
        Engine(model, comm, strategy="zero3")
        with torch.no_grad():
            logits_BTV: Tensor = model(input_ids=TOKENS_BT, use_cache=False).logits
        return logits_BTV

    assert all(torch.equal(logits_BTV, expected_BTV) for logits_BTV in run(Mesh(shard=3), body))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_are_the_models_own_and_no_layout_changes_them(kind: str, tie: bool) -> None:
    weights = single(kind, tie=tie).state_dict()
    for name, value in weights.items():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        elif name.endswith("bias"):
            assert torch.equal(value, torch.zeros_like(value)), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]) == tie
    other = single(kind, seed=1, tie=tie).state_dict()
    assert not torch.equal(other["lm_head.weight"], weights["lm_head.weight"])

    def body(comm: Comm) -> dict[str, Tensor]:
        return Engine(empty(kind, tie=tie), comm, strategy="zero3").full_state_dict()

    for state in run(Mesh.parse("replica=2 shard=2"), body):
        assert all(torch.equal(state[name], value) for name, value in weights.items())


@pytest.mark.parametrize("kind", KINDS)
def test_units(kind: str) -> None:
    layers = [f"model.layers.{i}" for i in range(3)]
    assert list(automatic(empty(kind))) == ["", "model.embed_tokens", *layers, "lm_head"]
    root, *_, head = wrap(empty(kind, tie=True))
    assert [name for name, _ in root.parameters] == ["model.norm.weight"]
    assert (head.parameters, head.borrows) == ((), ("model.embed_tokens",))


def test_ranks_in_threads_build_at_the_same_time_and_leave_torch_as_it_was() -> None:
    run(Mesh(shard=4), lambda comm: empty("llama"))
    assert nn.init.normal_.__module__ == "torch.nn.init"


def test_in_bf16_the_rotary_angles_stay_exact() -> None:
    model = make_job(replace(TINY, model="llama", dtype="bf16").task).build()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, empty("llama").model.rotary_emb.inv_freq)
    assert all(map(math.isfinite, alone("llama", dtype="bf16").losses))


def test_without_transformers_it_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    assert main(["verify", "--model", "llama"]) == 2
    shown = capsys.readouterr().err
    assert "pip install 'plait[hf]'" in shown and shown.count("\n") == 1
    with pytest.raises(ValueError, match="transformers, which is not installed"):
        hf.build(hf.HFConfig())


def test_plait_comes_without_transformers() -> None:
    code = "import sys, plait.run.commands.main, plait.run.models.hf; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


SIZES = {"vocabulary": 256, "num_layers": 3, "width": 24, "num_heads": 4, "num_kv_heads": 2, "max_length": 13}
DOCUMENTS = [
    bytes((7 + i * i + j * (2 * i + 3)) % 256 for j in range(size)) for i, size in enumerate((14, 3, 6, 30, 2))
]


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "gpt":
        return gpt.GPT(gpt.GPTConfig(**SIZES, dropout=0.0)).double()
    pytest.importorskip("transformers")
    return hf.build(hf.HFConfig(**SIZES, dropout=0.0, kind=kind)).double()  # type: ignore[arg-type]


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The logits that the loss of a batch is computed from."""
    seen: list[Tensor] = []
    head = model.head if isinstance(model, gpt.GPT) else model.lm_head
    handle = head.register_forward_hook(lambda module, args, output: seen.append(output))
    loss_of(model, batch)
    handle.remove()
    return seen[0]


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return (gpt if isinstance(model, gpt.GPT) else hf).loss_sum(model, batch)


def documents_alone(batch: Mapping[str, Tensor]) -> list[tuple[int, slice, dict[str, Tensor]]]:
    """(row, place, batch of one) of every document in a packed batch, without what is left over."""
    found = []
    for row, documents in enumerate(batch["documents"]):
        for number in range(int(documents.max()) + 1):
            (place,) = torch.nonzero(documents == number, as_tuple=True)
            here = slice(int(place[0]), int(place[-1]) + 1)
            one = {name: batch[name][row : row + 1, here] for name in ("tokens", "targets")}
            if bool((one["targets"] != IGNORED).any()):
                found.append((row, here, one))
    return found


@pytest.fixture
def batch() -> dict[str, Tensor]:
    source = PackedBatches(DOCUMENTS, 13, seed=0)
    found = source.entries(0, source.num_samples)
    assert [int(row.max()) for row in found["documents"]].count(0) < source.num_samples, "no row has two documents"
    return found


def test_the_drawing_of_the_module() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0], [5, 4, 4, 4, 5, 5]])
    assert positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 0, 1]]
    mask = attention_mask(documents)
    assert mask.shape == (3, 1, 6, 6) and mask.dtype == torch.bool
    drawn = ["1.....", "11....", "111...", "...1..", "...11.", ".....1"]
    assert ["".join("1" if seen else "." for seen in line) for line in mask[0, 0].tolist()] == drawn
    assert torch.equal(mask[1, 0], torch.ones(6, 6).tril().bool())
    assert positions(documents[:0]).shape == (0, 6) and attention_mask(documents[:0]).shape == (0, 1, 6, 6)


@pytest.mark.parametrize("kind", ["gpt", "llama", "qwen2"])
def test_a_packed_document_is_as_if_alone(kind: str, batch: dict[str, Tensor]) -> None:
    model = model_of(kind)
    packed = logits_of(model, batch)
    documents = documents_alone(batch)
    assert len(documents) == 7, "5 documents, one of them in 3 pieces"
    for row, here, one in documents:
        torch.testing.assert_close(packed[row, here][None], logits_of(model, one), rtol=1e-12, atol=1e-13)
    loss_of(model, batch).backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sum(loss_of(model, one) for _, _, one in documents).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_blank_sample_has_no_loss(kind: str) -> None:
    model = model_of(kind)
    source = PackedBatches(DOCUMENTS, 13, seed=0)
    loss = loss_of(model, {name: tensor[None] for name, tensor in source.blank().items()})
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
