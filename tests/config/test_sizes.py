"""Sizes that do not divide: padded, and the run is the one-process run; or refused before any rank starts, in numbers.

heads < tensor ranks      refused        layers < stages          refused
features % tensor ranks   padded         parameters % ranks       padded
length % tensor ranks     padded         batch % parts            uneven
"""

from typing import Any

import pytest

from plait.referee.verify.matrix import verdict_of
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"mesh": "tensor=3"}, ["4 heads of 16", "tensor=3", "use tensor=2"]),
    ({"mesh": "tensor=4"}, ["2 heads of 16", "tensor=4", "use tensor=2"]),
    ({"mesh": "tensor=2", "kv_heads": 1}, ["1 heads of 16", "tensor=2", "use no tensor axis"]),
    ({"mesh": "tensor=2", "model": "mlp", "layers": 3}, ["tensor=2", "more layers", "4"]),
    ({"mesh": "pipe=8"}, ["8 stages", "7 links", "at most 7"]),
    ({"mesh": "pipe=4", "schedule": "interleaved"}, ["8 stages", "7 links"]),
    ({"mesh": "pipe=2", "split": "3 3"}, ["3 + 3 = 6 links", "has 7"]),
    ({"mesh": "pipe=2", "split": "0 7"}, ["0 + 7", "at least one"]),
    ({"mesh": "shard=7", "batch": 6}, ["6 samples", "7 data ranks", "7 parts"]),
    ({"width": 6, "heads": 2, "kv_heads": 1}, ["width 6 over 2 heads", "3 each", "multiple of 4"]),
    ({"heads": 3, "kv_heads": 2, "width": 96}, ["3 heads", "2 key/value heads", "divisor of 3"]),
    ({"kv_heads": 8}, ["4 heads", "8 key/value heads"]),
    ({"batch": 100_000}, ["a batch of 100000", "batch <= "]),
    ({"length": 3_000_000}, ["length 3000000", "6000002 tokens", "at most 1499999"]),
    ({"epochs": 1, "warmup": 10**6}, ["a warmup of 1000000 steps", "give a warmup of at most"]),
    ({"mesh": "shard=2000"}, ["2,000 ranks", "at most 1,024"]),
    ({"mesh": "pipe=1000", "microbatches": 1000, "batch": 1000}, ["1,000 stages x 1,000 microbatches", "65,536"]),
    ({"model": "mlp", "width": 1 << 17, "layers": 1000}, ["2 ranks need at least", "this machine has", "GiB"]),
]
"""Impossible sizes, and the words of the message."""

PADDED: list[dict[str, Any]] = [
    {"mesh": "shard=5", "batch": 7},
    {"mesh": "shard=4", "model": "mlp", "width": 1, "layers": 1},
    {"mesh": "shard=4", "width": 2, "heads": 1, "kv_heads": 1, "layers": 1, "batch": 4},
    {"mesh": "pipe=2", "layers": 1},
    {"mesh": "pipe=4", "schedule": "zbv", "layers": 6},
    {"mesh": "tensor=3", "heads": 3, "kv_heads": 3, "width": 96, "length": 7, "sequence_parallel": True},
    {"mesh": "tensor=5", "heads": 5, "kv_heads": 5, "width": 50},
    {"mesh": "tensor=7", "model": "mlp", "width": 3, "layers": 4},
    {"mesh": "shard=3 tensor=2", "model": "mlp", "width": 5, "layers": 5, "batch": 5},
]
"""Sizes that do not divide, and still give the run of one process."""


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=str)
def test_it_is_refused_before_anything_starts(changes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        validate(VerifyConfig(**changes))
    assert all(words in str(caught.value) for words in says), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", PADDED, ids=str)
def test_it_is_padded_and_equal(changes: dict[str, Any]) -> None:
    config = VerifyConfig(**{"steps": 2, "dtype": "fp64" if "tensor" in changes["mesh"] else "fp32", **changes})
    verdict = verdict_of(config)
    assert verdict.equal, verdict
