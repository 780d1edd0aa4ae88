"""The trained models: three plain PyTorch models whose layers are called ``blocks``."""

from __future__ import annotations

from harness.models import Block, decoder, mlp

WORKLOADS = {w.name: w for w in (mlp("mlp4", 4, 20), mlp("mlp16", 16, 6), decoder(Block, 256, 2))}
TINY = decoder(Block, 64, 1, num_layers=1, length=8, vocabulary=16)
"""Trained once before memory is measured: what an engine imports lazily is not counted as its memory."""
