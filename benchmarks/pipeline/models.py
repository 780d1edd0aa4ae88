"""The trained model: the decoder of the data-parallel benchmark as a chain of links, one tensor in and one out.

    tokens_BT ── embedding ── halves.0 ── halves.1 ── ... ── halves.15 ── norm ── head ── logits_BTV
                 link 0       attention   MLP                MLP          link 17  link 18

A stage is a run of links, so the sizes of the stages are enough: (9, 10) is the embedding and four blocks, then
four blocks, norm and head.  Half a block is a link, because nine equal pieces (eight blocks, and a head that costs as
much as one) do not divide well over two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from harness.models import GPT, Batch, Block, BlockBuild, Workload, attention, decoder
from torch import Tensor, nn

NUM_MICROBATCHES = 8
"""The number of microbatches in the global batch of 8 samples, which all benchmarks train on: one sample each."""


class AttentionHalf(nn.Module):
    """x + attention(norm(x)) of a block, and the tables of its rotary embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block: Block, cos_TD: Tensor, sin_TD: Tensor) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.num_heads = block.norm1, block.qkv, block.out, block.num_heads
        self.register_buffer("cos", cos_TD, persistent=False)
        self.register_buffer("sin", sin_TD, persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        mixed: Tensor = self.out(attention(self.qkv(self.norm(x_BTC)), self.num_heads, self.cos, self.sin))
        return x_BTC + mixed


class MLPHalf(nn.Module):
    """x + mlp(norm(x)) of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.up, self.down = block.norm2, block.up, block.down

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x_BTC))))
        return x_BTC + hidden


class Chain(GPT):
    """The decoder, from the same bits, cut in links."""

    def __init__(self, block: BlockBuild, num_layers: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__(block, num_layers, width, length, vocabulary)
        halves: list[nn.Module] = []
        for one in self.blocks:
            assert isinstance(one, Block)
            halves += [AttentionHalf(one, self.cos, self.sin), MLPHalf(one)]
        self.halves = nn.ModuleList(halves)
        del self.blocks, self.cos, self.sin  # the halves have them

    def pipeline_blocks(self) -> list[str]:
        """The names of the links, in order: what plait cuts."""
        return ["embedding", *(f"halves.{i}" for i in range(len(self.halves))), "norm", "head"]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = tokens_BT
        for link in links(self):
            x = link(x)
        return x


def links(model: nn.Module) -> list[nn.Module]:
    """The links of a ``Chain``."""
    assert isinstance(model, Chain)
    return [model.get_submodule(name) for name in model.pipeline_blocks()]


def link_names(workload: Workload) -> list[str]:
    """The names of the links of a workload's model."""
    model = workload.build()
    assert isinstance(model, Chain)
    return model.pipeline_blocks()


def stages(model: nn.Module, sizes: Sequence[int]) -> list[nn.Sequential]:
    """The model cut in stages of so many links each; torch's stages, made by hand."""
    ends = accumulate(sizes, initial=0)
    return [nn.Sequential(*links(model)[start:end]) for start, end in pairwise(ends)]


def microbatches(batch: Batch) -> list[Batch]:
    """The batch in microbatches, of equally many samples."""
    inputs, targets = (torch.tensor_split(t, NUM_MICROBATCHES) for t in batch)
    return list(zip(inputs, targets, strict=True))


WORKLOADS = {w.name: w for w in (decoder(Block, 256, 2, model=Chain), decoder(Block, 512, 2, model=Chain))}
