"""The machines of a plan: a table of accelerators, and a TOML file for any other.

preset = "h100"            # keys that follow replace its figures
hosts = 16
devices = 8                # on each host
kind = "cuda"              # or cpu
world = "process"          # the ranks of plait train on it
memory_gb = 80
memory_gbs = 3350          # GB/s
launch_us = 6              # to launch one kernel
turns = 1                  # times that a device is faster while the others of its host wait
[tflops]                   # dense peak by dtype
bf16 = 989.4
[attention_tflops]         # reached by attention, by dtype; others reach a share of the peak
bf16 = 386
[inside]                   # between devices of a host: GB/s of one device in one direction
gbs = 450
latency_us = 3
[between]                  # between hosts: GB/s of one host
gbs = 400
latency_us = 10
[reached]                  # shares of these figures that programs reach
product = 0.8
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from plait.messages.wording import did_you_mean
from plait.predict.model import where


@dataclass(frozen=True)
class Link:
    """A network: what one device (inside a host) or one host (between hosts) sends in one direction."""

    bandwidth: float
    """Bytes per second."""
    latency: float
    """Seconds of one hop."""


@dataclass(frozen=True)
class Reached:
    """The shares of a data sheet's figures that programs reach, and the constants of an implementation.

    The defaults are llm-foundry's on A100 (docs/planner.md), rounded."""

    product: float = 0.74
    """The share of the peak that a large matrix product reaches, without a partly filled wave."""
    depth: float = 100.0
    """The elements of the inner dimension at which a product takes twice its time."""
    wave: float = 0.7
    """The share of a last, partly filled wave of tiles that costs time (0: none, 1: all)."""
    attention: float = 0.51
    """The share of the peak that the products inside attention reach."""
    memory: float = 0.8
    """The share of the memory's bandwidth that kernels reach."""
    passes: float = 1.2
    """The element-wise traffic of a block relative to that of fused operators."""
    kernels: float = 60.0
    """The number of kernels that a block launches in a forward."""
    calls: float = 6.0
    """The number of kernels that could be launched in the time of a call of a collective.  With 3 us for each hop, six
    of them make the times of vTrain's table of all-reduces on A100: 45, 53 and 92 us for 1 MiB on 2, 4, 8 devices."""
    starts: float = 0.4
    """The share of the time to launch a kernel that its start takes on the device."""
    network: float = 0.8
    """The share of a link's bandwidth that a large message reaches."""
    microbatch: float = 1e-6
    """The engine's seconds for each microbatch, in addition to its operators."""
    fixed: float = 1.2e-3
    """The seconds of a step that nothing else explains."""


@dataclass(frozen=True)
class Accelerator:
    """One device, described by its data sheet."""

    memory: float
    """Bytes that a program may allocate."""
    bandwidth: float
    """Bytes per second of its memory."""
    peak: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s by dtype, without sparsity."""
    units: int
    """Multiprocessors: a product's tiles run on them in waves."""
    launch: float = 6e-6
    """Seconds of the CPU to launch one kernel."""
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)
    """FLOP/s that attention reached, by dtype; others reach ``Reached.attention`` of the peak."""


@dataclass(frozen=True)
class Cluster:
    """Hosts that have equally many devices."""

    name: str
    device: Accelerator
    inside: Link
    between: Link
    hosts: int = 1
    devices: int = 8
    """Devices on each host."""
    reached: Reached = Reached()
    kind: str = "cuda"
    """The devices that ranks compute on, named as in ``plait train --device``."""
    world: str = "process"
    """The kind of the ranks, named as in ``plait train --world``."""
    turns: float = 1.0
    """The factor by which a device is faster while others wait: ranks beyond a CPU's cores take turns."""

    @property
    def size(self) -> int:
        return self.hosts * self.devices

    def peak(self, dtype: str) -> float:
        """The FLOP/s of one device; raises ValueError for a dtype that the cluster does not name."""
        if dtype not in self.device.peak:
            raise ValueError(f"cluster {self.name}: no peak for {dtype}; it names {', '.join(self.device.peak)}")
        return self.device.peak[dtype]

    def attention(self, dtype: str) -> float:
        """The FLOP/s of the products inside attention."""
        return self.device.attention.get(dtype, self.peak(dtype) * self.reached.attention)


TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


def _preset(
    name: str, memory: float, bandwidth: float, bf16: float, fp32: float, units: int, inside: float, between: float,
    latency: float = 3.0, devices: int = 8, reached: Reached = Reached(),
) -> Cluster:  # fmt: skip
    """A row of the table: GB, GB/s, TFLOP/s (fp32 by TF32 products if there are any), GB/s, microseconds."""
    peak = {"bf16": bf16 * TERA, "fp16": bf16 * TERA, "fp32": fp32 * TERA}
    device = Accelerator(memory * GIGA, bandwidth * GIGA, peak, units)
    return Cluster(
        name, device, Link(inside * GIGA, latency * MICRO), Link(between * GIGA, 10 * MICRO), 1, devices, reached
    )


HOPPER = Reached(product=0.6, attention=0.39)
"""llm-foundry's on H100 (docs/planner.md), rounded; no row gives others for B200 and GB200."""

PRESETS: dict[str, Cluster] = {
    row.name: row
    for row in (
        # GeForce RTX 4090: NVIDIA Ada architecture whitepaper 1.1, appendix A (tensor FP16 with FP32 accumulate; FP32
        # without tensor cores); PCIe 4.0 x16; a host has one 100 Gb/s port (assumed: there is no standard host)
        _preset("rtx4090", 24, 1008, 165.2, 82.6, 128, 32, 12.5, 10.0),
        # A100 SXM 40 and 80 GB: NVIDIA A100 data sheet, June 2021 (TF32 156, BF16 312); NVLink 600 GB/s both ways;
        # DGX A100: eight 200 Gb/s ports
        _preset("a100-40", 40, 1555, 312, 156, 108, 300, 200),
        _preset("a100-80", 80, 2039, 312, 156, 108, 300, 200),
        # H100 SXM: NVIDIA H100 data sheet, 2023 (sparse figures halved); NVLink 900 GB/s; DGX H100: eight 400 Gb/s
        _preset("h100", 80, 3350, 989.4, 494.7, 132, 450, 400, reached=HOPPER),
        # H200 SXM: NVIDIA H200 data sheet, 2024; as H100 but for its memory
        _preset("h200", 141, 4800, 989.4, 494.7, 132, 450, 400, reached=HOPPER),
        # B200: NVIDIA DGX B200 data sheet, 2024, per GPU (sparse figures halved); NVLink 1.8 TB/s; eight 400 Gb/s
        _preset("b200", 180, 8000, 2250, 1125, 148, 900, 400, reached=HOPPER),
        # GB200 NVL72: NVIDIA data sheet, 2024, per GPU; a "host" is a rack of 72 GPUs, one 400 Gb/s port for each
        _preset("gb200", 186, 8000, 2500, 1250, 148, 900, 3600, devices=72, reached=HOPPER),
    )
}
"""Clusters of one host, by the name of their accelerator."""

_RATES = {dtype: (dtype, TERA) for dtype in ("bf16", "fp16", "fp32")}
_LINK = {"gbs": ("bandwidth", GIGA), "latency_us": ("latency", MICRO)}
_DEVICE = {"memory_gb": ("memory", GIGA), "memory_gbs": ("bandwidth", GIGA), "units": ("units", 1)}
_DEVICE |= {"launch_us": ("launch", MICRO)}
TOP: dict[str, tuple[str, float]] = {**_DEVICE, **{name: (name, 1) for name in ("hosts", "devices", "turns")}}
"""Keys with a number: the field that the number fills, and its unit."""
TABLES: dict[str, dict[str, tuple[str, float]]] = {
    **{"tflops": _RATES, "attention_tflops": _RATES, "inside": _LINK, "between": _LINK},
    "reached": {one.name: (one.name, 1) for one in fields(Reached)},
}
"""Tables of such keys."""
MOST = {"hosts": 1 << 16, "devices": 1 << 12}
"""The largest of such numbers that must be whole."""
NAMES = {"preset": tuple(PRESETS), "kind": ("cuda", "cpu"), "world": ("process", "shared_memory", "thread", "auto")}
"""Keys with a name, and the possible names."""
NEEDED = ("memory_gb", "memory_gbs", "units", "tflops", "inside", "between")
"""Keys that a file without a preset must have."""


def preset(text: str, hosts: int = 1) -> Cluster:
    """The cluster of ``8xh100`` or ``h100`` on some hosts; ValueError with the nearest names for any other text."""
    count, times, name = text.lower().partition("x") if text[:1].isdecimal() else ("", "", text.lower())
    if name not in PRESETS or (times and not (count.isdecimal() and 0 < int(count) <= MOST["devices"])):
        hint = did_you_mean(name, PRESETS)
        raise ValueError(
            f"gpus {text!r}: {hint}{' ' * bool(hint)}write a number and a name, as in 8xh100; the names are "
            f"{', '.join(PRESETS)}; --cluster FILE describes any other"
        )
    found = PRESETS[name]
    return replace(found, hosts=hosts, devices=int(count) if times else found.devices)


def parse_cluster(text: str, place: str) -> Cluster:
    """Reads a cluster from TOML; raises ValueError with file, line and field for a wrong one.

    Args:
        place: the file's name, for errors.
    """
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: no TOML: {error}") from None

    def numbers(values: Any, known: Mapping[str, tuple[str, float]], table: str = "") -> dict[str, Any]:
        """A table's numbers by the fields that they fill; without ``table``, the numbers outside of all tables."""
        others, filled = () if table else ("name", *NAMES, *TABLES), dict[str, Any]()
        for key, value in values.items() if isinstance(values, dict) else ((table, values),):
            spot, whole, most = where(place, text, key, table), key in MOST, MOST.get(key, 1e15)
            if key in others:
                continue
            if key not in known:
                hint = did_you_mean(key, [*known, *others], f"the keys are {', '.join([*known, *others])}")
                raise ValueError(f"{spot}: unknown: {hint}")
            if type(value) not in (int, float) or not 0 < value <= most or (whole and type(value) is not int):
                raise ValueError(f"{spot}: {value!r:.80}: give a {'whole ' * whole}number above 0, to {most:g}")
            name, unit = known[key]
            filled[name] = value * unit
        return filled

    for key, names in NAMES.items():
        if key in found and found[key] not in names:
            raise ValueError(f"{where(place, text, key)}: {found[key]!r}: choose one of {', '.join(names)}")
    top = numbers(found, TOP)
    tables = {name: numbers(found.get(name, {}), known, name) for name, known in TABLES.items()}
    if "preset" not in found:
        if missing := [key for key in NEEDED if key not in found]:
            raise ValueError(f"{place}, {missing[0]}: missing: give it, or preset = one of {', '.join(PRESETS)}")
        for name in ("inside", "between"):
            if len(tables[name]) < len(_LINK):
                raise ValueError(f"{where(place, text, name)}: give {' and '.join(_LINK)}")
    cluster = PRESETS[found.get("preset", "h100")]
    own = {name: top.pop(name) for name, _ in _DEVICE.values() if name in top}
    own["peak"] = {**cluster.device.peak, **tables["tflops"]}
    own["attention"] = {**cluster.device.attention, **tables["attention_tflops"]}
    changed = top | {key: found[key] for key in ("kind", "world") if key in found}
    return replace(
        cluster,
        name=str(found.get("name", found.get("preset", "h100"))),
        device=replace(cluster.device, **own),
        inside=replace(cluster.inside, **tables["inside"]),
        between=replace(cluster.between, **tables["between"]),
        reached=replace(cluster.reached, **tables["reached"]),
        **changed,
    )
