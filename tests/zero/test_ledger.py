"""A step sends the table's messages and no other; under mixed precision each kind of state has its dtype and bytes."""

from collections import Counter
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import ROWS, Made, Net, batches, net, sgd, train
from pipeline_cases import build, on, step
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.predict.cost import differences, predict_step
from plait.predict.memory import held
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.flat import BUCKET_BYTES, LEAST_BYTES, buckets
from plait.table.mesh import Mesh


class Reader(cases.Net):
    """The model's own code reads a parameter of a unit inside of it."""

    def forward(self, x_BC: cases.Tensor) -> cases.Tensor:
        return super().forward(x_BC) + (x_BC @ self.first.weight)[:, :3]


class Unused(cases.Net):
    """A unit whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, cases.WIDTH)

    def forward(self, x_BC: cases.Tensor) -> cases.Tensor:
        y_BC = super().forward(x_BC)
        self.unused(y_BC)
        return y_BC


class TwoStreams(cases.Net):
    """A second stream enters by a tied weight, later than the first; neither input wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(cases.WIDTH, cases.WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x_BC: cases.Tensor) -> cases.Tensor:
        return super().forward(x_BC) + self.second(x_BC)[:, :3]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("model", [Reader, Unused, TwoStreams])
def test_the_ledger_is_the_prediction_where_units_are_read_from_elsewhere(row: str, model: type[cases.Net]) -> None:
    """In the second step."""

    def look(engine: Engine) -> None:
        comm = engine.comm
        mark = len(comm.ledger.entries)
        step(engine, batches(1)[0], 2)
        predicted = predict_step(engine.placed.layouts(), comm.mesh, engine.placed.strategy, 2, comm.rank)
        assert differences(predicted, list(comm.ledger.entries[mark:])) == []

    train(cases.distinct(model()), "replica=2 shard=2", row, batches(1), sgd, microbatches=2, look=look)


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2"])
def test_reductions_are_issued_in_one_order_on_all_ranks(row: str) -> None:
    """Also where a rank runs its units in another order, or not at all."""

    class Shuffled(cases.Net):
        def through(self, x_BC: cases.Tensor) -> cases.Tensor:
            for k in self._order:
                x_BC = self.blocks[k](x_BC)
            return x_BC

    template = cases.distinct(Shuffled())

    def body(comm: cases.Comm) -> list[str]:
        engine = build(template, comm, strategy=row, optimizer=sgd)
        engine.model._order = [(0, 1, 2), (2, 0), (1,)][comm.rank]
        for batch in batches(2):
            step(engine, batch, 2)
        return [str(e) for e in comm.ledger.entries if e.kind in ("all_reduce", "reduce_scatter")]

    first, *others = on("shard=3", body)
    assert first and all(other == first for other in others)


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


BF16, KEPT = torch.bfloat16, {"turn": torch.complex64}


def kinds() -> nn.Module:
    """A real weight, a complex one, and a frozen list of indices, in one unit."""
    kept = nn.Parameter(torch.tensor([0, 3, 2, 5]), requires_grad=False)
    turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    run = lambda m, x_BC: (m.first(x_BC)[:, m.kept].to(m.turn.dtype) @ m.turn).abs()  # noqa: E731
    return Made(run, first=nn.Linear(5, 6), kept=kept, turn=turn)


def engine_on(template: nn.Module, comm: Comm, strategy: Any) -> Engine:
    functions = {"loss_fn": lambda m, x: m(x.to(BF16)).float().square().sum(), "count_fn": len}
    return build(template, comm, strategy=strategy, clip=0.1, **functions)


CASES = [(Net, row, offload) for row in ROWS for offload in (False, True)]
CASES += [(kinds, row, False) for row in ("ddp", "zero2", "zero3")]


@pytest.mark.parametrize(("kind", "row", "offload"), CASES)
def test_state_lies_in_the_dtypes_of_the_row_and_is_predicted(kind: Any, row: str, offload: bool) -> None:
    torch.manual_seed(0)
    template, strategy = kind(), TABLE[row].mixed("bf16")
    strategy = strategy.offloaded() if offload else strategy

    def body(comm: Comm) -> None:
        engine = engine_on(template, comm, strategy)
        assert all(p.dtype == KEPT.get(n, BF16) for n, p in engine.model.named_parameters() if p.requires_grad)
        comm.ledger.clear()
        engine.step(list(torch.linspace(-1, 1, 30).add(comm.rank).view(2, 3, 5)))
        sent = [entry for entry in comm.ledger.entries if entry.note.phase != "setup"]
        assert not differences(predict_step(engine.placed.layouts(), comm.mesh, strategy, 2, comm.rank), sent)
        for piece in engine.placed.owned:
            due = KEPT.get(piece.name, torch.float32)
            assert {
                piece.view.dtype,
                piece.gradient.dtype,
                engine.optimizers[0].state[piece.view]["exp_avg"].dtype,
            } == {due}
        ahead, kept = held(engine.placed.layouts(), comm.mesh, strategy, comm.rank, 2), engine.placed.bytes_held()
        assert (kept["params"], kept["grads"], kept["optimizer"]) == (ahead.params, ahead.grads, ahead.optimizer)

    run(Mesh(replica=2, shard=2), body, deadline=20)


def test_a_row_may_not_narrow_what_it_sums() -> None:
    row = "x: full | full | full fp32, pending(shard, replica) | full fp32"
    with pytest.raises(ValueError, match="fewer bits"):
        run(Mesh(), lambda comm: engine_on(Net().double(), comm, row), deadline=20)
