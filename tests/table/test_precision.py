"""Dtypes and devices of cells, and the rule by which a loss scale moves."""

from __future__ import annotations

import pytest

from plait.table.cells import TABLE, find_strategy, parse_strategy
from plait.table.flat import lay
from plait.table.precision import LossScale, Precision


@pytest.mark.parametrize("row", TABLE)
def test_a_mixed_row_reads_what_it_writes(row: str) -> None:
    mixed = TABLE[row].mixed("bf16").offloaded()
    again = parse_strategy(str(mixed))
    assert again == mixed
    assert (again.params.dtype, again.kept.dtype, again.grads.dtype, again.optim.dtype) == (
        *("bf16", "bf16"),
        *("fp32", "fp32"),
    )
    assert again.optim.device == "cpu" and again.grads.pending == TABLE[row].grads.pending


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x: full bf16 | full | full bf16, pending(shard, replica) | full", "same dtype"),
        ("x: full fp32 | full fp32 | full bf16, pending(shard, replica) | full", "no wider"),
        ("x: full | full | full fp16, pending(shard, replica) | full", "no wider"),
        ("x: full @cpu | full | full, pending(shard, replica) | full", "device"),
        ("x: full int8 | full int8 | full, pending(shard, replica) | full", "dtype is one of"),
        ("x: full | full | full, pending(shard, replica) | full @disk", "device is cpu"),
    ],
)
def test_a_row_that_cannot_be_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        find_strategy(text)


def test_who_has_master_weights() -> None:
    row = TABLE["zero2"]
    full, half, whole = (lay([("p", (3,))], size, 2, real=size < 8) for size in (4, 2, 8))
    assert not full.has_master(row) and not half.has_master(row.mixed("bf16", "bf16"))
    assert full.has_master(row.mixed("bf16")) and full.has_master(row.offloaded())
    assert not whole.has_master(row.mixed("bf16")), "integers and complex numbers stay what they are"
    assert whole.itemsize_in(row.mixed("bf16").params) == 8 and half.itemsize_in(row.mixed("bf16").grads) == 4


def test_a_precision_is_a_row_without_places() -> None:
    one, other = (Precision.of(TABLE[name].mixed("fp16"), 8.0) for name in ("ddp", "hpz"))
    assert one == other and one.params.split == () and one.optim.dtype == "fp32"
    scale = one.loss_scale()
    assert scale is not None and scale.scale == 8.0 and scale is not one.loss_scale()


def test_a_loss_scale_halves_at_once_and_doubles_after_good_steps() -> None:
    scale = LossScale(8.0, interval=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale.update(finite=finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8]


def test_a_loss_scale_gives_up_where_no_factor_is_small_enough() -> None:
    scale = LossScale(4.0)
    with pytest.raises(ValueError, match="not finite"):
        for _ in range(100):
            scale.update(finite=False)


@pytest.mark.parametrize(
    "settings", [{"scale": 0.0}, {"scale": float("inf")}, {"growth": 0.5}, {"backoff": 1.0}, {"interval": 0}]
)
def test_a_loss_scale_that_cannot_move_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        LossScale(**settings)  # type: ignore[arg-type]
