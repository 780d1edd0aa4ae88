"""Faults that a layout and its replay have in common: bitwise there, and different from the plain run."""

from dataclasses import replace
from typing import Any

from planted import Patch, Put, instead
from verify_cases import GPT

from plait.forward import dropout
from plait.forward.dropout import DropoutRNG
from plait.referee.verify import reference
from plait.run.job import optimizer
from plait.step import norm, reduce

RICH = replace(GPT, steps=3, mesh="shard=3", dtype="fp64", weight_decay=0.1, lr_schedule="cosine", warmup=2, clip=0.3)
"""Everything on that may be wrong: dropout, clipping, decay, a rate of its own in every step."""


def sum_of_squares(patch: Patch) -> None:
    original = norm.sum_squares
    for module in (reduce, reference):
        patch.setattr(module, "sum_squares", lambda norms: 1.01 * original(norms))


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


def keys_without(place: int) -> Put:
    """The key of a mask is (kind, seed, step, sample, site)."""
    key = instead(dropout, "stream_key")
    return key(lambda original, *words: original(*words[:place], 0, *words[place + 1 :]))


@instead(dropout, "keep_mask")
def one_mask_for_half_the_elements(original: Any, keys: Any, numel: int, p: float, device: Any, place: Any) -> Any:
    return original(keys, numel, p, device, lambda index: index // 2)


@instead(dropout, "keep_mask")
def drop_the_others(original: Any, keys: Any, numel: int, p: float, *rest: Any) -> Any:
    return original(keys, numel, 1 - p, *rest)


def decay_what_must_not(patch: Patch) -> None:
    row = optimizer.OPTIMIZERS["adamw"]

    def exchanged(groups: Any, lr: float) -> Any:
        decays, rest = groups
        return row.make([{**decays, "params": rest["params"]}, {**rest, "params": decays["params"]}], lr=lr)

    patch.setitem(optimizer.OPTIMIZERS, "adamw", replace(row, make=exchanged))


def rate_off_by(steps: int) -> Put:
    return instead(optimizer, "lr_factor")(lambda original, step, **rest: original(step + steps, **rest))


def constants(name: str, make: Any) -> Put:
    def fault(patch: Patch) -> None:
        patch.setitem(optimizer.OPTIMIZERS, name, replace(optimizer.OPTIMIZERS[name], make=make))

    return fault
