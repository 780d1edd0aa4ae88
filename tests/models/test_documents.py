"""A document in a packed row is computed as if it were alone: logits and gradients."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from plait.run.data.batches import IGNORED
from plait.run.data.packing import PackedBatches
from plait.run.models import gpt, hf
from plait.run.models.documents import attention_mask, positions

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


def alone(batch: Mapping[str, Tensor]) -> list[tuple[int, slice, dict[str, Tensor]]]:
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
    documents = alone(batch)
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
