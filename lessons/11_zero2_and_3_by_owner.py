"""Lesson 11: ZeRO-2 and ZeRO-3, by layer owner.

The idea.  ZeRO-1 divided the optimizer state.  Gradients are next: once a layer's gradient is summed, only the
layer's owner needs it, so it is *reduced to the owner*, and the others free theirs at once (stage 2).  Then the
parameters: only the owner keeps the layer.  When its turn comes, the owner *broadcasts* it, all compute, and
all but the owner free it.  The backward needs it a second time (stage 3).

    forward    for each layer:            broadcast the layer | compute | free
    backward   for each layer, reversed:  broadcast the layer | compute | reduce its gradient to the owner | free both

A rank then holds its own layers, and one more at a time.

Predict before you run it, with four ranks and eight layers:
  1. How many layers does a rank hold at most during a step of stage 3?
  2. The backward loops ``for i in range(7, 0, -1)``.  Does the loss still fall?  Which layer shows the fault?
  3. How many bytes does stage 3 move, compared with data parallel's all-reduce?

You need lesson 5 (broadcast, reduce) and lesson 10.  plait's own stage 2 also joins small layers into messages of up to
1 MiB (``bucket``), so with layers as small as these its gradient buffer is larger than one layer.  With several
microbatches stage 3 repeats all of this for each of them.  More: docs/guide/prediction.md#what-a-row-costs.

    plait lesson run 11
"""

import torch
from torch import Tensor, nn

import plait

LAYERS, WIDTH, SAMPLES, STEPS = 8, 32, 48, 4
MESH = "shard=4"
RANKS, WHY = (1, 2, 4), "samples and weights are cut evenly"
AXIS = ("shard",)
torch.manual_seed(0)
WEIGHTS = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin() / 2


def layer(h: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(h @ weight.T)


def samples(comm: plait.Comm) -> tuple[Tensor, Tensor]:
    return X.chunk(comm.world_size)[comm.rank], Y.chunk(comm.world_size)[comm.rank]


# 1. Stage 2: all have all parameters; gradients go to their owners as soon as they are ready.


def zero2(comm: plait.Comm) -> dict:
    weights = [w.clone().requires_grad_() for w in WEIGHTS]
    owner = [i % comm.world_size for i in range(LAYERS)]
    optimizer = torch.optim.AdamW([w for i, w in enumerate(weights) if owner[i] == comm.rank], lr=1e-2)
    alive, most = 0, 0

    def to_owner(i: int, w: Tensor) -> None:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        comm.reduce(w.grad, AXIS, dst=owner[i]).wait()
        if owner[i] == comm.rank:
            w.grad.mul_(1 / SAMPLES)
        else:
            w.grad = None
            alive -= 1

    for i, w in enumerate(weights):
        w.register_post_accumulate_grad_hook(lambda w, i=i: to_owner(i, w))
    for _ in range(STEPS):
        h, y = samples(comm)
        for w in weights:
            h = layer(h, w)
        (h - y).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        alive = 0
        for i, w in enumerate(weights):
            comm.broadcast(w.detach(), AXIS, src=owner[i]).wait()
    return {"weights": [w.detach() for w in weights], "most gradients": most}


# 2. Stage 3: a rank has its own layers.  Autograd works on one layer at a time; the loop is ours.


def body(comm: plait.Comm, stop: int = -1) -> dict:
    owner = [i % comm.world_size for i in range(LAYERS)]
    mine = {i: WEIGHTS[i].clone().requires_grad_() for i in range(LAYERS) if owner[i] == comm.rank}
    optimizer = torch.optim.AdamW(mine.values(), lr=1e-2)
    losses, most = [], 0

    def borrow(i: int) -> Tensor:
        """Returns the layer's weight, received from its owner; it is freed when it is forgotten."""
        nonlocal most
        weight = mine[i].detach().clone() if i in mine else torch.empty(WIDTH, WIDTH)
        comm.broadcast(weight, AXIS, src=owner[i]).wait()
        most = max(most, len(mine) + (i not in mine))
        return weight.requires_grad_()

    for _ in range(STEPS):
        h, y = samples(comm)
        inputs = []
        with torch.no_grad():
            for i in range(LAYERS):
                inputs.append(h)  # one activation per layer is kept, and nothing else
                h = layer(h, borrow(i))
        losses.append((h - y).square().sum())
        gradient = 2 * (h - y)
        for i in range(LAYERS - 1, stop, -1):
            h, weight = inputs[i].requires_grad_(), borrow(i)
            gradient, for_weight = torch.autograd.grad(layer(h, weight), (h, weight), gradient)
            comm.reduce(for_weight, AXIS, dst=owner[i]).wait()
            if i in mine:
                mine[i].grad = for_weight.mul_(1 / SAMPLES)
        optimizer.step()
        optimizer.zero_grad()
    total = torch.stack(losses)
    comm.all_reduce(total, AXIS).wait()
    return {"mine": {i: w.detach() for i, w in mine.items()}, "losses": total, "most": most, "sent": comm.ledger.sent}


# 3. The same in plait: ``cut="tensor"`` gives whole tensors to owners.


def engine(comm: plait.Comm) -> list[Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)))
    with torch.no_grad():
        for block, w in zip(model, WEIGHTS, strict=True):
            block[0].weight.copy_(w)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = plait.Engine(model, comm, strategy="zero3", cut="tensor", optimizer=optimizer)
    x, y = samples(comm)
    for _ in range(STEPS):
        ours.backward((model(x) - y).square().sum(), count=len(x))
        optimizer.step()
    return list(ours.full_state_dict().values())


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    mesh = f"shard={ranks}"
    two, three, ours = (plait.run_threads(mesh, each) for each in (zero2, body, engine))
    together = {i: w for rank in three for i, w in rank["mine"].items()}

    # Both stages train the same weights, to the bit, and all eight layers have changed.
    for i in range(LAYERS):
        assert torch.equal(together[i], two[0]["weights"][i]) and not torch.equal(together[i], WEIGHTS[i])
        assert torch.equal(together[i], ours[0][i])
    print("stage 2 by hand, stage 3 by hand, and plait's zero3 by owner: the same weights, to the bit")
    losses = three[0]["losses"].tolist()
    print("losses of stage 3:", [round(v, 3) for v in losses])
    assert losses == sorted(losses, reverse=True)

    # Prediction 1: its own two, and one borrowed layer.
    print("layers held at once, rank by rank:", [r["most"] for r in three], f"of {LAYERS}")
    own = [len(range(rank, LAYERS, ranks)) for rank in range(ranks)]
    assert [r["most"] for r in three] == [n + (n < LAYERS) for n in own]
    print("gradients held at once in stage 2:", [r["most gradients"] for r in two], f"of {LAYERS}")
    assert all(r["most gradients"] <= n + 1 for r, n in zip(two, own, strict=True))

    # Prediction 2: it does, because seven layers learn.  Only layer 0, compared whole, shows the fault.
    short = plait.run_threads(mesh, lambda comm: body(comm, stop=0))
    stuck = [i for r in short for i, w in r["mine"].items() if torch.equal(w, WEIGHTS[i])]
    losses = short[0]["losses"].tolist()
    print("find the fault, range(7, 0, -1): losses", [round(v, 3) for v in losses], "stuck:", stuck)
    assert stuck == [0] and losses == sorted(losses, reverse=True)

    # Prediction 3: parameters twice and gradients once, instead of gradients there and back: 3 to 2.
    size = 4 * LAYERS * WIDTH * WIDTH
    sent = sum(r["sent"] for r in three) - ranks * 2 * (ranks - 1) * 4 * STEPS // ranks  # less the sum of losses
    ddp = STEPS * 2 * (ranks - 1) * size
    print(f"bytes sent by all ranks: {sent:,}; data parallel: {ddp:,}; ratio {sent / ddp if ddp else 1:g}")
    assert sent == STEPS * 3 * (ranks - 1) * size and (ranks == 1 or sent / ddp == 3 / 2)


if __name__ == "__main__":
    main()
