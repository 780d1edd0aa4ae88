"""Lesson 3: the manual split.

The idea.  A model that does not fit is cut in two: part 1 on rank 0, part 2 on rank 1.  Rank 0 sends its activation.  A
message carries values, never the graph that made them, so autograd ends at the hand-off, and the chain rule has to be
continued by hand:

    rank 0      x --> part 1 --> y                        y.backward(gradient)
                                 |  values                     ^
    -----------------------------+-----------------------------+----------------
                                 v                             |  values
    rank 1                     received --> part 2 --> loss.backward()
                                                       leaves received.grad

Predict before you run it:
  1. No gradient is sent back.  Does the loss still fall?
  2. ``requires_grad_()`` is forgotten on the received tensor.  What does torch say, and where?
  3. A colleague fixes that error with ``y.backward(torch.ones_like(y))``.  Which layers get wrong gradients?

    plait lesson run 3
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import plait

LAYERS, WIDTH, SAMPLES = 16, 12, 32
MESH = "pipe=2"
RANKS, WHY = range(1, 17), "each has at least one of 16 layers"
torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()
Gradients = dict[str, Tensor]


def loss_sum(y: Tensor) -> Tensor:
    return (y - Y).square().sum()


def slices(layers: int, stages: int) -> list[range]:
    """The layers of each stage; the first stages take one more if they do not divide evenly."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(sum(sizes[:s]), sum(sizes[: s + 1])) for s in range(stages)]


def gradients(model: nn.Module) -> Gradients:
    """Returns gradients by name; a slice of an nn.Sequential keeps the names of the whole."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(found: Gradients, expected: Gradients) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# 1. In one process, so that the hand-off is two lines that can be got wrong.


def hand_off(part1: nn.Module, part2: nn.Module, receive: Callable, give_back: Callable) -> Tensor:
    y = part1(X)
    received = receive(y)
    loss = loss_sum(part2(received))
    loss.backward()
    give_back(y, received)
    return loss.detach()


def right(y: Tensor) -> Tensor:
    return y.detach().requires_grad_()  # values, no graph, ready to collect a gradient


def back(y: Tensor, received: Tensor) -> None:
    y.backward(received.grad)


def nothing(y: Tensor, received: Tensor) -> None:
    return None


def ones(y: Tensor, received: Tensor) -> None:
    y.backward(torch.ones_like(y))


# 2. Two ranks, or any number: each has its slice of the layers and knows only its neighbours.


def body(comm: plait.Comm) -> Gradients:
    rank, last = comm.rank, comm.world_size - 1
    mine = slices(LAYERS, comm.world_size)[rank]
    part = copy.deepcopy(MODEL[mine.start : mine.stop])
    h = X
    if rank > 0:
        h = torch.empty(SAMPLES, WIDTH)
        comm.recv(h, rank - 1).wait()
        h.requires_grad_()
    y = part(h)
    if rank < last:
        comm.send(y.detach(), rank + 1)
        gradient = torch.empty_like(y)
        comm.recv(gradient, rank + 1).wait()
        y.backward(gradient)
    else:
        loss_sum(y).backward()
    if rank > 0:
        comm.send(h.grad, rank - 1)
    return gradients(part)


def main(ranks: int = 2) -> None:
    torch.set_num_threads(1)
    whole = copy.deepcopy(MODEL)
    loss = loss_sum(whole(X))
    loss.backward()
    expected = gradients(whole)

    def attempt(receive: Callable, give_back: Callable) -> tuple[Tensor, Gradients]:
        model = copy.deepcopy(MODEL)
        found = hand_off(model[:8], model[8:], receive, give_back)
        return found, gradients(model)

    found, grads = attempt(right, back)
    print(f"handed on and back by hand: loss {found:.4f}, all {len(grads)} gradients equal to the bit")
    assert torch.equal(found, loss) and same(grads, expected)

    # Prediction 1: it falls, since part 2 learns.  The loss shows nothing; the missing gradients do.
    found, grads = attempt(right, nothing)
    print(f"nothing handed back: the same loss {found:.4f}, gradients only for layers", layers_of(grads))
    assert torch.equal(found, loss) and layers_of(grads) == list(range(8, 16))

    # Prediction 2: at part 1's backward, because received.grad is None and y is no scalar.
    try:
        attempt(Tensor.detach, back)
        raise AssertionError("there was nothing to hand back")
    except RuntimeError as error:
        print(f"requires_grad_() forgotten: {error}")

    # Prediction 3: all layers of part 1.  The shapes are right, so no error is raised.
    _, grads = attempt(right, ones)
    wrong = {name: g for name, g in grads.items() if not torch.equal(g, expected[name])}
    print("ones handed back: gradients everywhere, wrong ones in layers", layers_of(wrong))
    assert grads.keys() == expected.keys() and layers_of(wrong) == list(range(8))

    # Any number of ranks gives the same bits, even if 16 layers do not divide evenly.
    for stages in sorted({2, 3, 5, ranks}):
        parts = plait.run_threads(f"pipe={stages}", body)
        together = {name: g for part in parts for name, g in part.items()}
        print(f"{stages} ranks with {[len(s) for s in slices(LAYERS, stages)]} layers: equal to the bit")
        assert same(together, expected)

    # The same in plait: a mesh with the axis pipe, and one call for the step.
    def stages(comm: plait.Comm) -> Gradients:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        count = {"loss_fn": lambda m, x: loss_sum(m(x)), "count_fn": lambda x: 1}
        engine = plait.Engine(model, comm, strategy="ddp", optimizer=optimizer, **count)
        engine.step([X])
        return engine.full_state_dict()

    start = MODEL.state_dict()
    for state in plait.run_threads(f"pipe={ranks}", stages):
        assert all(torch.equal(state[name], start[name] - expected[name]) for name in expected)
    print(f"plait.Engine on pipe={ranks}: after a step of SGD every parameter equals one process's, to the bit")

    # The measurement: the bytes sent.  One activation goes on, its gradient comes back, for any size of model.
    sent = plait.run_threads(MESH, lambda comm: (body(comm), comm.ledger.sent)[1])
    print(f"bytes sent per rank: {sent}; one activation has {4 * SAMPLES * WIDTH} bytes")
    assert sent == [4 * SAMPLES * WIDTH] * 2


def layers_of(names: Gradients) -> list[int]:
    return sorted({int(name.split(".")[0]) for name in names})


if __name__ == "__main__":
    main()
