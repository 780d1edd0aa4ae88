"""Measures this machine as the planner describes one: products, attention, memory, launches, and the links of a world.

All ranks measure at the same time, so that what they share is shared; a figure is that of the slowest rank.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.base import Comm
from plait.predict.activations import ON_CPU, DecoderSizes
from plait.predict.cluster import MICRO, PRESETS, Cluster, Link
from plait.predict.duration import block_passes
from plait.run.config.machine import MachineConfig
from plait.run.measure.comm import BenchConfig, measure
from plait.run.measure.machine import copy_rate, synchronise
from plait.run.measure.operations import NOTE
from plait.run.models.gpt import GPT, GPTConfig
from plait.step import Engine
from plait.table.collectives import bus_factor
from plait.table.mesh import AXES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL, LARGE = 1 << 12, 1 << 22
"""Bytes of the messages that show a link's latency, and its bandwidth."""
BUDGET = 0.4
"""Seconds for one figure."""
TINY = GPTConfig(width=32, num_layers=1, num_heads=2, num_kv_heads=2, max_length=8, dropout=0.0)


def calibrate(config: MachineConfig, comm: Comm, memory: float, units: int) -> Cluster:
    """Describes one host with the ranks of this world; all ranks call it together.

    Args:
        memory: bytes of one device.
        units: its multiprocessors; 1 for a CPU.
    """
    on_gpu = comm.device.type == "cuda"
    width, samples, length = (4096, 8, 2048) if on_gpu else (512, 8, 256)
    rates = {name: _product_seconds(comm, width, dtype) for name, dtype in DTYPES.items()}
    wide, narrow = rates["fp32"], _product_seconds(comm, width, torch.float32, inner=width // 16)
    # seconds of a FLOP are (1 + depth / inner) / peak
    depth = max(1.0, (narrow / wide - 1) * width / (16 - narrow / wide))
    own, launch = {}, _launch_seconds(comm)
    for name, seconds in rates.items():
        own[name] = (1 + depth / width) / seconds
    reached = replace(PRESETS["h100"].reached, product=1.0, depth=depth, memory=1.0, network=1.0, head=1.0, fixed=1e-9)
    reached = reached if on_gpu else replace(reached, calls=1.0, starts=1.0)
    inside = _link(config, comm)
    device = replace(
        PRESETS["h100"].device,
        memory=memory,
        bandwidth=2 / _slowest(comm, 1 / copy_rate(0.3, device=comm.device.type)),
        peak=own,
        units=units,
        launch=launch,
    )
    ranks = comm.mesh.size
    found = Cluster("this machine", device, inside, inside, 1, ranks, reached, comm.device.type, config.world)
    head = width // 8
    shape = (samples, 8, length, head)
    work, attention = 4 * samples * 8 * length * length * head, {}
    for name, dtype in DTYPES.items():
        q = torch.randn(shape, device=comm.device).to(dtype)
        attend = partial(nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
        attention[name] = work / _seconds(comm, attend)
    found = replace(found, device=replace(device, attention=attention))
    tiny = _block_seconds(comm, TINY, 1)
    found = _reaching(found, kernels=max(1.0, tiny / 3 / launch))
    large = GPTConfig(width=width // 2, num_layers=1, num_heads=8, num_kv_heads=8, max_length=length, dropout=0.0)
    took = _block_seconds(comm, large, samples)
    turns = min(max(1.0, took / _block_seconds(comm, large, samples, alone=True)), float(ranks))
    there, back = block_passes(_sizes(large, samples), _reaching(found, passes=1.0), "fp32", 0.0)
    traffic = there.traffic + back.traffic
    found = _reaching(found, passes=max(0.1, 1 + (took - there.total - back.total) / traffic))
    once, twice, _ = _step_seconds(comm, "ddp")
    cut_once, cut_twice, units = _step_seconds(comm, "zero3")
    microbatch = max(1e-9, twice - once - tiny)
    found = _reaching(found, fixed=max(1e-9, once - tiny - microbatch), microbatch=microbatch)
    if not on_gpu and ranks > 1:
        collective = (cut_twice - cut_once - (twice - once)) / (3 * units)  # two gathers and a reduction of each unit
        found = _reaching(found, calls=max(1.0, (collective - inside.latency * (ranks - 1)) / launch))
    return replace(found, turns=turns)


def to_toml(cluster: Cluster) -> dict[str, Any]:
    """The keys and values of a cluster file."""
    device = cluster.device
    links = {
        name: {"gbs": link.bandwidth / 1e9, "latency_us": link.latency / MICRO}
        for name, link in (("inside", cluster.inside), ("between", cluster.between))
    }
    return {
        "name": cluster.name,
        "hosts": cluster.hosts,
        "devices": cluster.devices,
        "kind": cluster.kind,
        "world": cluster.world,
        "turns": cluster.turns,
        "memory_gb": device.memory / 1e9,
        "memory_gbs": device.bandwidth / 1e9,
        "units": device.units,
        "launch_us": device.launch / MICRO,
        "tflops": {name: rate / 1e12 for name, rate in device.peak.items()},
        "attention_tflops": {name: rate / 1e12 for name, rate in device.attention.items()},
        **links,
        "reached": vars(cluster.reached),
    }


def _reaching(cluster: Cluster, **shares: float) -> Cluster:
    return replace(cluster, reached=replace(cluster.reached, **shares))


def _slowest(comm: Comm, seconds: float) -> float:
    worst = torch.tensor([seconds], dtype=torch.float64, device=comm.device)
    comm.all_reduce(worst, AXES, "max", NOTE).wait()
    return float(worst)


def _seconds(comm: Comm, work: Any, repeat: int | None = None, *, alone: bool = False) -> float:
    """The median time of some work, which all ranks do at once, on the slowest rank.

    Args:
        repeat: times that each rank does it, for work in which ranks meet; None: as often as fits into ``BUDGET``.
        alone: rank 0 works, and the others wait.
    """
    if alone and comm.rank:
        comm.barrier(AXES, NOTE)
        return _slowest(comm, 0.0)
    work()
    synchronise(comm.device.type)
    comm.barrier(AXES, NOTE)
    times: list[float] = []
    end = time.perf_counter() + BUDGET
    while len(times) < (repeat or 5) or (repeat is None and time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        work()
        synchronise(comm.device.type)
        times.append(time.perf_counter() - start)
    return _slowest(comm, median(times))


def _product_seconds(comm: Comm, width: int, dtype: torch.dtype, inner: int | None = None) -> float:
    """Seconds of a FLOP of a product."""
    inner = inner or width
    a = torch.ones(width, inner, device=comm.device, dtype=dtype)
    b = torch.ones(inner, width, device=comm.device, dtype=dtype)
    return _seconds(comm, lambda: a @ b) / (2 * width * width * inner)


def _launch_seconds(comm: Comm) -> float:
    """Seconds to call one operator on a single element."""
    one, times = torch.ones(1, device=comm.device), 200

    def calls() -> None:
        for _ in range(times):
            one.add_(1)

    return _seconds(comm, calls) / times


def _sizes(config: GPTConfig, samples: int) -> DecoderSizes:
    return DecoderSizes(
        batch=samples,
        length=config.max_length,
        width=config.width,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        hidden=config.hidden_width,
        vocabulary=config.vocabulary,
        dropout=False,
        kernels=replace(ON_CPU, flash=True),
    )


def _block_seconds(comm: Comm, config: GPTConfig, samples: int, *, alone: bool = False) -> float:
    """Seconds of a decoder block's forward and backward, on all ranks or on the first alone."""
    block = GPT(config).blocks[0].to(comm.device)
    x = torch.randn(samples, config.max_length, config.width, device=comm.device, requires_grad=True)
    return _seconds(comm, lambda: block(x).sum().backward(), alone=alone)


def _step_seconds(comm: Comm, strategy: str) -> tuple[float, float, int]:
    """Seconds of a step of one microbatch, and of two, of a model that computes almost nothing, and its units."""
    model = GPT(TINY).blocks[0].to(comm.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)  # every rank has the same values
    x = torch.randn(1, TINY.max_length, TINY.width, device=comm.device)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = model(x).sum()
        return total

    engine = Engine(model, comm, strategy=strategy, optimizer=optimizer, loss_fn=loss, count_fn=len)
    once = _seconds(comm, lambda: engine.step([x]), repeat=30)
    return once, _seconds(comm, lambda: engine.step([x, x]), repeat=30), len(engine.placed.units)


def _link(config: MachineConfig, comm: Comm) -> Link:
    """Latency and bandwidth of the collectives between all ranks."""
    n = comm.mesh.size
    if n == 1:
        return Link(1e12, 1e-9)
    kinds = ("all_gather", "reduce_scatter")
    asked = BenchConfig(mesh=config.mesh, sizes=(str(SMALL), str(LARGE)), kinds=kinds, repeat=20)
    found = {(one.kind, one.bytes > SMALL): one for one in measure(asked, comm) if one.kind in kinds}
    small = median(found[kind, False].seconds for kind in kinds)
    extra = median(max(found[kind, True].seconds - small, 1e-9) for kind in kinds)
    return Link(LARGE * bus_factor("all_gather", n) / extra, small / (n - 1))
