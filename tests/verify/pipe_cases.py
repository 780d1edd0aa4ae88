"""Shared by the tests of pipelines: a chain of odd length, a decoder with tied embeddings, the comparisons."""

from __future__ import annotations

from dataclasses import replace

import torch
from verify_cases import GPT, TINY, Verified, verify

from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig

CHAIN = replace(TINY, layers=11, steps=2)
"""11 links: uneven on any number of stages up to 8; 5 elements wide, 13 samples."""
DECODER = replace(GPT, layers=6, steps=2)
"""Embedding, 6 blocks, norm and head: 9 links, of which the first and the last share their weight."""
HEADS = replace(GPT, heads=6, kv_heads=6, length=9, steps=2, dtype="fp64")
"""Six heads for 2 and 3 ranks; 64 hidden features and 256 classes, which 3 ranks share unevenly."""

RUNS: dict[str, Verified] = {}


def runs(config: VerifyConfig, mesh: str, **changes: object) -> Verified:
    """One layout's run, made once for all tests of this file."""
    config = replace(config, mesh=mesh, **changes)
    if repr(config) not in RUNS:
        validate(config)
        RUNS[repr(config)] = verify(config)
    return RUNS[repr(config)]


def is_bitwise(result: Verified, clip: float | None = 0.3) -> None:
    """To the bit, every message as predicted, nothing left out, and clipping came to work."""
    assert result.verdict.word == "bitwise", result.different()
    assert not result.verdict.ledger
    assert {f.kind for f in result.verdict.tree} >= {"loss", "gradient", "norm", "parameter"}
    if clip is not None:
        assert max(norm for norm in result.ranks[0].norms if norm is not None) > clip, "clipping never came to work"


def same(ours: Verified, theirs: Verified) -> bool:
    """The same losses and parameters, bit for bit, on every rank; norms are sums over other runs."""
    every = [*ours.ranks, *theirs.ranks]
    first = every[0]
    locals_ = {record.data_rank: [step.losses for step in record.steps] for record in every}
    return all(
        record.losses == first.losses
        and [step.losses for step in record.steps] == locals_[record.data_rank]
        and record.parameters.keys() == first.parameters.keys()
        and all(torch.equal(record.parameters[name], first.parameters[name]) for name in first.parameters)
        for record in every
    )
