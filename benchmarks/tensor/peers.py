"""The peers: torch's ``parallelize_module`` of the same model, under every plan that its users write.

    plan            query, key, value, up | out, down     embedding, head, loss         stream, norms
    torch-blocks    column | row                          whole on every rank           whole
    torch-loss      column | row                          vocabulary cut, loss_parallel whole
    torch-*-shared  as before; query, key and value read one DTensor, so their input's gradient is reduced once
    torch-titan     column | row                          vocabulary cut, loss_parallel cut in time (sequence parallel)

``torch-titan`` is the plan of torchtitan's Llama. ``alone`` is no peer: one process trains the whole batch while the
other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from harness.contestants import Build, Contestant, adamw, alone
from harness.models import Batch, Workload
from models import MLPS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

Plan = dict[str, ParallelStyle]
COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up")
ROWS = ("attention.out", "mlp.down")


def block_plan(*, shared: bool) -> Plan:
    """A block; ``shared``: its input becomes a DTensor once, not once per projection."""
    plan: Plan = {f"blocks.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ROWS}
    if shared:
        plan["blocks.*.attention"] = _prepared(Replicate(), 3)
    return plan


def vocabulary_plan() -> Plan:
    """Embedding and head cut by vocabulary; the logits stay a DTensor for ``loss_parallel``."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(use_local_output=False),
    }


def titan_plan() -> Plan:
    """The stream between the products is cut in time."""
    plan: Plan = {f"blocks.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"blocks.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ROWS}
    plan |= {f"blocks.*.{name}": SequenceParallel() for name in ("norm1", "norm2")}
    return plan | {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention": _prepared(Shard(1), 3),
        "blocks.*.mlp": _prepared(Shard(1), 1),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


def _prepared(layout: Replicate | Shard, num_inputs: int) -> PrepareModuleInput:
    """The first of a module's inputs as a DTensor, whole; the others as they are."""
    rest = (None,) * (num_inputs - 1)
    return PrepareModuleInput(input_layouts=(layout, *rest), desired_input_layouts=(Replicate(), *rest))


def pair_plan() -> Plan:
    """A layer by columns, the next by rows."""
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


PLANS: dict[str, tuple[Callable[[], Plan], bool]] = {
    "torch-blocks": (lambda: block_plan(shared=False), False),
    "torch-blocks-shared": (lambda: block_plan(shared=True), False),
    "torch-loss": (lambda: block_plan(shared=False) | vocabulary_plan(), True),
    "torch-loss-shared": (lambda: block_plan(shared=True) | vocabulary_plan(), True),
    "torch-titan": (titan_plan, True),
}
"""Name -> (plan, whether the loss is computed on cut logits)."""
MLP_PLANS: dict[str, tuple[Callable[[], Plan], bool]] = {"torch-blocks": (pair_plan, False)}


def _grouped(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """A fused optimizer takes DTensors or plain tensors, not both in one group."""
    groups = [[p for p in parameters if isinstance(p, DTensor) == is_cut] for is_cut in (True, False)]
    return [{"params": group} for group in groups if group]


def _loop(workload: Workload, model: nn.Module, *, cut_loss: bool) -> Callable[[Batch], Tensor]:
    optimizer = adamw(_grouped(list(model.parameters())), workload.learning_rate)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with loss_parallel() if cut_loss else nullcontext():
            loss = workload.loss_mean(model, batch)
            torch.autograd.backward(loss)
        optimizer.step()
        loss = loss.detach()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return step


def _plan(plan: Callable[[], Plan], cut_loss: bool) -> Build:
    def build(workload: Workload, ranks: int) -> Contestant:
        model = parallelize_module(workload.build(), init_device_mesh("cpu", (ranks,)), plan())
        return Contestant(_loop(workload, model, cut_loss=cut_loss), loss_is_global=True)

    return build


def plans(model: str) -> dict[str, tuple[Callable[[], Plan], bool]]:
    """torch's contestants for a workload."""
    return MLP_PLANS if model in MLPS else PLANS


def peers(model: str) -> dict[str, Build]:
    return {"alone": lambda workload, ranks: alone(workload), **{n: _plan(*plan) for n, plan in plans(model).items()}}
