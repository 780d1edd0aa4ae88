"""Predicted activation bytes against what autograd saves: storages counted once, parameters and buffers left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.comm import Comm, run
from plait.predict.activations import DecoderSizes, block, decoder
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count
from plait.step import Engine, empty_parameters
from plait.table.mesh import Mesh

SIZES = DecoderSizes(batch=3, length=7, width=24, heads=6, kv_heads=2, hidden=40, vocabulary=11)
MODES = (None, "selective", "full")


@dataclass
class Saved:
    """Tensors that autograd saved, each storage once."""

    own: set[int]
    alive: list[Tensor] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.alive}
        return sum(size for at, size in storages.items() if at not in self.own)


@contextmanager
def saving(own: Iterable[Tensor]) -> Iterator[Saved]:
    seen = Saved({t.untyped_storage().data_ptr() for t in own})

    def pack(tensor: Tensor) -> Tensor:
        seen.alive.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


def tokens_of(s: DecoderSizes) -> Tensor:
    return torch.randint(0, s.vocabulary, (s.batch, s.length), generator=torch.Generator().manual_seed(1))


def measured(
    s: DecoderSizes, layers: int, recompute: str | None, dtype: torch.dtype, sequence: bool = False
) -> list[int]:
    """Bytes of one forward and backward of the project's decoder, under the engine, on every rank."""
    heads: dict[str, Any] = {"num_heads": s.heads, "num_kv_heads": s.kv_heads, "dropout": 0.1 * s.dropout}
    sizes = GPTConfig(s.vocabulary, layers, width=s.width, hidden=s.hidden, max_length=s.length + 2, **heads)
    tokens = tokens_of(s)
    batch = {"tokens": tokens, "targets": tokens.roll(1, 1)}

    def body(comm: Comm) -> int:
        with empty_parameters():
            model = GPT(sizes)
        for p in model.parameters():
            p.data = p.data.to(dtype)
        engine = Engine(
            model,
            comm,
            strategy="ddp",
            loss_fn=loss_sum,
            count_fn=token_count,
            listener=lambda event, engine: None,  # looks at gradients, makes no step
            recompute=recompute,  # type: ignore[arg-type]
            sequence_parallel=sequence,
        )
        own = [*model.parameters(), *model.buffers()]
        axis = engine.placed.time_axis
        with saving(own) as seen:
            engine.step([batch])
        masks = [] if axis is None or axis.masks is None else axis.masks
        assert axis is None or recompute == "full" or sum(m.nbytes for m in masks) == s.masks
        seen.own |= {m.untyped_storage().data_ptr() for m in masks}
        return seen.bytes

    return run(Mesh(shard=s.context, tensor=s.ways, context=s.context), body, deadline=20)


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("own", [{"kv_heads": 2}, {"kv_heads": 6}, {"length": 12, "context": 3}], ids=str)
def test_the_decoder_keeps_what_is_predicted(
    own: dict[str, int], dtype: torch.dtype, dropout: bool, recompute: str | None
) -> None:
    """Masks that blocks share, where time is cut, are counted beside the blocks."""
    sizes = replace(SIZES, itemsize=dtype.itemsize, dropout=dropout, **own)
    links = ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert measured(sizes, 2, recompute, dtype) == [decoder(sizes, links, recompute)] * sizes.context


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_cut_over_tensor_ranks_keeps_what_is_predicted(
    sequence: bool, dropout: bool, recompute: str | None
) -> None:
    """One block more costs as much; the rank with most steps of time (4 of 7) is the first."""
    sizes = replace(SIZES, itemsize=8, dropout=dropout, ways=2, sequence=sequence)
    less, more = (measured(sizes, layers, recompute, torch.float64, sequence)[0] for layers in (1, 2))
    assert more - less == sum(kept.bytes for kept in block(sizes, recompute))


@pytest.mark.parametrize("sequence", [False, True])
def test_what_tensor_ranks_keep_beside_the_blocks(sequence: bool) -> None:
    """The places of a rank's own targets are data."""
    sizes = replace(SIZES, itemsize=8, ways=2, sequence=sequence)
    links = ["embed", "blocks.0", "norm", "head"]
    own = 16 * int((tokens_of(sizes) < 6).sum())  # 6 of 11 classes on the first rank
    assert measured(sizes, 1, None, torch.float64, sequence)[0] == decoder(sizes, links) + own
