"""Lesson 10: ZeRO-1, by taking pointers away from a lazy optimizer.

The idea.  Data parallel makes the same update n times, and keeps the same optimizer state n times: with Adam two
numbers for each parameter, half of all memory.  Once is enough.  Optimizer state is lazy (lesson 1): it appears for a
parameter in the first step that updates it.  So take the pointers away: give each rank's optimizer only the
parameters that this rank *owns*.  It makes no state for parameters that it does not see.  After the step each owner
sends its new values to the others.

There are two ways to own.  By whole tensors: any optimizer works, but shares are uneven.  By elements: all parameters
are laid end to end in one flat vector, cut into n equal pieces.  That is even, but right only if the optimizer treats
each element alone (SGD and Adam do; Adafactor and Muon look at whole matrices).

Predict before you run it, with four ranks:
  1. Which share of Adam's state does each rank hold, by whole tensors?  By elements?
  2. A rank discards gradient sums of parameters that it does not own.  Which collective of lesson 5 never brings them?
  3. Adafactor on flat pieces: does it crash?

You need lesson 1 (lazy state), lesson 5 (reduce-scatter, all-gather) and lesson 9.  More: docs/guide/extending.md.

    plait lesson run 10
"""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import plait

WIDTH, SAMPLES, STEPS = 64, 48, 3
MESH = "shard=4"
RANKS, WHY = (1, 2, 4), "samples and weights are cut evenly"
AXIS = ("shard",)
torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(6)))
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def backward(model: nn.Module, comm: plait.Comm) -> None:
    x, y = X.chunk(comm.world_size)[comm.rank], Y.chunk(comm.world_size)[comm.rank]
    (model(x) - y).square().sum().backward()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.numel() * 4 for s in optimizer.state.values() for key, t in s.items() if key != "step")


# 1. By whole tensors.  The wrapper passes a shorter list on; everything else follows from that.


def by_tensors(comm: plait.Comm, make: Make = adam) -> dict:
    model = copy.deepcopy(MODEL)
    parameters = list(model.parameters())
    owner = {p: i % comm.world_size for i, p in enumerate(parameters)}
    mine = [p for p in parameters if owner[p] == comm.rank]
    optimizer = make(mine)  # no pointer, no state
    for _ in range(STEPS):
        model.zero_grad()
        backward(model, comm)
        for p in parameters:
            comm.all_reduce(p.grad, AXIS).wait()
            p.grad.mul_(1 / SAMPLES)
        optimizer.step()
        for p in parameters:
            comm.broadcast(p.detach(), AXIS, src=owner[p]).wait()
    return {"parameters": flat(parameters), "state": state_bytes(optimizer), "sent": comm.ledger.sent}


# 2. By elements.  A rank needs only its piece of the summed gradient: reduce-scatter, update, all-gather.


def body(comm: plait.Comm, make: Make = adam) -> dict:
    model = copy.deepcopy(MODEL)
    whole = flat(model.parameters())
    piece = nn.Parameter(whole.chunk(comm.world_size)[comm.rank].clone())
    optimizer = make([piece])
    for _ in range(STEPS):
        model.zero_grad()
        backward(model, comm)
        piece.grad = torch.empty_like(piece)
        comm.reduce_scatter(piece.grad, flat(p.grad for p in model.parameters()), AXIS).wait()
        piece.grad.mul_(1 / SAMPLES)
        optimizer.step()
        comm.all_gather(whole, piece.detach(), AXIS).wait()
        nn.utils.vector_to_parameters(whole, model.parameters())
    return {"parameters": whole, "state": state_bytes(optimizer), "sent": comm.ledger.sent}


# 3. Plain data parallel and plait's row ``zero1``, for comparison.


def ddp(comm: plait.Comm, make: Make = adam) -> dict:
    model = copy.deepcopy(MODEL)
    optimizer = make(model.parameters())
    for _ in range(STEPS):
        model.zero_grad()
        backward(model, comm)
        for p in model.parameters():
            comm.all_reduce(p.grad, AXIS).wait()
            p.grad.mul_(1 / SAMPLES)
        optimizer.step()
    return {"parameters": flat(model.parameters()), "state": state_bytes(optimizer), "sent": comm.ledger.sent}


def engine(comm: plait.Comm, make: Make = adam) -> dict:
    model = copy.deepcopy(MODEL)
    optimizer = make(model.parameters())
    ours = plait.Engine(model, comm, strategy="zero1", optimizer=optimizer)
    x, y = X.chunk(comm.world_size)[comm.rank], Y.chunk(comm.world_size)[comm.rank]
    for _ in range(STEPS):
        ours.backward((model(x) - y).square().sum(), count=len(x))
        optimizer.step()
    return {"parameters": flat(model.parameters()), "state": ours.placed.bytes_held()["optimizer"]}


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    mesh = f"shard={ranks}"
    full = plait.run_threads(mesh, ddp)
    tensors, elements, ours = (plait.run_threads(mesh, each) for each in (by_tensors, body, engine))

    # Prediction 1: six matrices on four ranks are 2, 2, 1, 1 by tensors; by elements each has a quarter.
    print("bytes of Adam's state, data parallel:", [r["state"] for r in full])
    print("by whole tensors:                    ", [r["state"] for r in tensors])
    print("by elements:                         ", [r["state"] for r in elements])
    matrix = 2 * 4 * WIDTH * WIDTH
    assert [r["state"] for r in tensors] == [len(range(rank, 6, ranks)) * matrix for rank in range(ranks)]
    if 6 * WIDTH * WIDTH % ranks == 0:
        assert all(r["state"] == full[0]["state"] // ranks == o["state"] for r, o in zip(elements, ours, strict=True))

    # The same parameters, to the bit, on every rank: whole tensors, elements, plait's row, plain data parallel.
    for found in (tensors, elements, ours):
        assert all(torch.equal(r["parameters"], full[0]["parameters"]) for r in found)
    print(
        f"after {STEPS} steps: data parallel, both ways by hand and the row zero1 have the same parameters, to the bit"
    )

    # Prediction 2: reduce-scatter.  It sends half of an all-reduce; the all-gather of parameters is the other half.
    print("bytes sent per rank, data parallel:", full[0]["sent"], " by elements:", [r["sent"] for r in elements])
    assert all(r["sent"] == full[0]["sent"] for r in elements), "ZeRO-1 costs no byte more"
    print("by whole tensors:", [r["sent"] for r in tensors], "(all-reduce and a broadcast from each owner)")
    broadcasts = [STEPS * len(range(rank, 6, ranks)) * (ranks - 1) * 4 * WIDTH * WIDTH for rank in range(ranks)]
    assert [r["sent"] for r in tensors] == [full[0]["sent"] + sent for sent in broadcasts]

    # Prediction 3: it does not crash.  It computes something else, because it never sees a matrix.
    right = plait.run_threads(mesh, lambda comm: ddp(comm, adafactor))[0]["parameters"]
    whole = plait.run_threads(mesh, lambda comm: by_tensors(comm, adafactor))[0]["parameters"]
    pieces = plait.run_threads(mesh, lambda comm: body(comm, adafactor))[0]["parameters"]
    print(f"Adafactor by whole tensors: off by {(whole - right).abs().max():.0e}", end="; ")
    print(f"on flat pieces: off by {(pieces - right).abs().max():.0e}, without an error")
    assert torch.equal(whole, right) and (pieces - right).abs().max() > 1e-4
    if ranks > 1:
        try:
            plait.run_threads(mesh, lambda comm: engine(comm, adafactor))
            raise AssertionError("Adafactor on pieces was not refused")
        except ValueError as error:
            print("plait refuses Adafactor on pieces:", str(error).partition(". ")[0])


if __name__ == "__main__":
    main()
