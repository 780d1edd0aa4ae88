"""Lesson 19: the game, memory against communication.

The idea.  Every row of the table (lesson 13) trains the same model.  They differ in two numbers: the bytes that a rank
*holds* between steps and the bytes that it *sends* in a step.  A layout that saves one usually pays with the other.
Both can be computed before anything runs: held from shapes and cells, sent from the moves between cells.  So plan
first, then measure, and let a difference of one byte be an error.

In units of the parameters' bytes P, on n ranks with M microbatches, and f = (n - 1) / n:

    row         held: params, grads, Adam     sent
    ddp         1     1     2                 2 f               one all-reduce a step
    zero1       1     1     2/n               2 f               reduce-scatter, all-gather a step
    zero2       1     1/n   2/n               (M + 1) f         a reduce-scatter each microbatch
    zero3       1/n   1/n   2/n               3 M f             two gathers and a reduce-scatter each microbatch
    zero3_keep  1/n   1/n   2/n               2 M f             parameters kept from forward to backward

Predict before you run it, on four ranks:
  1. One microbatch.  Which rows send as little as data parallel, and hold less?
  2. Eight microbatches.  How much more does zero3 send than zero1?
  3. Two rows with one microbatch: are their trained parameters the same bits?  And with three microbatches?

    plait lesson run 19
"""

import copy

import torch
from torch import nn

import plait
from plait.predict.cost import differences, predict_step
from plait.predict.memory import formula

MESH, WIDTH, SAMPLES, STEPS = "shard=4", 64, 48, 3
RANKS, WHY = (2, 4), "48 samples are cut evenly, in three microbatches"
torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(4)))
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()
P = 4 * sum(p.numel() for p in MODEL.parameters())
AGREEMENT = ("count", "report")
"""Phases of the two small messages in which the ranks of a step agree on counts; no formula has their bytes."""


# 1. The plan: the two columns of the table above, from nothing.


def planned_held(row: str, n: int) -> tuple[float, float, float]:
    stage = {"ddp": 0, "zero1": 1, "zero2": 2}.get(row, 3)
    return (1 if stage < 3 else 1 / n), (1 if stage < 2 else 1 / n), (2 if stage < 1 else 2 / n)


def planned_sent(row: str, n: int, M: int) -> float:
    volumes = {"ddp": 2, "zero1": 2, "zero2": M + 1, "zero3": 3 * M, "zero3_keep": 2 * M}
    return volumes[row] * (n - 1) / n


# 2. The measurement: a few steps; the bytes that this rank held, and each message of the last step.


def body(comm: plait.Comm, row: str = "zero3", microbatches: int = 1) -> dict:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plait.Engine(model, comm, strategy=row, optimizer=optimizer)
    place, n = comm.data_rank, comm.mesh.data_size
    x, y = X.chunk(n)[place], Y.chunk(n)[place]
    for _ in range(STEPS):
        mark = len(comm.ledger)
        for x_m, y_m in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            engine.backward((model(x_m) - y_m).square().sum(), count=len(x_m))
        optimizer.step()
    messages = comm.ledger.since(mark)
    placed = engine.placed
    predicted = predict_step(placed.layouts(), comm.mesh, placed.strategy, microbatches, comm.rank)
    assert not differences(predicted, messages), "plait's own prediction is the ledger, byte for byte"
    held = placed.bytes_held()
    return {
        "held": (held["params"], held["grads"], held["optimizer"]),
        "sent": sum(m.sent for m in messages if m.note.phase not in AGREEMENT),
        "across": [m for m in messages if m.axes == ("replica",) and "reduce" in m.kind],
        "parameters": torch.cat([p.flatten() for p in engine.full_state_dict().values()]),
    }


def ranks_of(mesh: str, row: str, microbatches: int = 1) -> list[dict]:
    return plait.run_threads(mesh, lambda comm: body(comm, row, microbatches))


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    mesh, n = f"shard={ranks}", ranks

    # The table, planned and measured.  Every number is asserted, to the byte.
    print("in P, held:  params grads   Adam; sent with M = 1 and M = 3")
    for row in ("ddp", "zero1", "zero2", "zero3", "zero3_keep"):
        found = {M: ranks_of(mesh, row, M)[0] for M in (1, 3)}
        held = tuple(h / P for h in found[1]["held"])
        sent = [found[M]["sent"] / P for M in (1, 3)]
        columns = "  ".join(f"{value:5.2f}" for value in (*held, *sent))
        print(f"{row:11} {columns}")
        assert held == planned_held(row, n) and sent == [planned_sent(row, n, M) for M in (1, 3)]
        share = formula(P / 4, plait.Mesh.parse(mesh), plait.TABLE[row])
        assert found[1]["held"] == (share.params, share.grads, share.optimizer)

    # Prediction 1: zero1, zero2 and zero3_keep. An all-reduce is a reduce-scatter and an all-gather; these rows put the
    # update between them.
    assert planned_sent("zero2", n, 1) == planned_sent("zero1", n, 1) == planned_sent("ddp", n, 1)
    assert planned_sent("zero3_keep", n, 1) == planned_sent("ddp", n, 1)
    # Prediction 2: twelve times as much.  Microbatches are free only if nothing is gathered or reduced in each.
    ratio = planned_sent("zero3", n, 8) / planned_sent("zero1", n, 8)
    print(f"with eight microbatches zero3 sends {ratio:g} times what zero1 does")
    assert ratio == 12

    # Two axes: hsdp and psdp reduce over the slow axis once per unit and step, for any number of microbatches.
    if ranks == 4:
        for row in ("hsdp", "psdp"):
            across = ranks_of("replica=2 shard=2", row, 3)[0]["across"]
            print(f"{row} with three microbatches: {len(across)} reductions over replica for {len(MODEL)} units")
            assert len(across) == len(MODEL)

    # Prediction 3: with one microbatch, yes, all eight rows; with three, those rows that add in the same order.
    one = {row: ranks_of(mesh, row)[0]["parameters"] for row in plait.TABLE}
    assert all(torch.equal(p, one["ddp"]) for p in one.values())
    three = {row: ranks_of(mesh, row, 3)[0]["parameters"] for row in plait.TABLE}
    for group in (("ddp", "zero1"), ("hsdp", "psdp"), ("zero2", "zero3", "zero3_keep", "hpz")):
        assert all(torch.equal(three[row], three[group[0]]) for row in group)
    gap = (three["ddp"] - three["zero3"]).abs().max().item()
    print("one microbatch: all eight rows train the same bits; three: those that add in one order do, and ddp differs")
    print(f"from zero3 by {gap:.0e}, which is rounding; plait verify replays each order on one process")
    assert 0 < gap < 1e-2 * STEPS


if __name__ == "__main__":
    main()
