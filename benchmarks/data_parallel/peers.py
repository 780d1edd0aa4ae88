"""The peers: torch's own data-parallel engines, each in the form its documentation recommends.

``local`` is the honest ceiling: both ranks train at the same time and never talk, so any time above it
is communication.

    local        no communication; correct for one rank only, so only its first loss is checked
    ddp*         DistributedDataParallel: default, then the variants its documentation calls faster
    fsdp2        fully_shard per block and on the root, reshard after forward (the ZeRO-3 point)
    */compiled   the same with each block compiled by itself (``block.compile()``), as torchtitan does
    redundancy   ZeroRedundancyOptimizer over the best DDP variant (the ZeRO-1 point)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from harness.contestants import Build, Contestant, adamw, training_loop
from harness.models import Workload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

DDP_VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-view-static": {"gradient_as_bucket_view": True, "static_graph": True},
    "ddp-view-static-4MB": {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 4},
    "ddp-view-static-100MB": {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 100},
}


def built(workload: Workload, compiled: bool) -> nn.Module:
    """The model, with the blocks compiled one by one or not."""
    model = workload.build()
    for block in model.get_submodule("blocks").children() if compiled else ():
        block.compile(fullgraph=True)
    return model


def local(workload: Workload, ranks: int) -> Contestant:
    model = workload.build()
    optimizer = adamw(model.parameters(), workload.learning_rate)
    return Contestant(training_loop(workload, model, optimizer), loss_is_global=False, communicates=False)


def ddp(workload: Workload, ranks: int, compiled: bool = False, **variant: Any) -> Contestant:
    model = DistributedDataParallel(built(workload, compiled), **variant)
    optimizer = adamw(model.parameters(), workload.learning_rate)
    return Contestant(training_loop(workload, model, optimizer), loss_is_global=False)


def redundancy(workload: Workload, ranks: int) -> Contestant:
    model = DistributedDataParallel(workload.build(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=workload.learning_rate, weight_decay=0.01, fused=True
    )
    return Contestant(training_loop(workload, model, optimizer), loss_is_global=False)


def fsdp2(workload: Workload, ranks: int, compiled: bool = False) -> Contestant:
    model = built(workload, compiled)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = adamw(model.parameters(), workload.learning_rate)
    return Contestant(training_loop(workload, model, optimizer), loss_is_global=False)


PEERS: dict[str, Build] = {
    "local": local,
    **{name: partial(ddp, **options) for name, options in DDP_VARIANTS.items()},
    "redundancy": redundancy,
    "fsdp2": fsdp2,
    "ddp/compiled": partial(ddp, compiled=True, gradient_as_bucket_view=True, static_graph=True),
    "fsdp2/compiled": partial(fsdp2, compiled=True),
}
