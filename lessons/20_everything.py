"""Lesson 20: everything composed, stopped, and resumed on another layout.

The idea.  Axes multiply.  A mesh ``pipe=2 shard=2`` has four ranks: two stages, and within each stage two ranks that
shard it.  A schedule orders the passes of a stage; a row says where the stage's parameters, gradients and optimizer
state are; neither knows of the other.  Add ``tensor=2`` and each matrix is cut first, and the rest applies to the
pieces.

A checkpoint must not remember any of that.  It holds each parameter once, by name, with the optimizer's state and the
number of steps; any layout reads it.  So a run may stop on four ranks and go on with two, or with one.

Predict before you run it:
  1. Four steps on pipe=2 shard=2 with zero3 and 1F1B; four steps on one process.  Same bits?
  2. Stop after two steps, go on for two with ddp on one rank.  Same bits as four without a stop?
  3. What does each rank save, so that nothing is gathered?

    plait lesson run 20
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import plait

MESH, WIDTH, SAMPLES, STEPS = "pipe=2 shard=2", 16, 32, 4
RANKS, WHY = (4,), "two stages of two"
torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
DATA = torch.randn(STEPS, SAMPLES, WIDTH)
MICROBATCHES = 4
"""The number for all data ranks together.  The layout divides them among ranks; a step's samples do not change."""


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1).sin()).square().sum()


# 1. From nothing: the whole run in one process.  It adds gradients in the order of the layout that it represents.


def one_process(data_ranks: int) -> tuple[dict[str, Tensor], float]:
    """zero3 adds over the data ranks first, then over microbatches: for m: for rank: the order is data, not luck."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        mean = loss_sum(model, DATA[step]).item() / SAMPLES
        total = [torch.zeros_like(p) for p in model.parameters()]
        lines = [x.chunk(MICROBATCHES // data_ranks) for x in DATA[step].chunk(data_ranks)]
        for m in range(MICROBATCHES // data_ranks):
            terms = []
            for rank in range(data_ranks):
                loss = loss_sum(model, lines[rank][m])
                terms.append(torch.autograd.grad(loss, list(model.parameters()), torch.full_like(loss, 1 / SAMPLES)))
            for t, of_ranks in zip(total, zip(*terms, strict=True), strict=True):
                t += sum(of_ranks[1:], of_ranks[0])
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = t
        optimizer.step()
    return model.state_dict(), mean


# 2. The same in plait, on any mesh, from any step on.


def body(comm: plait.Comm, row: str = "zero3", place: str = "", first: int = 0, last: int = STEPS) -> dict:
    """Makes steps ``first`` to ``last``, from the newest checkpoint in ``place``, and leaves a checkpoint there."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    how = {"schedule": "1f1b"} if comm.mesh.pipe > 1 else {}
    engine = plait.Engine(
        model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=lambda x: len(x), **how
    )
    if first:
        loaded = plait.load(place, engine)
        assert loaded.step == first
    mine, n = comm.data_rank, comm.mesh.data_size
    for step in range(first, last):
        engine.step(DATA[step].chunk(n)[mine].chunk(MICROBATCHES // n))
    if place and not first:
        plait.save(place, engine)
    return {"state": engine.full_state_dict(), "held": engine.placed.bytes_held(), "loss": engine.last.loss}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)

    # Prediction 1: yes, if the one process adds in the layout's order.
    expected, loss = one_process(data_ranks=2)
    straight = plait.run_threads(MESH, body)
    print(f"{STEPS} steps on {MESH}, zero3, 1F1B: loss {straight[0]['loss']:.6f}")
    held, whole = straight[0]["held"], 4 * sum(t.numel() for t in expected.values())
    print(f"rank 0 holds {held['params']} of {whole} bytes of parameters: half of a stage, padded to equal pieces")
    assert whole // 4 <= held["params"] == held["grads"] == held["optimizer"] // 2 < 1.1 * whole // 4
    assert all(same(rank["state"], expected) and abs(rank["loss"] - loss) < 1e-5 for rank in straight)
    print("parameters equal those of one process that adds in this order, to the bit, on every rank")

    # Prediction 2: the stop changes nothing; another layout adds in another order, so it agrees within rounding.
    for row, mesh in (("zero3", MESH), ("zero3", "shard=2"), ("hsdp", "replica=2 shard=2"), ("ddp", "shard=1")):
        with tempfile.TemporaryDirectory() as place:
            plait.run_threads(MESH, lambda comm, place=place: body(comm, "zero3", place, 0, 2))
            files = sorted(f.name for f in next(Path(place).glob("step-*")).iterdir())
            gone_on = plait.run_threads(mesh, lambda comm, row=row, place=place: body(comm, row, place, 2))
        off = max((gone_on[0]["state"][name] - t).abs().max().item() for name, t in expected.items())
        print(f"stopped after 2 steps, resumed with {row:5} on {mesh:17}: differs by {off:.0e}")
        assert off < 1e-6 and (off == 0 or (row, mesh) not in (("zero3", MESH), ("zero3", "shard=2")))

    # Prediction 3: each rank writes the pieces that no earlier rank has.
    print("a checkpoint of four ranks:", ", ".join(files))
    assert files == ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(4))]

    # All axes at once: a tensor axis cuts matrix products, so it agrees within rounding.
    plan = {f"{i}.0": "column" if i % 2 == 0 else "row" for i in range(6)}
    found = plait.run_threads("pipe=2 shard=2 tensor=2", lambda comm: with_tensor_axis(comm, plan))
    one = plait.run_threads("shard=1", lambda comm: with_tensor_axis(comm, None))[0]
    print(f"pipe=2 shard=2 tensor=2, {len(found)} ranks: loss {found[0]:.12f}, in one process {one:.12f}")
    assert len(found) == 8 and all(abs(loss - one) < 1e-12 * one for loss in found)
    print("plait verify --mesh 'pipe=2 shard=2' --strategy zero3 --schedule 1f1b --microbatches 4 proves any of these")


def with_tensor_axis(comm: plait.Comm, plan: dict[str, str] | None) -> float:
    model = copy.deepcopy(MODEL).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    how = {"tensor_plan": plan} if plan else {}
    how |= {"schedule": "1f1b"} if comm.mesh.pipe > 1 else {}
    engine = plait.Engine(
        model, comm, strategy="zero3", optimizer=optimizer, loss_fn=loss_sum, count_fn=lambda x: len(x), **how
    )
    mine, n = comm.data_rank, comm.mesh.data_size
    for step in range(STEPS):
        engine.step(DATA[step].double().chunk(n)[mine].chunk(MICROBATCHES // n))
    return engine.last.loss


if __name__ == "__main__":
    main()
