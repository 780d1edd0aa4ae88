"""Faults that a layout and its replay have in common: bitwise there, and different from the plain run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from verify_cases import GPT

from plait.forward import dropout
from plait.forward.dropout import DropoutRNG
from plait.referee.verify import reference
from plait.run.job import optimizer
from plait.step import norm, reduce

Patch = pytest.MonkeyPatch
RICH = replace(GPT, mesh="shard=3", dtype="fp64", weight_decay=0.1, lr_schedule="cosine", warmup=2, clip=0.3)
"""Everything on that may be wrong: dropout, clipping, decay, a rate of its own in every step."""


def sum_of_squares(patch: Patch) -> None:
    original = norm.square_sum
    for module in (reduce, norm, reference):
        patch.setattr(module, "square_sum", lambda runs: 1.01 * original(runs), raising=False)


def clip_by_the_square(patch: Patch) -> None:
    for module in (reduce, norm, reference):
        patch.setattr(module, "clip_factor", lambda norm, limit: min(1.0, limit / norm**2), raising=False)


def never_clip(patch: Patch) -> None:
    for module in (reduce, norm, reference):
        patch.setattr(module, "clip_factor", lambda norm, limit: 1.0, raising=False)


def dropout_without_its_factor(patch: Patch) -> None:
    def drop(self: DropoutRNG, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return x * self.mask(x.shape, p, x.device).to(x.dtype) if training and p else x

    patch.setattr(DropoutRNG, "dropout", drop)


def keys_without(place: int) -> Callable[[Patch], None]:
    """The key of a mask is (kind, seed, step, sample, site)."""

    def fault(patch: Patch) -> None:
        original = dropout.stream_key
        patch.setattr(dropout, "stream_key", lambda *words: original(*words[:place], 0, *words[place + 1 :]))

    return fault


def one_mask_for_half_the_elements(patch: Patch) -> None:
    original = dropout.keep_mask
    twice = lambda keys, numel, p, device, place: original(keys, numel, p, device, lambda index: index // 2)  # noqa: E731
    patch.setattr(dropout, "keep_mask", twice)


def drop_the_others(patch: Patch) -> None:
    original = dropout.keep_mask
    patch.setattr(dropout, "keep_mask", lambda keys, numel, p, *rest: original(keys, numel, 1 - p, *rest))


def decay_what_must_not(patch: Patch) -> None:
    row = optimizer.OPTIMIZERS["adamw"]

    def exchanged(groups: Any, lr: float) -> Any:
        decays, rest = groups
        return row.make([{**decays, "params": rest["params"]}, {**rest, "params": decays["params"]}], lr=lr)

    patch.setitem(optimizer.OPTIMIZERS, "adamw", replace(row, make=exchanged))


def rate_off_by(steps: int) -> Callable[[Patch], None]:
    def fault(patch: Patch) -> None:
        original = optimizer.lr_factor
        patch.setattr(optimizer, "lr_factor", lambda step, **rest: original(step + steps, **rest))

    return fault


def constants(name: str, make: Any) -> Callable[[Patch], None]:
    def fault(patch: Patch) -> None:
        patch.setitem(optimizer.OPTIMIZERS, name, replace(optimizer.OPTIMIZERS[name], make=make))

    return fault
