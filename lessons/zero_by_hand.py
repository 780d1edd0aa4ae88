"""From DDP to ZeRO-3 on four ranks, in one process: run me, read me, break me.

    python lessons/zero_by_hand.py

Every rank is a thread (``plait.run_threads``), so four of them run on a laptop in seconds.  Each part states what it
expects, prints what it finds, and asserts it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import plait
from plait.comm import Comm
from plait.predict.cost import differences, predict_step
from plait.predict.memory import formula
from plait.table.mesh import Mesh

RANKS, WIDTH, STEPS = 4, 64, 3
MESH, DATA = f"shard={RANKS}", ("replica", "shard")
Batch = tuple[Tensor, Tensor]

torch.manual_seed(0)
LAYERS = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
MODEL = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in LAYERS))
"""Ranks copy it; threads that seed the process's generator would disturb each other."""
X = torch.randn(48, WIDTH)
Y = X.flip(1).sin()
P = 4 * sum(p.numel() for p in MODEL.parameters())
"""Bytes of one parameter volume, in fp32."""


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """A sum, never a mean: fault 2 below is why."""
    x, y = batch
    error: Tensor = model(x) - y
    return error.square().sum()


def count(batch: Batch) -> int:
    return batch[1].numel()


def my_batches(comm: Comm, microbatches: int) -> list[Batch]:
    """This rank's samples, cut in microbatches."""
    place = comm.mesh.data_rank(comm.rank)
    x, y = X.chunk(comm.mesh.data_size)[place], Y.chunk(comm.mesh.data_size)[place]
    return list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))


def train(comm: Comm, row: str, microbatches: int = 1) -> dict[str, Any]:
    """A few steps under a row of the table; what this rank saw, held and sent."""
    model = copy.deepcopy(MODEL)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    engine = plait.Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
    for _ in range(STEPS):
        mark = len(comm.ledger)
        result = engine.step(my_batches(comm, microbatches))
    messages = comm.ledger.since(mark)
    predicted = predict_step(engine.placed.layouts(), comm.mesh, engine.placed.strategy, microbatches, comm.rank)
    assert not differences(predicted, messages), "the ledger is the prediction, byte for byte"
    return {
        "loss": result.loss,
        "local loss": sum(result.local_losses),
        "parameters": torch.cat([p.flatten() for p in engine.full_state_dict().values()]),
        "held": engine.placed.bytes_held(),
        "messages": messages,
        "sent": sum(m.sent for m in messages if m.note.phase not in ("count", "report")),
    }


def ranks(row: str, microbatches: int = 1, mesh: str = MESH) -> list[dict[str, Any]]:
    return plait.run_threads(mesh, lambda comm: train(comm, row, microbatches))


def zero1_by_hand(comm: Comm) -> Tensor:
    """ZeRO stage 1 in four collectives: what the row ``zero1`` says, written out."""
    model = copy.deepcopy(MODEL)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    piece = nn.Parameter(flat.chunk(RANKS)[comm.rank].clone())
    optimizer = AdamW([piece], lr=1e-2)  # has no pointer to what this rank does not own, so no state of it
    (batch,) = my_batches(comm, 1)
    for _ in range(STEPS):
        total = torch.tensor([count(batch)])
        comm.all_reduce(total, DATA).wait()
        model.zero_grad()
        loss = loss_sum(model, batch)
        loss.backward(torch.full_like(loss, 1 / int(total)))  # the only division there is
        whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        piece.grad = torch.empty_like(piece)
        comm.reduce_scatter(piece.grad, whole, DATA).wait()  # full, pending(shard) -> shard
        optimizer.step()
        comm.all_gather(flat, piece.detach(), DATA).wait()  # shard -> full
        nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


def one_process(zero_grad: bool = True) -> tuple[list[float], Tensor]:
    """Plain PyTorch, SGD this time: the mean losses of 20 steps, and the first gradient."""
    model = copy.deepcopy(MODEL)
    optimizer, losses, first = SGD(model.parameters(), lr=12.0), [], torch.empty(0)
    for step in range(20):
        if zero_grad:
            optimizer.zero_grad()
        loss = loss_sum(model, (X, Y)) / Y.numel()
        loss.backward()
        if step == 0:
            first = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def part(title: str) -> Callable[..., None]:
    print(f"\n{title}")
    return lambda *words: print("   ", *words)


def main() -> None:
    torch.set_num_threads(1)
    say = part("1. DDP. Every rank sees other samples: losses differ. Gradients are summed: parameters do not.")
    ddp = ranks("ddp")
    say("local losses", [round(r["local loss"], 3) for r in ddp], " global", round(ddp[0]["loss"], 6))
    assert len({r["local loss"] for r in ddp}) == RANKS and len({r["loss"] for r in ddp}) == 1
    assert all(torch.equal(r["parameters"], ddp[0]["parameters"]) for r in ddp)

    say = part("2. ZeRO by hand: reduce-scatter, update a quarter, all-gather. The same bits as the row zero1.")
    by_hand, zero1 = plait.run_threads(MESH, zero1_by_hand)[0], ranks("zero1")[0]["parameters"]
    say("largest difference:", (by_hand - zero1).abs().max().item())
    assert torch.equal(by_hand, zero1)

    say = part("3. Memory. Stages 1, 2, 3 divide optimizer state, gradients, parameters by the 4 ranks.")
    for row in ("ddp", "zero1", "zero2", "zero3"):
        held = ranks(row)[0]["held"]
        share = formula(P / 4, Mesh.parse(MESH), plait.TABLE[row])
        say(f"{row:6}", *(f"{kind} {held[kind] / P:4.2f} P  " for kind in ("params", "grads", "optimizer")))
        assert (held["params"], held["grads"], held["optimizer"]) == (share.params, share.grads, share.optimizer)

    say = part("4. Messages. Sent per rank and step, in parameter volumes times 3/4, for M = 1 and M = 3.")
    volumes = {"ddp": (2, 2), "zero1": (2, 2), "zero2": (2, 4), "zero3": (3, 9), "zero3_keep": (2, 6)}
    for row, expected in volumes.items():
        found = tuple(ranks(row, m)[0]["sent"] / (P * 3 / 4) for m in (1, 3))
        say(f"{row:10}", *found)
        assert found == expected
    for row in ("hsdp", "psdp"):
        rank = ranks(row, 3, mesh="replica=2 shard=2")[0]
        across = [m for m in rank["messages"] if m.axes == ("replica",) and "reduce" in m.kind]
        say(row, "with M = 3 sends", len(across), "reductions across replicas for", len(LAYERS), "units")
        assert len(across) == len(LAYERS)

    say = part("5. Equality. With one microbatch all rows are one run; with three, those that add in one order.")
    one = {row: ranks(row)[0]["parameters"] for row in plait.TABLE}
    assert all(torch.equal(p, one["ddp"]) for p in one.values())
    three = {row: ranks(row, 3)[0]["parameters"] for row in plait.TABLE}
    for group in (("ddp", "zero1"), ("hsdp", "psdp"), ("zero2", "zero3", "zero3_keep", "hpz")):
        assert all(torch.equal(three[row], three[group[0]]) for row in group)
    gap = (three["ddp"] - three["zero3"]).abs().max().item()
    say("ddp and zero3 with three microbatches differ by", gap, "(additions in another order)")
    assert 0 < gap < 1e-2 * STEPS

    say = part("6a. Find the fault: this loop never calls zero_grad().")
    right, wrong = one_process()[0], one_process(zero_grad=False)[0]
    say("right", [round(x, 3) for x in right[::3]])
    say("wrong", [round(x, 3) for x in wrong[::3]])
    say("Each step pushes with the sum of all gradients so far: ahead at first, then it overshoots and stalls.")
    say("The engine starts every step's sums anew; there is nothing to zero.")
    assert right == sorted(right, reverse=True) and wrong[2] < right[2] and wrong[-1] > 1.5 * right[-1]

    say = part("6b. Find the fault: the mean of two microbatches' means, where one has 40 rows and one has 8.")
    parts = [(X[:40], Y[:40]), (X[40:], Y[40:])]
    exact = one_process()[1]
    gradients = []
    for batch in parts:
        model = copy.deepcopy(MODEL)
        loss_sum(model, batch).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    mean_of_means = (gradients[0] / count(parts[0]) + gradients[1] / count(parts[1])) / 2
    sum_by_count = (gradients[0] + gradients[1]) / sum(map(count, parts))
    for name, g in (("mean of means", mean_of_means), ("sum / count", sum_by_count)):
        say(f"{name:14} relative error {((g - exact).abs().max() / exact.abs().max()).item():.1e}")
    assert not torch.allclose(mean_of_means, exact, rtol=1e-2) and torch.allclose(sum_by_count, exact, atol=1e-7)


if __name__ == "__main__":
    main()
