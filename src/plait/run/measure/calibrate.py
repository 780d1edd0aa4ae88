"""Measures this machine in the planner's terms: products, attention, memory, launches, and the links of a world.

All ranks measure at the same time, so that they share resources as in a run; a figure is that of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from plait.comm.base import Comm
from plait.predict.activations import ON_CPU, DecoderSizes
from plait.predict.cluster import MICRO, PRESETS, Cluster, Link
from plait.predict.duration import block_passes, stream_traffic
from plait.predict.plan import decoder_sizes
from plait.run.config.machine import MachineConfig
from plait.run.job.outline import transformer_of
from plait.run.measure.comm import BenchConfig, measure, slowest
from plait.run.measure.machine import copy_rate, synchronise
from plait.run.measure.operations import NOTE, Collective
from plait.run.models.gpt import GPT, GPTConfig
from plait.step import Engine
from plait.table.collectives import bus_factor
from plait.table.mesh import AXES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL, LARGE = 1 << 12, 1 << 22
"""Bytes of the messages that show a link's latency, and its bandwidth."""
ROUNDS, LAUNCHES = 9, 200
"""The number of rounds in which all works take turns (the first does not count), and of operators that one launches."""
Work = Callable[[], Any] | None
"""The work that is timed; None on a rank that waits for the others."""
TINY = GPTConfig(width=32, num_layers=1, num_heads=2, num_kv_heads=2, max_length=8, dropout=0.0)


def calibrate(config: MachineConfig, comm: Comm, memory: float, units: int) -> Cluster:
    """Describes one host with the ranks of this world; all ranks call it together.  ``memory`` is in bytes of one
    device, ``units`` are its multiprocessors, 1 for a CPU."""
    # 1. The works, and their seconds
    on_gpu = comm.device.type == "cuda"
    width, samples, length = (4096, 8, 2048) if on_gpu else (512, 8, 256)
    shape = (samples, 8, length, width // 8)
    large = GPTConfig(width=width // 2, num_layers=1, num_heads=8, num_kv_heads=8, max_length=length, dropout=0.0)
    block = _block(comm, large, samples)
    works: dict[str, Work] = {"narrow": _product(comm, width, width // 16, torch.float32)}
    one = torch.ones(1, device=comm.device)
    works["launch"] = lambda: [one.add_(1) for _ in range(LAUNCHES)]
    for name, dtype in DTYPES.items():
        works[f"product {name}"] = _product(comm, width, width, dtype)
        q = torch.randn(shape, device=comm.device).to(dtype)
        works[f"attention {name}"] = partial(nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
    works |= {"tiny": _block(comm, TINY, 1), "block": block, "block alone": block if comm.rank == 0 else None}
    works["stream"] = _stream(comm, large, samples)
    (ddp, _), (cut, n_units) = _step(comm, "ddp"), _step(comm, "zero3")
    for name, step in (("ddp", ddp), ("cut", cut)):
        works |= {name: partial(step, 1), f"{name} twice": partial(step, 2)}
    took = _seconds(comm, works)
    inside = _link(config, comm)
    # 2. The device
    flop = {name: took[f"product {name}"] / (2 * width**3) for name in DTYPES}
    ratio = took["narrow"] / (2 * width**3 / 16) / flop["fp32"]
    # seconds of a FLOP are (1 + depth / inner) / peak
    depth, launch = max(1.0, (ratio - 1) * width / (16 - ratio)), took["launch"] / LAUNCHES
    work = 4 * samples * 8 * length * length * (width // 8)
    device = replace(
        PRESETS["h100"].device,
        memory=memory,
        bandwidth=2 / slowest(comm, [1 / copy_rate(0.3, device=comm.device.type)])[0],
        peak={name: (1 + depth / width) / seconds for name, seconds in flop.items()},
        attention={name: work / took[f"attention {name}"] for name in DTYPES},
        units=units,
        launch=launch,
    )
    # 3. The implementation: launches and passes of a block, and the engine's own time
    reached = replace(PRESETS["h100"].reached, product=1.0, depth=depth, memory=1.0, network=1.0, fixed=1e-9)
    reached = replace(reached, kernels=max(1.0, took["tiny"] / 3 / launch))
    reached = reached if on_gpu else replace(reached, calls=1.0, starts=1.0)
    ranks = comm.mesh.size
    turns = min(max(1.0, took["block"] / took["block alone"]), float(ranks))
    # Most of a block is products: the rest of its time says little about its other operators.
    sizes = _sizes(large, samples)
    passes = took["stream"] * device.bandwidth / (3 * stream_traffic(sizes))  # a forward, and a backward of two
    reached = replace(reached, passes=max(0.1, passes))
    found = Cluster("this machine", device, inside, inside, 1, ranks, reached, comm.device.type, config.world, turns)
    there, back = block_passes(sizes, found, "fp32", 0.0)
    products = there.products + back.products
    left = max(products / 2, took["block"] - (there.total + back.total - products))
    microbatch = max(1e-9, took["ddp twice"] - took["ddp"] - took["tiny"])
    fixed = max(1e-9, took["ddp"] - took["tiny"] - microbatch)
    found = _reaching(found, product=products / left, microbatch=microbatch, fixed=fixed)
    if on_gpu or ranks == 1:
        return found
    cuts = took["cut twice"] - took["cut"] - (took["ddp twice"] - took["ddp"])
    collective = cuts / (3 * n_units)  # two gathers and a reduction of each unit
    return _reaching(found, calls=max(1.0, (collective - inside.latency * (ranks - 1)) / launch))


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


def _seconds(comm: Comm, works: dict[str, Work]) -> dict[str, float]:
    """The median seconds of each work, which all ranks do at once, on the slowest rank.  The works take turns in
    several rounds, so that a machine that is slow for a second is not slow for one figure."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            comm.barrier(AXES, NOTE)
            start = time.perf_counter()
            if work is not None:
                work()
                synchronise(comm.device.type)
            times[name].append(time.perf_counter() - start)
    return dict(zip(times, slowest(comm, [median(found[1:]) for found in times.values()]), strict=True))


def _product(comm: Comm, width: int, inner: int, dtype: torch.dtype) -> Work:
    a = torch.ones(width, inner, device=comm.device, dtype=dtype)
    b = torch.ones(inner, width, device=comm.device, dtype=dtype)
    return lambda: a @ b


def _sizes(config: GPTConfig, samples: int) -> DecoderSizes:
    model = transformer_of(config)
    assert model is not None
    return decoder_sizes(model, samples, config.max_length, kernels=replace(ON_CPU, flash=True))


def _block(comm: Comm, config: GPTConfig, samples: int) -> Work:
    """The forward and backward of a decoder block."""
    block = GPT(config).blocks[0].to(comm.device)
    x = torch.randn(samples, config.max_length, config.width, device=comm.device, requires_grad=True)
    return lambda: block(x).sum().backward()


def _stream(comm: Comm, config: GPTConfig, samples: int) -> Work:
    """The forward and backward of a block's work on the stream alone: its norms, and its two sums."""
    first, second = (nn.RMSNorm(config.width, eps=config.norm_eps, device=comm.device) for _ in range(2))
    x = torch.randn(samples, config.max_length, config.width, device=comm.device, requires_grad=True)

    def both() -> None:
        y = x + first(x)
        (y + second(y)).backward(x)

    return both


def _step(comm: Comm, strategy: str) -> tuple[Callable[[int], Any], int]:
    """A step of a given number of microbatches, in a model that computes almost nothing, and its number of units."""
    model = GPT(TINY).blocks[0].to(comm.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)  # every rank has the same values
    x = torch.randn(1, TINY.max_length, TINY.width, device=comm.device)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(
        model, comm, strategy=strategy, optimizer=optimizer, loss_fn=lambda model, x: model(x).sum(), count_fn=len
    )
    return lambda microbatches: engine.step([x] * microbatches), len(engine.placed.units)


def _link(config: MachineConfig, comm: Comm) -> Link:
    """Latency and bandwidth of the collectives between all ranks."""
    n = comm.mesh.size
    if n == 1:
        return Link(1e12, 1e-9)
    kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
    asked = BenchConfig(mesh=config.mesh, sizes=(str(SMALL), str(LARGE)), kinds=kinds, repeat=20)
    found = {(one.kind, one.bytes > SMALL): one for one in measure(asked, comm) if one.kind in kinds}
    small = median(found[kind, False].seconds for kind in kinds)
    extra = median(max(found[kind, True].seconds - small, 1e-9) for kind in kinds)
    return Link(LARGE * bus_factor("all_gather", n) / extra, small / (n - 1))
