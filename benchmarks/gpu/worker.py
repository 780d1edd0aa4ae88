"""One contestant in one process: ``worker.py <contestant> <size> <device> <steps> <rounds>`` prints a JSON object."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from decoders import SIZES, Decoder, Size, batch, loss_sum
from torch import nn

import plait

UNTIMED = 3
Step = Callable[[], Any]


def model_of(size: Size, device: torch.device) -> nn.Module:
    """The same weights for every contestant, drawn where they are used."""
    torch.manual_seed(0)
    with device:
        return Decoder(size).to(torch.bfloat16)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_step(size: Size, model: nn.Module, device: torch.device) -> Step:
    optimizer, own = adamw(model), batch(size, device, range(size.samples))

    def step() -> Any:
        loss = loss_sum(model, own) / size.tokens
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def recomputed(model: Decoder) -> None:
    """Like ``recompute="full"``: recomputes each block's activations."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)


def torch_step(size: Size, device: torch.device, name: str, *, compiled: bool) -> Step:
    """A plain loop, or FSDP2 with one rank."""
    model = model_of(size, device)
    assert isinstance(model, Decoder)
    if size.recompute:
        recomputed(model)
    for block in model.blocks if compiled else ():
        block.compile()
    if name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return plain_step(size, model, device)


def plait_step(size: Size, comm: plait.Comm, model: nn.Module, strategy: str, *, compiled: bool = False) -> Step:
    ranks, rank = comm.mesh.data_size, comm.data_rank
    each = size.samples // ranks
    own = batch(size, comm.device, range(rank * each, (rank + 1) * each))
    recompute: Any = "full" if size.recompute else None
    row = plait.TABLE[strategy]
    common: dict[str, Any] = {"optimizer": adamw(model), "loss_fn": loss_sum, "count_fn": lambda b: b[1].numel()}
    engine = plait.Engine(model, comm, strategy=row, recompute=recompute, compile=compiled, **common)
    return lambda: engine.step([own])


def timed(
    step: Step, device: torch.device, steps: int, rounds: int, meet: Step = lambda: None, *, alone: bool = True
) -> dict[str, Any]:
    """Seconds of a step in each round, the loss of the first, the most memory, and how often the host waited in one.

    Inside a round only a step itself may wait for the device, and no loss is read.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    made = [step() for _ in range(UNTIMED)]
    losses = [float(getattr(one, "loss", one)) for one in made]
    seconds: list[list[float]] = []
    for _ in range(rounds):
        meet()
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        seconds.append([(time.perf_counter() - start) / steps])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "seconds": seconds,
        "loss": losses[0],
        "peak_bytes": peak,
        "waits": host_waits(step, device) if alone else None,
    }


def host_waits(step: Step, device: torch.device) -> int | None:
    """The number of a step's waits of this thread for the GPU, counted by torch's own mode; None without one."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in told)


def product_rate(device: torch.device) -> float:
    """Operations per second of a bf16 product, the largest of ten."""
    width = 8192 if device.type == "cuda" else 512
    a = torch.ones(width, width, dtype=torch.bfloat16, device=device)
    wait, best = (torch.cuda.synchronize if device.type == "cuda" else lambda: None), float("inf")
    for _ in range(12):
        wait()
        start = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * width**3 / best


def in_threads(size: Size, device: torch.device, steps: int, rounds: int) -> dict[str, Any]:
    """Two ranks on one device, each with half of the samples."""
    one_by_one = threading.Lock()  # they share torch's generator

    def body(comm: plait.Comm) -> dict[str, Any]:
        with one_by_one:
            model = model_of(size, device)
        step = plait_step(size, comm, model, "zero3")
        return timed(step, device, steps, rounds, lambda: comm.barrier(("shard",)), alone=False)

    first, second = plait.run_threads("shard=2", body, device=device)
    return {
        **first,
        "seconds": [list(map(max, a, b)) for a, b in zip(first["seconds"], second["seconds"], strict=True)],
    }


def main(name: str, size: Size, device: torch.device, steps: int, rounds: int) -> None:
    rate = product_rate(device)
    compiled, name = name.endswith("-compiled"), name.removesuffix("-compiled")
    if name == "plait-zero3-threads":
        found = in_threads(size, device, steps, rounds)
    elif name.startswith("plait-"):
        comm = plait.join(device=device)
        step = plait_step(size, comm, model_of(size, comm.device), name.removeprefix("plait-"), compiled=compiled)
        found = timed(step, device, steps, rounds)
    else:
        found = timed(torch_step(size, device, name, compiled=compiled), device, steps, rounds)
    print(json.dumps({**found, "product_rate": rate}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], SIZES[sys.argv[2]], torch.device(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
