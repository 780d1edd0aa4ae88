"""Lesson 12: FSDP.

The idea.  Lesson 11 gave whole layers to owners.  Then shares are uneven where the layers do not divide (lesson 10),
and the owner sends everything.  FSDP lays all parameters of a *unit* (a block) end to end in one flat vector and gives
each rank an equal piece, wherever the cuts fall.  Before a unit computes, an all-gather makes the whole vector;
afterwards the memory is freed.  The backward gathers again, and when the unit's last gradient is there, a
reduce-scatter leaves each rank the sum for its piece.

    forward    gather 0 | compute 0, gather 1 | free 0 | compute 1, gather 2 | free 1 | ...
    backward   gather 3 | compute 3, gather 2 | reduce 3, free 3 | compute 2, gather 1 | reduce 2, free 2 | ...

Asking for the next unit before this one computes is *prefetch*: its gather runs meanwhile, and the unit waits for it
when its turn comes.  Two units are whole at once instead of one.  The model's code does not change: hooks do all of
this.  A parameter is a view of the flat vector, and stays the same object.

Predict before you run it, with four units on four ranks:
  1. How many units are whole at once, at most, with prefetch 1?  With prefetch 0?
  2. Autograd has saved the weights for backward.  The memory was freed in between.  What do the saved weights show?
  3. In which order are gradients reduced?

You need lesson 5 and lesson 11.  Here the order of the units is known; plait learns it in a model's first forward, and
prefetches from then on.  More: docs/guide/a-step.md.

    plait lesson run 12
"""

import copy

import torch
from torch import Tensor, nn

import plait

WIDTH, SAMPLES, STEPS, UNITS = 32, 48, 3, 4
MESH = "shard=4"
RANKS, WHY = range(1, 9), "each has some of 48 samples"
AXIS = ("shard",)
torch.manual_seed(0)
MODEL = nn.Sequential(
    *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(UNITS))
)
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()


# 1. A unit: a flat vector whose memory comes and goes, and this rank's piece of it, which stays.


class Unit:
    """The parameters of one block on one rank."""

    def __init__(self, number: int, block: nn.Module, comm: plait.Comm, log: list[str]) -> None:
        self.number, self.comm, self.log = number, comm, log
        self.parameters = list(block.parameters())
        numel, n = sum(p.numel() for p in self.parameters), comm.world_size
        self.flat = torch.zeros(-(-numel // n) * n)  # padded to equal pieces
        start = 0
        for p in self.parameters:
            view = self.flat[start : start + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            start += p.numel()
        self.piece = nn.Parameter(self.flat.chunk(n)[comm.rank].clone())
        self.arrived = 0
        self.work = None
        self.free()

    def ask(self) -> None:
        """Starts the gather, unless it is running or done."""
        if self.whole:  # @hide
            return
        self.whole = True  # @hide
        self.log.append(f"gather {self.number}")
        self.flat.untyped_storage().resize_(4 * self.flat.numel())
        self.work = self.comm.all_gather(self.flat, self.piece.detach(), AXIS)

    def wait(self) -> None:
        """Returns when the values are there."""
        if self.work is not None:  # @hide
            self.work.wait()
            self.work = None  # @hide

    def free(self) -> None:
        """Gives the memory back.  Every view, autograd's saved ones too, now has a shape and no values."""
        self.whole = False
        self.flat.untyped_storage().resize_(0)

    def one_more_gradient(self) -> None:
        self.arrived += 1  # @hide
        if self.arrived < len(self.parameters):  # @hide
            return
        self.arrived = 0  # @hide
        self.log.append(f"reduce {self.number}")
        whole = torch.zeros(self.piece.numel() * self.comm.world_size)
        gradients = torch.cat([p.grad.flatten() for p in self.parameters])
        whole[: len(gradients)] = gradients
        self.piece.grad = torch.empty_like(self.piece)
        self.comm.reduce_scatter(self.piece.grad, whole, AXIS).wait()
        self.piece.grad.mul_(1 / SAMPLES)
        for p in self.parameters:
            p.grad = None
        self.free()


# 2. Hooks on every block: before and after its forward, before its backward, at each of its gradients.


def shard(model: nn.Sequential, comm: plait.Comm, prefetch: int, log: list[str]) -> tuple[list[Unit], list[int]]:
    units = [Unit(i, block, comm, log) for i, block in enumerate(model)]
    at_once: list[int] = []

    def gather(first: int, step: int) -> None:
        for i in range(first, first + step * (prefetch + 1), step):
            if 0 <= i < len(units):  # @hide
                units[i].ask()
        units[first].wait()
        at_once.append(sum(unit.whole for unit in units))

    for i, (block, unit) in enumerate(zip(model, units, strict=True)):
        block.register_forward_pre_hook(lambda *_, i=i: gather(i, 1))
        block.register_forward_hook(lambda *_, unit=unit: unit.free())
        block.register_full_backward_pre_hook(lambda *_, i=i: gather(i, -1))
        for p in unit.parameters:
            p.register_post_accumulate_grad_hook(lambda _, unit=unit: unit.one_more_gradient())
    return units, at_once


def body(comm: plait.Comm, prefetch: int = 1) -> dict:
    model, log = copy.deepcopy(MODEL), []
    units, at_once = shard(model, comm, prefetch, log)  # @over
    pieces = [unit.piece for unit in units]  # @inspect units[0].flat, units[0].whole
    optimizer = torch.optim.AdamW(pieces, lr=1e-2)  # a stock optimizer, on pieces
    x, y = X.chunk(comm.world_size)[comm.rank].clone(), Y.chunk(comm.world_size)[comm.rank]
    x.requires_grad_()  # so that the backward of the first block has an input to hook
    for _ in range(STEPS):
        log.clear()
        (model(x) - y).square().sum().backward()
        optimizer.step()
    held = sum(unit.flat.untyped_storage().nbytes() for unit in units)
    pieces = [piece.detach() for piece in pieces]
    return {"pieces": pieces, "log": list(log), "most": max(at_once), "left": held, "sent": comm.ledger.sent}


# 3. The same in plait: one line, in place of DDP.


def engine(comm: plait.Comm) -> list[Tensor]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = plait.Engine(model, comm, strategy="zero3", prefetch=1, optimizer=optimizer)
    x, y = X.chunk(comm.world_size)[comm.rank], Y.chunk(comm.world_size)[comm.rank]
    for _ in range(STEPS):
        ours.backward((model(x) - y).square().sum(), count=len(x))
        optimizer.step()
    return list(ours.full_state_dict().values())


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    mesh = f"shard={ranks}"
    found, ours = plait.run_threads(mesh, body), plait.run_threads(mesh, engine)

    # Prediction 1: two, and one.  Not four.
    without = plait.run_threads(mesh, lambda comm: body(comm, prefetch=0))
    print("units whole at once: with prefetch", found[0]["most"], "without", without[0]["most"], "of", UNITS)
    assert all(r["most"] == 2 for r in found) and all(r["most"] == 1 for r in without)
    assert all(r["left"] == 0 for r in found), "after the step no unit is whole on any rank"

    # Prediction 2: the right values again, since the gather writes to the same memory.  Proof: the trained parameters.
    numels = [sum(p.numel() for p in block.parameters()) for block in MODEL]
    wholes = [torch.cat([r["pieces"][i] for r in found])[: numels[i]] for i in range(UNITS)]
    expected = torch.cat([t.flatten() for t in ours[0]])
    assert torch.equal(torch.cat(wholes), expected)
    for a, b in zip(without, found, strict=True):
        assert all(map(torch.equal, a["pieces"], b["pieces"]))
    print("trained parameters, by hand with and without prefetch, and by plait's zero3: equal to the bit")

    # Prediction 3: from the last unit to the first, each as soon as its own backward is done.
    print("one step on rank 0:", ", ".join(found[0]["log"]))
    gathers, reduces = ([e for e in found[0]["log"] if e.startswith(k)] for k in ("gather", "reduce"))
    order = list(range(UNITS))
    assert reduces == [f"reduce {i}" for i in reversed(order)]
    assert gathers == [f"gather {i}" for i in (*order, *reversed(order))], "the last unit twice in a row: it was freed"

    # The measurement: three volumes of parameters, where data parallel sends two.
    padded = sum(4 * r["pieces"][i].numel() for r in found for i in range(UNITS))
    per_step = found[0]["sent"] // STEPS
    print(f"bytes sent per rank and step: {per_step} = 3 (n - 1) / n of {padded} bytes of parameters")
    assert per_step == 3 * (ranks - 1) * padded // ranks


if __name__ == "__main__":
    main()
