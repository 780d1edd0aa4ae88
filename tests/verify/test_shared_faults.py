"""Faults that a layout and its replay have in common: bitwise there, and different from the plain run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW
from verify_cases import GPT, record

from plait.forward import dropout
from plait.forward.dropout import DropoutRNG
from plait.referee.verify import reference
from plait.referee.verify.run import judge, placed, references
from plait.run.job import optimizer
from plait.run.job.job import make_job
from plait.step import norm, update
from plait.zero import optim

Patch = pytest.MonkeyPatch
RICH = replace(GPT, mesh="shard=3", dtype="fp64", weight_decay=0.1, lr_schedule="cosine", warmup=2, clip=0.3)
"""Everything on that may be wrong: dropout, clipping, decay, a rate of its own in every step."""


def sum_of_squares(patch: Patch) -> None:
    original = optim.square_sum
    for module in (update, norm, reference):
        patch.setattr(module, "square_sum", lambda runs: 1.01 * original(runs), raising=False)


def clip_by_the_square(patch: Patch) -> None:
    for module in (update, norm, reference):
        patch.setattr(module, "clip_factor", lambda norm, limit: min(1.0, limit / norm**2), raising=False)


def never_clip(patch: Patch) -> None:
    for module in (update, norm, reference):
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


FAULTS: dict[str, tuple[Callable[[Patch], None], dict[str, Any]]] = {
    "a sum of squares 1 % too large": (sum_of_squares, {}),
    "clipped by limit / norm^2": (clip_by_the_square, {}),
    "never clipped": (never_clip, {}),
    "dropout without 1 / (1 - p)": (dropout_without_its_factor, {}),
    "one mask for all seeds": (keys_without(1), {"seed": 3}),
    "one mask for all steps": (keys_without(2), {}),
    "one mask for all samples": (keys_without(3), {}),
    "one mask for all layers": (keys_without(4), {}),
    "one draw for two elements": (one_mask_for_half_the_elements, {}),
    "dropped instead of kept": (drop_the_others, {}),
    "decay groups exchanged": (decay_what_must_not, {}),
    "warmup off by a step": (rate_off_by(1), {}),
    "the rate of the step before": (rate_off_by(-1), {"lr_schedule": "linear", "warmup": 1}),
    "AdamW's second beta": (constants("adamw", partial(AdamW, betas=(0.9, 0.99))), {}),
    "AdamW's epsilon": (constants("adamw", partial(AdamW, eps=1e-5)), {}),
    "AdamW's decay": (constants("adamw", partial(AdamW, weight_decay=0.02)), {"weight_decay": None}),
    "SGD's momentum": (constants("sgd", partial(SGD, momentum=0.8)), {"optimizer": "sgd"}),
    "SGD with Nesterov's step": (constants("sgd", partial(SGD, momentum=0.9, nesterov=True)), {"optimizer": "sgd"}),
}


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_a_fault_that_layout_and_replay_share_shows(name: str | None, monkeypatch: Patch) -> None:
    fault, changes = FAULTS[name] if name else (lambda patch: None, {})
    config = replace(RICH, **changes)
    with monkeypatch.context() as patch:
        fault(patch)
        job = make_job(config)
        ranks = record(config, job)
        tree, plain = references(job, config, ranks)
        verdict = judge(job, config, ranks, tree, plain)
    assert [str(f) for f in verdict.tree if not f.bitwise] == []
    assert verdict.word == ("different" if name else "bitwise")
    told = placed(verdict, job, config, ranks, (tree, plain))
    assert (told.first is None) == (name is None), "what only plain PyTorch has otherwise is named too"


def test_a_wrong_update_in_the_last_step_is_told(monkeypatch: Patch) -> None:
    config = replace(RICH, steps=1)
    with monkeypatch.context() as patch:
        constants("adamw", partial(AdamW, weight_decay=20.0))(patch)
        job = make_job(replace(config, weight_decay=None))
        ranks = record(config, job)
        tree, plain = references(job, replace(config, weight_decay=None), ranks)
        verdict = judge(job, config, ranks, tree, plain)
    assert {finding.kind for finding in verdict.plain if not finding.equal} == {"parameter"}
    told = placed(verdict, job, config, ranks, (tree, plain))
    assert told.first is not None and (told.first.phase, told.first.step) == ("update", 0)
