"""Shared by the engine's tests: small models with distinct weights, ragged batches, and plain PyTorch as the truth.

    plain(template, ...)            one process, the full batch, autograd and a stock optimizer: nothing of plait
    train(template, mesh, row, ...) the same model and the same samples on thread ranks
    agree(ranks, truth)             every loss, gradient, norm, parameter and buffer, whole tensors

Everything is fp64, so that the remaining difference is rounding and can be limited to ~1e-12.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh

ROWS = tuple(TABLE)
SPLIT_ROWS = ("zero3", "zero3_keep", "hsdp", "psdp", "hpz")
"""Rows that split parameters, so that units are gathered and freed."""
WIDTH = 5

Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4)


def distinct(model: nn.Module, seed: int = 0) -> nn.Module:
    """fp64, every weight its own number: equal layers would hide a swap of two of them."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


class Made(nn.Module):
    """Named parts, and a forward that is a function of the module and of what it is called with."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Block(nn.Module):
    """Norm, two linears with odd widths, residual."""

    def __init__(self, width: int = WIDTH, hidden: int = 11) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + self.down(torch.tanh(self.up(self.norm(x_BC))))


class Net(nn.Module):
    """A first linear, blocks, a norm and a scale with the model itself, a head."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.first(x_BC))) * self.scale)

    def through(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = block(x_BC)
        return x_BC


def net(num_blocks: int = 3) -> nn.Module:
    return distinct(Net(num_blocks))


def batches(steps: int = 2, samples: int = 13, width: int = WIDTH) -> list[Batch]:
    """Global batches; the mask drops samples, so ranks and microbatches hold different counts."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(steps):
        x = torch.randn(samples, width, generator=generator, dtype=torch.float64)
        mask = (torch.rand(samples, generator=generator) < 0.7).double()
        mask[0] = 1
        made.append({"x": x, "mask": mask})
    return made


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["x"])
    return (((out - 0.5) ** 2).flatten(1).sum(1) * batch["mask"]).sum()


def count(batch: Batch) -> int:
    return int(batch["mask"].sum())


def deal(batch: Batch, mesh: Mesh, rank: int, num_microbatches: int) -> list[Batch]:
    """A rank's microbatches: contiguous samples, data rank by data rank, uneven where they must be."""
    parts = mesh.data_size * num_microbatches
    pieces = {name: tensor.tensor_split(parts) for name, tensor in batch.items()}
    first = mesh.data_rank(rank) * num_microbatches
    return [{name: piece[first + m] for name, piece in pieces.items()} for m in range(num_microbatches)]


@dataclass
class Run:
    """One rank's record, or the single process's."""

    losses: list[float] = field(default_factory=list)
    local: list[tuple[float, ...]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[Any, Tensor]] = field(default_factory=list)
    """Whole by name in the single process, pieces by (name, start, stop) on a rank."""
    state: dict[str, Tensor] = field(default_factory=dict)
    seen: Any = None
    """The result of the test's own ``look``."""


def plain(
    template: nn.Module,
    data: list[Batch],
    optimizer: MakeOptimizer = adamw,
    loss: Callable[[nn.Module, Batch], Tensor] = loss_sum,
    clip: float | None = None,
) -> Run:
    """The loop of every PyTorch script, on the whole batch."""
    model, record = copy.deepcopy(template), Run()
    stepper = optimizer(model.parameters())
    for batch in data:
        stepper.zero_grad()
        value = loss(model, batch) / count(batch)
        value.backward()
        record.losses.append(value.item())
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        record.gradients.append(grads)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            record.norms.append(norm.item())
        stepper.step()
    record.state = copy.deepcopy(model.state_dict())
    return record


def train(
    template: nn.Module,
    mesh: str,
    row: str,
    data: list[Batch],
    optimizer: MakeOptimizer = adamw,
    loss: Callable[[nn.Module, Batch], Tensor] = loss_sum,
    microbatches: int = 1,
    look: Callable[[Engine], Any] | None = None,
    **settings: Any,
) -> list[Run]:
    """The same on thread ranks, each with its own copy of the model."""
    shape = Mesh.parse(mesh)

    def body(comm: Comm) -> Run:
        record = Run()

        def listen(event: str, engine: Engine) -> None:
            if event == "agreed":
                pieces = {
                    (o.name, o.run.start, o.run.stop): o.gradient.clone().view(-1)
                    for o in engine.placed.owned
                    if engine.reducer.have_gradient[o.name]
                }
                record.gradients.append(pieces)

        model = copy.deepcopy(template)
        engine = Engine(
            model,
            comm,
            strategy=row,
            optimizer=optimizer(model.parameters()),
            loss_fn=loss,
            count_fn=count,
            listener=listen,
            **{"bucket": 0, **settings},  # a model for tests is small, and would be one bucket
        )
        for batch in data:
            result = engine.step(deal(batch, shape, comm.rank, microbatches))
            record.losses.append(result.loss)
            record.local.append(result.local_losses)
            record.norms.append(result.grad_norm)
        record.state = engine.full_state_dict()
        record.seen = look(engine) if look else None
        return record

    return run(shape, body, deadline=20)


def whole_gradients(ranks: list[Run], step: int, truth: Run) -> dict[str, Tensor]:
    """The ranks' pieces laid together; copies of a piece must be equal, and no element may be missing."""
    found: dict[str, Tensor] = {}
    for record in ranks:
        for (name, start, stop), piece in record.gradients[step].items():
            nothing = torch.full((truth.state[name].numel(),), float("nan"), dtype=piece.dtype)
            whole = found.setdefault(name, nothing)
            there = whole[start:stop]
            assert bool((there.isnan() | (there == piece)).all()), f"copies of {name}[{start}:{stop}] differ"
            whole[start:stop] = piece
    return {name: whole.view(truth.state[name].shape) for name, whole in found.items()}


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-11) -> bool:
    """max|a - b| <= tolerance * max(1, max|b|)"""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (ours, theirs)
    if not theirs.numel():
        return True
    gap = (ours.double() - theirs.double()).abs().max().item()
    return gap <= tolerance * max(1.0, theirs.double().abs().max().item())


def agree(ranks: list[Run], truth: Run, tolerance: float = 1e-11) -> None:
    """Every rank's run is the single process's."""
    assert len(truth.losses) > 0
    for rank, record in enumerate(ranks):
        losses = torch.tensor(record.losses, dtype=torch.float64)
        wanted = torch.tensor(truth.losses, dtype=torch.float64)
        assert close(losses, wanted, tolerance), f"losses of rank {rank}: {losses} for {wanted}"
        if truth.norms:
            norms = torch.tensor(record.norms, dtype=torch.float64)
            assert close(norms, torch.tensor(truth.norms, dtype=torch.float64), tolerance), norms
        assert list(record.state) == list(truth.state), "the state's names and their order are the model's own"
        for name, value in truth.state.items():
            assert close(record.state[name], value, tolerance), f"{name} on rank {rank}"
    for step, gradients in enumerate(truth.gradients):
        found = whole_gradients(ranks, step, truth)
        filled = {name for name, gradient in gradients.items() if gradient.numel()}
        assert found.keys() == filled, f"gradients of step {step}: {found.keys() ^ filled}"
        for name in filled:
            assert close(found[name], gradients[name], tolerance), f"gradient of {name}, step {step}"
