"""Where nothing is gathered, small neighbours are laid out as one unit: the same numbers, in fewer messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine_cases import batches, net, sgd, train
from pipeline_cases import build, step
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.flat import BUCKET_BYTES, LEAST_BYTES, buckets
from plait.table.mesh import Mesh


def test_neighbours_share_a_bucket_until_it_is_full() -> None:
    kib = 1 << 10
    units = [[(300 * kib, 4)], [(100 * kib, 4)], [(100 * kib, 4), (28 * kib, 4)], [(100 * kib, 4)], []]
    assert buckets(units) == [range(0, 1), range(1, 3), range(3, 5)]
    assert buckets(units, 0) == [range(n, n + 1) for n in range(4)] + [range(4, 5)]
    assert buckets([]) == []
    scalars = [[(1, 4)]] * 1000
    assert max(map(len, buckets(scalars))) == BUCKET_BYTES // LEAST_BYTES == 256


def messages(template: nn.Module, mesh: str, row: str, **settings: Any) -> Counter[str]:
    """The number of messages that rank 0 sends in its second step, by phase."""

    def look(engine: Engine) -> Counter[str]:
        mark = len(engine.comm.ledger.entries)
        step(engine, batches(1)[0], 2)
        return Counter(entry.note.phase for entry in engine.comm.ledger.entries[mark:])

    first, *_ = train(template, mesh, row, batches(1), optimizer=sgd, microbatches=2, look=look, **settings)
    return first.seen


AGREED = {"count": 1, "report": 1}


@pytest.mark.parametrize(
    ("row", "sent"),
    [("ddp", {"step": 1}), ("zero1", {"step": 1, "publish": 1}), ("zero2", {"microbatch": 2, "publish": 1})],
)
def test_a_small_model_is_one_message_of_each_kind(row: str, sent: dict[str, int]) -> None:
    assert messages(net(), "shard=3", row, bucket=BUCKET_BYTES) == AGREED | sent
    assert sum(messages(net(), "shard=3", row, bucket=0).values()) > sum(sent.values()) + 2


def test_what_is_gathered_stays_in_units() -> None:
    assert messages(net(), "shard=2", "zero3", bucket=BUCKET_BYTES) == messages(net(), "shard=2", "zero3", bucket=0)


def test_two_dtypes_in_one_bucket() -> None:
    template = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4), nn.Linear(4, 4).double())

    def body(comm: Comm) -> tuple[int, list[int]]:
        engine = build(template, comm)
        return len(engine.placed.units), [len(flat.parameters) for flat in engine.placed.units[0].flats]

    assert run(Mesh(shard=2), body) == [(1, [4, 2])] * 2
