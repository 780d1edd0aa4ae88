"""Lesson 15: tensor parallel, forward and backward.

The idea.  One matrix product is spread over ranks that all see the same samples.  Cut the *first* matrix by rows of
its weight (``column``: output features) and the *second* by columns (``row``: input features).  Between them each
rank works on its own features, and nothing is sent.  The second product gives each rank a term of a sum.

    x ---enter---> [x W1_r^T] -> act -> [h_r W2_r^T] ---leave---> y = sum over ranks
    backward:  enter sums dx over the ranks;  leave passes dy on as it is

*Enter* does nothing forward and an all-reduce backward; *leave* does an all-reduce forward and nothing backward.
They mirror each other, and tensor parallelism is the art of placing them.  Attention is cut by whole heads,
since each head works alone.  Embedding and head are cut by vocabulary: a rank looks up the tokens that it holds, with
zeros for the others, and the loss needs three numbers per token, never the whole logits.

Predict before you run it, with a block of attention and MLP, an embedding, a head and a loss:
  1. How many all-reduces does the forward make?  How many the backward?
  2. ``enter`` is forgotten.  The loss is right.  Which gradients are wrong?
  3. A shard of W2 has 8 of 32 input features.  Which fan-in decides its initial values?

    plait lesson run 15
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

import plait

MESH = "tensor=2"
RANKS, WHY = (1, 2, 4), "four heads are dealt out whole"
AXIS = ("tensor",)
BATCH, TIME, WIDTH, HEADS, HIDDEN, VOCABULARY = 2, 5, 16, 4, 32, 12
torch.manual_seed(0)


def draw(rows: int, columns: int) -> Tensor:
    """Initial values of a *whole* matrix; a rank takes its piece of them.  So the fan-in is the full one."""
    return torch.randn(rows, columns, dtype=torch.float64) / math.sqrt(columns)


CUT = {"embed": 0, "q": 0, "k": 0, "v": 0, "out": 1, "up": 0, "down": 1, "head": 0}
"""The dim in which each matrix is cut: 0 is column (or vocabulary), 1 is row."""
WHOLE = {name: draw(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
WHOLE |= {"up": draw(HIDDEN, WIDTH), "down": draw(WIDTH, HIDDEN)}
WHOLE |= {"embed": draw(VOCABULARY, WIDTH), "head": draw(VOCABULARY, WIDTH)}
TOKENS, TARGETS = torch.randint(VOCABULARY, (BATCH, TIME)), torch.randint(VOCABULARY, (BATCH, TIME))


# 1. Two functions with a forward and a backward.  The rest is the model's ordinary code.


class Enter(torch.autograd.Function):
    """Forward: nothing.  Backward: the sum over the ranks, since each used x for its own features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: plait.Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        ctx.comm.all_reduce(grad, AXIS).wait()
        return grad, None


class Leave(torch.autograd.Function):
    """Forward: the sum over the ranks.  Backward: nothing, since each rank's term has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: plait.Comm) -> Tensor:
        x = x.contiguous().clone()
        comm.all_reduce(x, AXIS).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# 2. The model.  ``w`` has this rank's pieces; on one rank they are whole, and the code is the same.


def loss(w: dict[str, Tensor], comm: plait.Comm, enters: bool = True) -> Tensor:
    def enter(x: Tensor) -> Tensor:
        return Enter.apply(x, comm) if enters else x

    def leave(x: Tensor) -> Tensor:
        return Leave.apply(x, comm)

    def mine(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each id's place in this rank's part of the vocabulary, and whether it is there."""
        here = ids - comm.rank * len(w["head"])
        inside = (here >= 0) & (here < len(w["head"]))
        return here.clamp(0, len(w["head"]) - 1), inside

    rows, inside = mine(TOKENS)
    x = leave(w["embed"][rows] * inside[..., None])

    heads = HEADS // comm.world_size
    h = enter(x)
    q, k, v = ((h @ w[name].T).unflatten(-1, (heads, -1)).transpose(1, 2) for name in "qkv")
    mask = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).masked_fill(mask, -math.inf)
    x = x + leave((scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["out"].T)

    x = x + leave(torch.relu(enter(x) @ w["up"].T) @ w["down"].T)

    logits = enter(x) @ w["head"].T  # of this rank's part of the vocabulary
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, AXIS, "max").wait()
    total = leave((logits - largest[..., None]).exp().sum(-1))
    rows, inside = mine(TARGETS)
    target = leave(logits.gather(-1, rows[..., None])[..., 0] * inside)
    return (total.log() + largest - target).sum()


def body(comm: plait.Comm, enters: bool = True) -> dict:
    w = {n: t.chunk(comm.world_size, CUT[n])[comm.rank].clone().requires_grad_() for n, t in WHOLE.items()}
    value = loss(w, comm, enters)
    forward = len(comm.ledger)
    value.backward()
    return {
        "loss": value.detach(),
        "gradients": {name: t.grad for name, t in w.items()},
        "messages": (forward, len(comm.ledger) - forward),
        "sent": comm.ledger.sent,
    }


def wrong(found: list[dict], expected: dict[str, Tensor]) -> list[str]:
    """Returns the matrices whose gradient, joined from the pieces, is not the expected one."""
    off = []
    for name, whole in expected.items():
        gradient = torch.cat([rank["gradients"][name] for rank in found], CUT[name])
        if (gradient - whole).abs().max() > 1e-12:
            off.append(name)
    return off


# 3. The same in plait: stock layers, and a plan in words.


def engine(comm: plait.Comm) -> float:
    torch_mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
    with torch.no_grad():
        torch_mlp.double()[0].weight.copy_(WHOLE["up"])
        torch_mlp[2].weight.copy_(WHOLE["down"])
    optimizer = torch.optim.SGD(torch_mlp.parameters(), lr=0.1)
    ours = plait.Engine(torch_mlp, comm, tensor_plan={"0": "column", "2": "row"}, strategy="ddp", optimizer=optimizer)
    for _ in range(2):  # the second loss shows that the first step's gradients were right
        ours.backward(torch_mlp(WHOLE["q"]).square().sum(), count=WIDTH)
        optimizer.step()
    return ours.last.loss


def main(ranks: int = 2) -> None:
    torch.set_num_threads(1)
    alone = plait.run_threads("tensor=1", body)[0]
    found = plait.run_threads(f"tensor={ranks}", body)
    assert all(torch.equal(rank["loss"], found[0]["loss"]) for rank in found)
    print(f"loss {alone['loss']:.6f} in one process, {found[0]['loss']:.6f} on {ranks} ranks")
    assert abs(alone["loss"] - found[0]["loss"]) < 1e-12 and not wrong(found, alone["gradients"])
    assert len(CUT) == len(alone["gradients"])
    print(f"all {len(CUT)} gradients, put together from their pieces, agree within 1e-12")

    # Prediction 1: six (embedding, attention, MLP, and maximum, sum and target of the loss) and three (each enter).
    print("all-reduces forward and backward:", found[0]["messages"])
    assert ranks == 1 or found[0]["messages"] == (6, 3)

    # Prediction 2: those of all layers before the last cut product, because each rank has only its share of dx.
    without = plait.run_threads(f"tensor={ranks}", lambda comm: body(comm, enters=False))
    off = wrong(without, alone["gradients"])
    print("find the fault, no enter: the loss is the same, wrong gradients in", ", ".join(off))
    assert torch.equal(without[0]["loss"], found[0]["loss"])
    assert ranks == 1 or ("head" not in off and {"embed", "q", "k", "v", "out", "up", "down"} == set(off))

    # Prediction 3: 32.  A shard that draws its own values with its own fan-in would start twice as large.
    down = WHOLE["down"]
    piece = down.chunk(4, 1)[0]
    own = draw(*piece.shape)
    print(
        f"standard deviations: down {down.std():.3f}, its piece {piece.std():.3f}, a piece drawn alone {own.std():.3f}"
    )
    assert all(abs(w.std() - 1 / math.sqrt(HIDDEN)) < 0.05 for w in (down, piece)) and own.std() > 1.5 * piece.std()
    assert piece.size(1) == 8

    one, cut = plait.run_threads("tensor=1", engine)[0], plait.run_threads(f"tensor={ranks}", engine)
    print(f"plait.Engine with a tensor plan: loss of the second step {cut[0]:.6f}, in one process {one:.6f}")
    assert all(abs(value - one) < 1e-12 * one for value in cut)


if __name__ == "__main__":
    main()
