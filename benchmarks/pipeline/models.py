"""What is trained: the decoder of the data-parallel benchmark as a chain of links, one tensor in and one out.

    tokens_BT ── embedding ── blocks.0 ── ... ── blocks.7 ── norm ── head ── logits_BTV
                 link 0       link 1             link 8      link 9  link 10

A stage is a run of links, so the sizes of the stages say everything: (5, 6) is the embedding and four blocks, then
four blocks, norm and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from harness.models import GPT, Batch, Block, BlockBuild, Workload, decoder
from torch import Tensor, nn

NUM_MICROBATCHES = 8
"""Of the global batch of 8 samples, which all benchmarks train on: one sample each."""


class Link(nn.Module):
    """A block and the tables of its rotary embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block: nn.Module, cos_TD: Tensor, sin_TD: Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("cos", cos_TD, persistent=False)
        self.register_buffer("sin", sin_TD, persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.block(x_BTC, self.cos, self.sin)
        return out


class Chain(GPT):
    """The decoder, from the same bits, cut in links."""

    def __init__(self, block: BlockBuild, num_layers: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__(block, num_layers, width, length, vocabulary)
        self.blocks = nn.ModuleList(Link(one, self.cos, self.sin) for one in self.blocks)
        del self.cos, self.sin  # the links have them

    def pipeline_links(self) -> list[str]:
        """The names of the links, in order: what plait cuts."""
        return ["embedding", *(f"blocks.{i}" for i in range(len(self.blocks))), "norm", "head"]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = tokens_BT
        for link in links(self):
            x = link(x)
        return x


def links(model: nn.Module) -> list[nn.Module]:
    """The links of a ``Chain``."""
    assert isinstance(model, Chain)
    return [model.get_submodule(name) for name in model.pipeline_links()]


def link_names(workload: Workload) -> list[str]:
    """How the links of a workload's model are called."""
    model = workload.build()
    assert isinstance(model, Chain)
    return model.pipeline_links()


def stages(model: nn.Module, sizes: Sequence[int]) -> list[nn.Sequential]:
    """The model cut in stages of so many links each; torch's stages, made by hand."""
    ends = accumulate(sizes, initial=0)
    return [nn.Sequential(*links(model)[start:end]) for start, end in pairwise(ends)]


def microbatches(batch: Batch) -> list[Batch]:
    """The batch in microbatches, of equally many samples."""
    inputs, targets = (torch.tensor_split(t, NUM_MICROBATCHES) for t in batch)
    return list(zip(inputs, targets, strict=True))


WORKLOADS = {w.name: w for w in (decoder(Block, 256, 2, model=Chain), decoder(Block, 512, 2, model=Chain))}
