"""Rows of public measurements as plans: the run, the measurement, and the rows that are not judged.

Each function reads one file of the data folder and yields a ``Case`` for each row.  Facts about an engine that its plan
needs (its splits of a model, its kept tensors) are here, with their source.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.predict.activations import FUSED, MEGATRON
from plait.predict.cluster import Cluster, Link, Reached, preset
from plait.predict.footprint import fullest
from plait.predict.model import Transformer
from plait.predict.plan import Plan
from plait.table.cells import TABLE
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """One row; ``seconds`` and ``bytes`` are None where it has none."""

    plan: Plan
    kinds: dict[str, str]
    """Names of the groups to which the row belongs, by the group's kind."""
    seconds: float | None = None
    bytes: float | None = None
    more_bytes: float = 0.0
    """Bytes that this engine holds and plait does not."""
    first_rank: bool = False
    """True if ``bytes`` are those of the first rank of the pipe axis, not of the fullest."""
    fitted: bool = True
    """False for a run that failed."""


@dataclass
class Source:
    """The cases of one file, and its rows that are not judged, by reason."""

    name: str
    cases: list[Case] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def rows_of(data: Path, name: str) -> Iterator[dict[str, str]]:
    """The rows of a file."""
    with (data / name).open(newline="") as file:
        yield from csv.DictReader(file)


def ints(row: dict[str, str], names: str) -> list[int]:
    return [int(float(row[name])) for name in names.split()]


def balanced_ends(layers: int, pipe: int, chunks: int = 1) -> tuple[int, ...] | None:
    """Megatron's split: equally many blocks on each stage, the embedding on the first, norm and head on the last."""
    stages = pipe * chunks
    if stages == 1:
        return None
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] + 2
    return tuple(sizes)


def vtrain(data: Path, name: str) -> Source:
    """Megatron-DeepSpeed in fp16, without overlap.

    On several nodes it recomputes everything, and the vocabulary is padded to 51,200.  On one node it does neither:
    with recomputation the products of the largest layers would need more than the peak, and the head takes the time of
    the source's own vocabulary of 50,257, of which each tensor rank has a part (see the page).
    """
    found = Source(name)
    for row in rows_of(data, name):
        gpus, batch, micro, hidden, heads, layers = ints(row, "gpus global_batch micro_batch hidden heads layers")
        length, tensor, shard, pipe = ints(row, "seq tp dp pp")
        one_node = "single" in name
        vocabulary = 50257 // tensor * tensor if one_node else 51200
        model = Transformer(
            layers, hidden, 4 * hidden, heads, heads, vocabulary, gated=False, biases=True, tied=True, positions=length,
            dropout=True,
        )  # fmt: skip
        cluster = replace(preset("a100-80"), hosts=max(1, gpus // 8), devices=min(gpus, 8))
        # Its configuration says 800 Gb/s for each host of the cluster.
        cluster = replace(cluster, between=Link(100e9, cluster.between.latency))
        plan = Plan(
            model, cluster, Mesh(pipe=pipe, shard=shard, tensor=tensor), TABLE["ddp"].mixed("fp16"), batch, length,
            batch // shard // micro, split=balanced_ends(layers, pipe), recompute=None if one_node else "full",
            dtype="fp16", kernels=MEGATRON, overlap=False, scatters=True,
        )  # fmt: skip
        kinds = {"hidden": str(hidden), "tensor": str(tensor), "pipe": str(pipe), "data": str(shard)}
        kinds |= {"micro batch": str(micro), "depth": str(layers)}
        found.cases.append(Case(plan, kinds, float(row["iteration_ms"]) / 1e3))
    return found


def nanotron_split(layers: int, hidden: int, ffn: int, vocab: int, pipe: int) -> tuple[int, ...] | None:
    """nanotron's split by the costs of blocks and head: a stage takes blocks until it is over its share.

    Source: huggingface/nanotron, src/nanotron/models/base.py, build_model.  Where it leaves stages empty they get
    links of those before them, which does not change the first one's.
    """
    if pipe == 1:
        return None
    costs = [0, *[4 * hidden * hidden + 3 * hidden * ffn] * layers, 0, vocab * hidden]
    sizes, stage, cost = [0] * pipe, 0, 0
    for one in costs:
        cost += one
        sizes[stage] += 1
        if cost > sum(costs) * (stage + 1) / pipe and stage < pipe - 1:
            stage += 1
    for stage in range(pipe - 1, 0, -1):
        while not sizes[stage]:
            giver = max((s for s in range(1, stage) if sizes[s] > 1), default=0)
            if sizes[giver] < 2:
                return None
            sizes[giver], sizes[stage] = sizes[giver] - 1, 1
    return tuple(sizes)


def playbook(data: Path) -> Source:
    """nanotron in bf16: it holds 16-bit gradients and the sums in fp32, and gathers the cut stream again in the
    backward; bytes are those of the first rank of the pipe axis, as rows with one microbatch show.  Between hosts its
    network is as fast as the source's own chart of all-reduces says."""
    found, network = Source("ultrascale_playbook.csv"), measured_network(data)
    for row in rows_of(data, found.name):
        layers, hidden, ffn, heads, vocab, length = ints(row, "layers hidden ffn heads vocab seq")
        nodes, shard, tensor, pipe = ints(row, "nodes dp tp pp")
        micro, m = ints(row, "micro_batch grad_accum")
        if row["consistent_batch"] == "0":
            found.leave_out("its degrees do not make its batch")
            continue
        model = Transformer(layers, hidden, ffn, heads, heads, vocab, tied=row["tied"] == "1")
        split = nanotron_split(layers, hidden, ffn, vocab, pipe)
        if pipe > 1 and split is None:
            found.leave_out("more stages than links")
            continue
        strategy = TABLE["zero1" if row["zero"] == "1" else "ddp"].mixed("bf16")
        kernels = replace(FUSED, gathers_again=True)
        try:
            plan = Plan(
                model, network[nodes], Mesh(pipe=pipe, shard=shard, tensor=tensor), strategy,
                micro * m * shard, length, m, split=split, sequence_parallel=True, kernels=kernels,
            )  # fmt: skip
        except ValueError as error:
            found.leave_out(str(error).split(":")[0])
            continue
        measured = row["status"] == "measured"
        kinds = {"model": row["model"], "tensor": "1" if tensor == 1 else "above 1", "pipe": str(pipe)}
        kinds |= {"hosts": str(nodes)}
        seconds = None
        if measured:
            seconds = plan.batch * length / float(row["tokens_per_s"])
        size = float(row["memory_gb"]) * 1e9 if measured else None
        held = 2 * fullest_params(plan)
        found.cases.append(Case(plan, kinds, seconds, size, held, first_rank=True, fitted=measured))
    return found


def measured_network(data: Path) -> dict[int, Cluster]:
    """The source's cluster for each number of hosts, with the bus bandwidth of all-reduces that its chart has.

    A ring sends as many bytes out of a host as over any link, so this is a host's bandwidth."""
    found = {1: preset("8xh100")}
    for row in rows_of(data, "ultrascale_charts.csv"):
        if row["chart"] == "pp_comm_bandwidth" and row["series"] == "AllReduce" and float(row["x"]):
            hosts = 2 ** int(float(row["x"]))
            cluster = preset("8xh100", hosts)
            reached = float(row["y"]) * 1e9 / cluster.reached.network
            found[hosts] = replace(cluster, between=replace(cluster.between, bandwidth=min(reached, 400e9)))
    return found


def fullest_params(plan: Plan) -> float:
    """Elements of the parameters on the fullest rank."""
    own = plan.itemsize(plan.strategy.params)
    return fullest(plan).params / own * plan.mesh.count(plan.strategy.params.split)


MPT = {
    # MosaicML's configurations: layers, hidden, heads
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def llm_foundry(data: Path) -> Source:
    """MPT under PyTorch's FSDP with flash attention, no biases, tied embedding.  "DEFAULT" sums gradients in fp32,
    "PURE" in bf16."""
    found = Source("llm_foundry_mpt.csv")
    for row in rows_of(data, found.name):
        length, gpus, micro, m = ints(row, "seq gpus micro_batch grad_accum")
        if "FP8" in row["table"]:
            found.leave_out("products in fp8")
            continue
        layers, hidden, heads = MPT[row["model"]]
        model = Transformer(
            layers, hidden, 4 * hidden, heads, heads, 50368, gated=False, tied=True, positions=length, family="mpt"
        )
        if abs(model.num_parameters / float(row["params"]) - 1) > 0.02:
            found.leave_out("another number of parameters than its sizes have")
            continue
        between = 400e9 if row["gpu"].startswith("h100") else 200e9  # tables: 1600 Gb/s; H100: not said
        cluster = preset(row["gpu"].replace("_", "-").removesuffix("gb").replace("h100-80", "h100"))
        cluster = replace(cluster, hosts=max(1, gpus // 8), devices=min(gpus, 8))
        cluster = replace(cluster, between=Link(between, cluster.between.latency))
        strategy = TABLE["zero3" if row["sharding"] == "FULL_SHARD" else "zero3_keep"].mixed("bf16")
        if row["mp_mode"] == "PURE":
            strategy = replace(strategy, grads=replace(strategy.grads, dtype=""))
        plan = Plan(
            model, cluster, Mesh(shard=gpus), strategy, micro * m * gpus, length, m,
            recompute="full" if row["activation_checkpointing"] == "True" else None,
        )  # fmt: skip
        seconds = plan.batch * length / (float(row["tokens_per_s_gpu"]) * gpus)
        kinds = {"device": row["gpu"], "model": row["model"], "tokens": str(length), "hosts": str(cluster.hosts)}
        found.cases.append(Case(plan, kinds, seconds))
    return found


LLAMA = {
    "8B": Transformer(32, 4096, 14336, 32, 8, 128256),
    "70B": Transformer(80, 8192, 28672, 64, 8, 128256),
    "405B": Transformer(126, 16384, 53248, 128, 8, 128256),
}


def torchtitan(data: Path) -> Source:
    """torchtitan's FSDP2 and tensor parallelism in bf16; its H100s have 96 GB and 500 W.  Its selective recomputation
    keeps the results of attention and of every other product.  So of a block's seven products those of key, output and
    up are repeated, with all that is element-wise and the gathers on the tensor axis (torchtitan's
    distributed/activation_checkpoint.py).  Bytes are not compared."""
    found = Source("torchtitan.csv")
    for row in rows_of(data, found.name):
        gpus, shard, tensor, pipe, context, length = ints(row, "gpus fsdp tp pp cp seq")
        if row["quantization"] != "none" or context > 1:
            found.leave_out("products in fp8" if row["quantization"] != "none" else "a context axis")
            continue
        model = LLAMA[row["model"].rsplit("-", 1)[1].upper().replace("LLAMA3.1", "")]
        batch = int(row["local_batch"]) * shard
        cluster = replace(preset("8xh100", gpus // 8), name="h100-96-500w")
        full, width, key = row["recompute"] == "full", model.hidden, model.kv_heads * model.head
        again = width * (key + width + model.ffn) / (width * (2 * key + 2 * width + 3 * model.ffn))
        plan = Plan(
            model, cluster, Mesh(pipe=pipe, shard=shard, tensor=tensor), TABLE["zero3"].mixed("bf16"), batch, length,
            recompute="full" if full else None, repeats=None if full else (again, 0.0, 1.0, 0.5),
            sequence_parallel=True,
            kernels=replace(FUSED, eager=row["compile"] == "no"),
        )  # fmt: skip
        seconds = batch * length / (float(row["tokens_per_s_gpu"]) * gpus)
        found.cases.append(Case(plan, {"model": row["model"], "compiled": row["compile"]}, seconds))
    return found


def megatron_bridge(data: Path) -> Source:
    """Megatron's dense Llamas on H100 in fp8: products at twice the peak of bf16."""
    found = Source("megatron_bridge.csv")
    for row in rows_of(data, found.name):
        if row["system"] != "DGX-H100" or row["model"] not in ("LLAMA3_8B", "LLAMA3_70B") or row["phase"][0] != "P":
            found.leave_out("not a dense model that is pretrained on H100, or with a context axis")
            continue
        gpus, batch, micro, length, tensor, pipe = ints(row, "gpus global_batch micro_batch seq TP PP")
        chunks = int(row["VP"]) if row["VP"].isdecimal() and int(row["VP"]) > 1 else None
        shard, model = gpus // tensor // pipe, LLAMA[row["model"].split("_")[1]]
        strategy = TABLE["zero3" if row["FSDP"] not in ("", "0", "1") else "zero1"].mixed("bf16")
        cluster = double_peak(preset("8xh100", gpus // 8))
        plan = Plan(
            model, cluster, Mesh(pipe=pipe, shard=shard, tensor=tensor), strategy, batch, length,
            batch // shard // micro, "interleaved" if chunks else None, chunks,
            split=balanced_ends(model.layers, pipe, chunks or 1), sequence_parallel=tensor > 1,
            kernels=replace(FUSED, fused_sums=True),
        )  # fmt: skip
        seconds = batch * length / (float(row["tokens_per_s_gpu"]) * gpus)
        found.cases.append(Case(plan, {"model": row["model"]}, seconds))
    return found


def double_peak(cluster: Cluster) -> Cluster:
    """The cluster with products in fp8, at twice the peak of bf16."""
    peak = {**cluster.device.peak, "bf16": 2 * cluster.device.peak["bf16"]}
    return replace(cluster, name=f"{cluster.name}{FP8}", device=replace(cluster.device, peak=peak))


FP8 = " in fp8"


Constants = Mapping[str, Reached]
"""Constants by the first letters of an accelerator's name; those of "" hold for all others."""


def with_constants(plan: Plan, constants: Constants) -> Plan:
    """The plan with other constants; attention stays in bf16, and so reaches half the share of a doubled peak."""
    name = plan.cluster.name
    reached = next((of for first, of in constants.items() if first and name.startswith(first)), constants[""])
    if name.endswith(FP8):
        reached = replace(reached, attention=reached.attention / 2)
    return replace(plan, cluster=replace(plan.cluster, reached=reached))


def tr11(data: Path) -> Source:
    """Megatron-DeepSpeed on A100 80 GB in bf16, ZeRO 1 and full recomputation; memory by nvidia-smi.  Its fork of 2021
    adds gradients to those before in separate kernels."""
    found = Source("bigscience_tr11.csv")
    needed = ["hidden", "layers", "dp", "tp", "pp", "nodes", "micro_batch", "global_batch", "sec_per_it"]
    for row in rows_of(data, found.name):
        heads = re.search(r"NHEADS=(\d+)", row["context"])
        if not all(row[name] for name in needed):
            found.leave_out("a degree, a size or the time is missing")
            continue
        hidden, layers, shard, tensor, pipe = ints(row, "hidden layers dp tp pp")
        nodes, micro, batch = ints(row, "nodes micro_batch global_batch")
        if row["size_consistent"] == "0" or nodes * 8 != shard * tensor * pipe or batch % (micro * shard):
            found.leave_out("sizes, devices or batch are not consistent")
            continue
        number = int(heads[1]) if heads else 80 if hidden == 14400 else 64
        if hidden % number or number % tensor:
            found.leave_out("heads are not named")
            continue
        model = Transformer(
            layers, hidden, 4 * hidden, number, number, 51200, gated=False, biases=True, tied=True, positions=2048
        )
        cluster = replace(preset("8xa100-80", nodes), between=Link(50e9, 10e-6))  # Jean Zay: four 100 Gb/s ports
        plan = Plan(
            model, cluster, Mesh(pipe=pipe, shard=shard, tensor=tensor), TABLE["zero1"].mixed("bf16"), batch, 2048,
            batch // shard // micro, split=balanced_ends(layers, pipe), recompute="full", dtype="bf16",
            kernels=replace(MEGATRON, fused_sums=False), overlap=False,
        )  # fmt: skip
        size = re.match(r"\d+", row["mem"])
        seconds, kinds = float(row["sec_per_it"]), {"micro batch": str(micro), "tensor": str(tensor)}
        found.cases.append(Case(plan, kinds, seconds, float(size[0]) * 2**30 if size else None))
    return found


def korthikanti(data: Path) -> list[tuple[str, str, Plan, dict[str, Any]]]:
    """Model, mode, plan, and the paper's numbers: GiB of states and activations, percent, seconds."""
    shapes = {  # hidden, layers, heads, pipe, chunks, samples of a microbatch, batch
        "22B": (6144, 48, 64, 1, None, 4, 4),
        "175B": (12288, 96, 96, 8, 3, 1, 64),
        "530B": (20480, 105, 128, 35, 3, 1, 280),
        "1T": (25600, 128, 160, 64, None, 1, 512),
    }
    said: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows_of(data, "megatron_korthikanti.csv"):
        key = "percent" if row["figure"] == "fig7" else row["quantity"]
        said.setdefault((row["model"], row["mode"]), {})[key] = float(row["value"])
    found = []
    for (name, mode), values in said.items():
        hidden, layers, heads, pipe, chunks, micro, batch = shapes[name]
        recompute = "full" if mode == "full" else "selective" if "selective" in mode else None
        plan = Plan(
            Transformer(
                layers, hidden, 4 * hidden, heads, heads, 51200, gated=False, biases=True, tied=True, positions=2048,
                dropout=True,
            ),
            preset("8xa100-80", pipe), Mesh(pipe=pipe, tensor=8), TABLE["ddp"].mixed("fp16"), batch, 2048,
            batch // micro, "interleaved" if chunks else None, chunks,
            split=balanced_ends(layers, pipe, chunks or 1), recompute=recompute,
            sequence_parallel="sequence" in mode, dtype="fp16", kernels=MEGATRON, overlap=False, scatters=True,
        )  # fmt: skip
        found.append((name, mode, plan, values))
    return found
