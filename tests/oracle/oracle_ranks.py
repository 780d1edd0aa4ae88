"""What two ranks do for the oracle: train one model under torch's engines and under plait's rows.

Every contestant gets the same weights and, step by step, the same two halves of a global batch. Losses are
global means; parameters are whole, by the model's own names. Rank 0 writes everything to one file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from plait.comm import Comm
from plait.comm.process import ProcessComm
from plait.step import Engine
from plait.table.mesh import Mesh

RANKS, NUM_STEPS, SAMPLES, LENGTH, VOCABULARY, WIDTH = 2, 4, 4, 6, 41, 22
LEARNING_RATE = {"adamw": 1e-3, "sgd": 0.1}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": LEARNING_RATE["adamw"], "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": LEARNING_RATE["sgd"], "momentum": 0.9, "nesterov": True}),
}
Batch = tuple[Tensor, Tensor]
Outcome = tuple[list[float], dict[str, Tensor]]
Train = Callable[[nn.Module, str, list[Batch], Comm], Outcome]


class Block(nn.Module):
    """Norm, two linears with biases, residual: widths that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x_BTC))))
        return x_BTC + hidden


class TiedModel(nn.Module):
    """Embedding, three blocks, norm; the embedding is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


def build(dtype: torch.dtype) -> nn.Module:
    """Distinct weights, biases and norms included, the same on every rank."""
    torch.manual_seed(3)
    model = TiedModel()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return model.to(dtype)


def half_batches(rank: int) -> list[Batch]:
    """This rank's samples of every step's global batch."""
    tokens = torch.randint(
        VOCABULARY, (NUM_STEPS, RANKS * SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(5)
    )
    mine = tokens[:, rank * SAMPLES : (rank + 1) * SAMPLES]
    return [(step[:, :-1], step[:, 1:]) for step in mine]


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def count(batch: Batch) -> int:
    return batch[1].numel()


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> list[float]:
    """The loop of every PyTorch script: torch's engines average over ranks, so the loss is a mean."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_sum(model, batch) / count(batch)
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / RANKS)
    return losses


def torch_ddp(model: nn.Module, optimizer: str, batches: list[Batch], comm: Comm) -> Outcome:
    kind, settings = OPTIMIZERS[optimizer]
    losses = loop(DistributedDataParallel(model), kind(model.parameters(), **settings), batches)
    return losses, whole(model)


def torch_redundancy(model: nn.Module, optimizer: str, batches: list[Batch], comm: Comm) -> Outcome:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch.jit, an error in pytest

    kind, settings = OPTIMIZERS[optimizer]
    sharded = ZeroRedundancyOptimizer(model.parameters(), kind, **settings)
    return loop(DistributedDataParallel(model), sharded, batches), whole(model)


def torch_fsdp2(model: nn.Module, optimizer: str, batches: list[Batch], comm: Comm) -> Outcome:
    kind, settings = OPTIMIZERS[optimizer]
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = loop(model, kind(model.parameters(), **settings), batches)
    return losses, whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters by name; FSDP2's are gathered."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def plait_row(strategy: str, num_microbatches: int = 1) -> Train:
    """A row of the table; the local batch may be cut into microbatches, which must change nothing."""

    def train(model: nn.Module, optimizer: str, batches: list[Batch], comm: Comm) -> Outcome:
        kind, settings = OPTIMIZERS[optimizer]
        engine = Engine(
            model,
            comm,
            strategy=strategy,
            optimizer=kind(model.parameters(), **settings),
            loss_fn=loss_sum,
            count_fn=count,
        )
        losses = []
        for inputs, targets in batches:
            parts = zip(inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True)
            losses.append(engine.step(list(parts)).loss)
        return losses, engine.full_state_dict()

    return train


CONTESTANTS: dict[str, Train] = {
    "torch-ddp": torch_ddp,
    "torch-redundancy": torch_redundancy,
    "torch-fsdp2": torch_fsdp2,
    "ddp": plait_row("ddp"),
    "zero1": plait_row("zero1"),
    "zero2": plait_row("zero2"),
    "zero3": plait_row("zero3"),
    "zero3, 2 microbatches": plait_row("zero3", num_microbatches=2),
}


def rank_main(rank: int, port: int, path: str) -> None:
    """Trains every contestant; rank 0 saves their losses and parameters."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    comm = ProcessComm.from_env(Mesh(shard=RANKS))  # torch's engines use the process group that it makes
    batches = half_batches(rank)
    found: dict[str, dict[str, Any]] = {}
    for dtype in (torch.float32, torch.float64):
        found[f"initial/{dtype}"] = {"parameters": whole(build(dtype))}
        for optimizer in OPTIMIZERS:
            for name, train in CONTESTANTS.items():
                losses, parameters = train(build(dtype), optimizer, batches, comm)
                found[f"{name}/{optimizer}/{dtype}"] = {"losses": losses, "parameters": parameters}
    if rank == 0:
        torch.save(found, path)
    dist.barrier()
    comm.close()
