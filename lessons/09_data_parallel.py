"""Lesson 9: data parallel.

The idea.  Every rank has the whole model and its own share of the samples.  Each does forward and backward alone; then
the gradients are summed over the ranks, and all make the same update.  If all began with the same parameters, all end
with the same parameters: no parameter is ever sent.  The sum can start as soon as one gradient is there, while the
backward of earlier layers still runs; a hook on each parameter starts it, and the update waits for all of them.

A loss is a sum over samples here, divided once, by the number of samples of all ranks.  A mean of the ranks' means is
wrong as soon as two ranks have different numbers of samples.

Predict before you run it, with four ranks:
  1. Rank 0 prints its own loss, rank 1 prints its own.  Are they equal?  Are their gradients, after the sum?
  2. A script has ``if torch.cuda.is_available(): all_reduce(...)``.  What happens on this CPU?  Does it crash?
  3. 48 samples on 4 ranks, then on 2, then on 1: are the trained parameters the same?

You need lesson 4 (ranks, ``comm``), lesson 5 (all-reduce) and lesson 6 (its bytes).  plait calls the axis of the data
ranks ``shard``, because the rows of later lessons cut state over it; data parallel cuts the samples only.  More:
docs/guide/coming-from.md.

    plait lesson run 9
    plait lesson run 9 --ranks 2
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import plait

WIDTH, SAMPLES, STEPS = 32, 48, 4
MESH = "shard=4"
RANKS, WHY = (1, 2, 4), "samples and gradients are cut evenly"
AXIS = ("shard",)
torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# 1. DDP from nothing: a hook that sums each gradient over the ranks when autograd has finished it.


def all_reduce_gradients(model: nn.Module, comm: plait.Comm) -> list:
    """Returns the list to which each backward adds its unfinished sums."""
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: works.append(comm.all_reduce(p.grad, AXIS)))
    return works


def only_if_cuda(model: nn.Module, comm: plait.Comm) -> list:
    return all_reduce_gradients(model, comm) if comm.device.type == "cuda" else []


def body(comm: plait.Comm, sync: Callable = all_reduce_gradients) -> dict:
    model = copy.deepcopy(MODEL)  # the same on all ranks; a real program seeds, or broadcasts from rank 0
    works, losses = sync(model, comm), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = X.chunk(comm.world_size)[comm.rank], Y.chunk(comm.world_size)[comm.rank]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_sum(model, x, y)  # @inspect model[0][0].weight.grad
        losses.append(loss.item())
        loss.backward()
        while works:
            works.pop().wait()
        for p in model.parameters():
            p.grad.mul_(1 / SAMPLES)  # once, after the sum, by the samples of all ranks
        optimizer.step()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    return {"losses": losses, "grads": grads, "parameters": flat(model), "sent": comm.ledger.sent}


# 2. The same in plait: the engine replaces the hooks.  Its row ``ddp`` is data parallel.


def engine(comm: plait.Comm) -> dict:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = plait.Engine(model, comm, strategy="ddp", optimizer=optimizer)
    x, y = X.chunk(comm.world_size)[comm.rank], Y.chunk(comm.world_size)[comm.rank]
    for _ in range(STEPS):
        loss = loss_sum(model, x, y)
        ours.backward(loss, count=len(x))
        optimizer.step()
    return {"loss": loss.item(), "parameters": flat(model), "mean": ours.last.loss}


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    alone = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_sum(alone, X, Y).backward()
        for p in alone.parameters():
            p.grad.mul_(1 / SAMPLES)
        optimizer.step()

    # Prediction 1: losses differ, because the samples do; gradients are sums of the same numbers, so they do not.
    found = plait.run_threads(f"shard={ranks}", body)
    last = [r["losses"][-1] for r in found]
    print("each rank's own loss:", [round(loss, 4) for loss in last])
    assert len(set(last)) == ranks
    for rank in found:
        assert torch.equal(rank["grads"], found[0]["grads"]) and torch.equal(rank["parameters"], found[0]["parameters"])
    print("gradients and parameters: the same bits on every rank")

    # Prediction 2: no crash, and every loss falls.  Each rank trains its own model.  Compare whole tensors.
    apart = plait.run_threads(f"shard={ranks}", lambda comm: body(comm, only_if_cuda))
    gap = max((r["parameters"] - apart[0]["parameters"]).abs().max().item() for r in apart)
    print(f"find the fault: summed only if there is CUDA, parameters drift apart by up to {gap:.3f}")
    assert (gap > 1e-3) == (ranks > 1) and all(r["losses"][-1] < r["losses"][0] for r in apart)

    # Prediction 3: the same except for rounding, since 48 terms are added in another order.
    for n in sorted({1, 2, 4, ranks}):
        by_hand = plait.run_threads(f"shard={n}", body)
        by_plait = plait.run_threads(f"shard={n}", engine)
        off = (by_hand[0]["parameters"] - flat(alone)).abs().max().item()
        print(f"ranks {n}: parameters differ from one process by {off:.0e}; by hand and plait.Engine: equal to the bit")
        assert off < 1e-5
        assert all(torch.equal(a["parameters"], b["parameters"]) for a, b in zip(by_hand, by_plait, strict=True))
        assert abs(by_plait[0]["mean"] - sum(r["losses"][-1] for r in by_hand) / SAMPLES) < 1e-5

    # The measurement: each step sends 2 (n - 1) / n of the gradients' bytes per rank (lesson 6), and nothing else.
    size = 4 * len(found[0]["grads"])
    per_step = found[0]["sent"] // STEPS
    print(f"bytes sent per rank and step: {per_step} = 2 (n - 1) / n of {size} bytes of gradients")
    assert per_step == 2 * (ranks - 1) * size // ranks and all(r["sent"] == STEPS * per_step for r in found)


if __name__ == "__main__":
    main()
