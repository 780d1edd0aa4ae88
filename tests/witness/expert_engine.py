"""An engine with an expert axis, by hand, right but for the method that a published fault overrides.

mesh         replica=2 shard=2: shard is the expert axis, with two experts a rank; replica has the same experts again
forward      tokens are gathered over the expert axis, each rank computes its own experts, the outputs are reduced and
             scattered; the backward goes the other way round
gradients    dense parameters are summed over all ranks, experts over replica alone: they have seen all tokens
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from silent_bug_jobs import TOKENS, WIDTH, num_targets, text
from silent_bug_jobs import loss_sum as cross_entropy
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.referee.witness.judgement import Judgement

EXPERTS, TOP, STEPS = 4, 2, 2
RARE = 10
"""A token that alone goes to the last expert; sample 0 of step 0 has it."""
BALANCE, Z, SCALING = 1.0, 0.02, 4.0
EXPERT, ALL, REPLICA = ("shard",), ("replica", "shard"), ("replica",)
MESH, RANKS, WAYS = "replica=2 shard=2", 4, 2
Send = Callable[[Comm, Tensor], Tensor]


class Model(nn.Module):
    """An embedding, a router, the best two of four experts, one that is shared, a head; and the router's losses.

    Args:
        whole_batch: the balance is that of the whole batch, not of each sequence.
        rate: of a bias that makes experts chosen less often, or more, in the next step; it has no gradient.
    """

    bias: Tensor

    def __init__(self, *, whole_batch: bool = False, rate: float = 0.0) -> None:
        super().__init__()
        self.whole_batch, self.rate = whole_batch, rate
        self.embed, self.gate = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(e): nn.Linear(WIDTH, WIDTH) for e in range(EXPERTS)})
        self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        with torch.no_grad():
            self.embed.weight[:, 0] = 0.0
            self.embed.weight[RARE, 0] = 4.0
            self.gate.weight[-1] = torch.tensor([3.0] + [0.0] * (WIDTH - 1))
            self.gate.bias[-1] = -5.0
        self.engine: Engine | None = None
        self.router_loss = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        whole = self if self.engine is None else self.engine
        x = self.embed(tokens)
        logits = self.gate(x)
        share = logits.softmax(-1)
        chosen = (share + self.bias).topk(TOP).indices
        often = F.one_hot(chosen, EXPERTS).to(share.dtype).sum(2)
        if self.rate and torch.is_grad_enabled():
            counts = whole.over_batch(often.sum((0, 1)))
            self.bias = self.bias + self.rate * (counts.mean() - counts).sign()
        self.router_loss = whole.balance(share, often) + whole.z(logits)
        y = whole.mixed(x.flatten(0, 1), share.gather(-1, chosen).flatten(0, 1), chosen.flatten(0, 1))
        return self.head(x + y.view_as(x))  # type: ignore[no-any-return]

    def over_batch(self, counts: Tensor) -> Tensor:
        """Counts of the whole batch, from those of the sequences that are here."""
        return counts

    def balance(self, share: Tensor, often: Tensor) -> Tensor:
        """Choices of an expert times its mean probability, [samples, time, experts]; a sum over sequences."""
        each = often.mean(1)
        if self.whole_batch:
            counts = (self if self.engine is None else self.engine).over_batch(often.sum((0, 1)))
            each = TOP * counts / counts.sum()
        return BALANCE * (each * share.mean(1)).sum()

    def z(self, logits: Tensor) -> Tensor:
        return Z * logits.logsumexp(-1).square().sum()

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.shared(x) + self.routed(x, weights, chosen)  # type: ignore[no-any-return]

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Runs the experts that are here on tokens [n, width], of which each goes to ``chosen`` [n, TOP]."""
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            token, slot = (chosen == int(name)).nonzero(as_tuple=True)
            y = y.index_add(0, token, SCALING * expert(x[token]) * weights[token, slot, None])
        return y


def batch(step: int) -> dict[str, Tensor]:
    found = text(step, RARE)
    if not step:
        found["tokens"][0, 1] = RARE
    return found


def loss_sum(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model, batch) + model.router_loss  # type: ignore[no-any-return]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class _Sent(torch.autograd.Function):
    """Rows that a collective sends; the backward sends gradients by the other one, its transpose."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm, there: Send, back: Send) -> Tensor:
        ctx.comm, ctx.back = comm, back
        return there(comm, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(ctx.comm, gradient), None, None, None


def gathered(comm: Comm, rows: Tensor, axes: Sequence[str] = EXPERT) -> Tensor:
    ways = WAYS if axes == EXPERT else RANKS
    whole = rows.new_empty(len(rows) * ways, *rows.shape[1:])
    comm.all_gather(whole, rows.contiguous(), axes).wait()
    return whole


def scattered(comm: Comm, rows: Tensor) -> Tensor:
    mine = rows.new_empty(len(rows) // WAYS, *rows.shape[1:])
    comm.reduce_scatter(mine, rows.contiguous(), EXPERT).wait()
    return mine


class Engine:
    """One rank of it; a fault is a subclass."""

    def __init__(self, model: Model, comm: Comm, clip: float | None) -> None:
        self.model, self.comm, self.clip = model, comm, clip
        self.place = comm.mesh.index(comm.rank, EXPERT)
        model.engine = self
        for name in list(model.experts):
            if int(name) // (EXPERTS // WAYS) != self.place:
                del model.experts[name]
        self.optimizer = adam(model.parameters())

    # ---- the forward

    def over_batch(self, counts: Tensor) -> Tensor:
        return self.add(counts.clone(), ALL)

    def balance(self, share: Tensor, often: Tensor) -> Tensor:
        return self.model.balance(share, often)

    def z(self, logits: Tensor) -> Tensor:
        return self.model.z(logits)

    def gather(self, rows: Tensor) -> Tensor:
        return _Sent.apply(rows, self.comm, gathered, scattered)  # type: ignore[no-any-return]

    def weights(self, weights: Tensor) -> Tensor:
        return self.gather(weights)

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        everyones = self.gather(x), self.weights(weights), gathered(self.comm, chosen)
        return self.model.shared(x) + _Sent.apply(self.experts(*everyones), self.comm, scattered, gathered)  # type: ignore[no-any-return]

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.model.routed(x, weights, chosen)

    # ---- the step

    def before_step(self, step: int) -> None: ...

    def step(self, batches: Sequence[Mapping[str, Tensor]], count: int) -> None:
        self.optimizer.zero_grad()
        for one in batches:
            (loss_sum(self.model, one) / count).backward()
        for name, p in self.model.named_parameters():
            self.reduce(name, p)
        if self.clip is not None:
            self.clip_by(self.clip)
        self.optimizer.step()

    def reduce(self, name: str, p: nn.Parameter) -> None:
        self.add(p.grad, REPLICA if name.startswith("experts") else ALL)  # type: ignore[arg-type]

    def add(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        self.comm.all_reduce(tensor, axes).wait()
        return tensor

    def squares(self, experts: bool) -> Tensor:
        """The norm of the gradients of the dense parameters, or of the experts that are here."""
        named = [(n, p.grad) for n, p in self.model.named_parameters() if n.startswith("experts") == experts]
        return torch.stack([g.square().sum() for _, g in named if g is not None]).sum()

    def norm(self) -> Tensor:
        return (self.squares(False) + self.add(self.squares(True), EXPERT)).sqrt()

    def clip_by(self, limit: float) -> None:
        factor = (limit / self.norm()).clamp(max=1.0)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)


def judged(
    engine: type[Engine],
    folder: Path,
    *,
    microbatches: int = 1,
    clip: float | None = None,
    deadline: float = 30,
    **model: Any,
) -> Judgement:
    """The judgement of a few steps of an engine, on threads; ``model`` are the arguments of ``Model``."""
    torch.manual_seed(1)
    whole = Model(**model)

    def body(comm: Comm) -> None:
        made = engine(deepcopy(whole), comm, clip)
        first, parts = comm.rank * microbatches, RANKS * microbatches
        with plait.witness(made.model, made.optimizer, folder, rank=comm.rank, ranks=RANKS):
            for step in range(STEPS):
                made.before_step(step)
                whole_batch = batch(step)
                own = [{k: v.chunk(parts)[first + m] for k, v in whole_batch.items()} for m in range(microbatches)]
                made.step(own, num_targets(whole_batch))

    plait.run_threads(MESH, body, deadline=deadline, sanitize=False)
    job = plait.UserJob(partial(Model, **model), loss_sum, batch, num_targets, adam)
    return plait.judge(job, folder, clip=clip, steps=STEPS)
