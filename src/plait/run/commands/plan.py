"""``plait plan``: ranks layouts of a model on a cluster.  Nothing runs, and torch is not imported.

plait plan --model hf:DIR --hosts 16 --gpus 8xh100 --batch 1024 --length 8192 --search
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w
from rich.console import Console

from plait.checkpoint.files.reading import read_text
from plait.checkpoint.files.writing import check_file, check_folder, write_json, write_text
from plait.predict.chain import Chain
from plait.predict.cluster import Cluster, parse_cluster, preset
from plait.predict.memory import formula, state_bytes
from plait.predict.model import HF_FAMILIES, Transformer, from_hugging_face, where
from plait.predict.plan import Plan, implementation
from plait.predict.search import Question, candidates, ranked, rows_in
from plait.run.config.bounds import BOUNDS
from plait.run.launch.render import TARGETS
from plait.run.launch.spec import LaunchSpec
from plait.run.measure.layouts import MeasuredPlan, errors_text, measure_layout, measured_table
from plait.run.report.page.explorer import explorer
from plait.run.report.page.planned import change_text, plan_report
from plait.run.report.page.saved import REPORT, page
from plait.run.report.plans import as_json, described, details, gb, settings_of, states_table, table_of
from plait.run.report.screen import screen
from plait.table.cells import Strategy, find_strategy
from plait.table.mesh import Mesh

TOKENS = 1 << 22
"""The tokens of a step unless a batch is given: four million, as for large models."""

USUAL = ("ddp", "zero1", "zero3", "hsdp")
"""The rows that are tried without a search."""

OURS = ("llama", "qwen2", "gpt", "moe")
"""The models of plait train that sizes describe."""


@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """A decoder's sizes, from a file or by flags."""

    model: str | None = None
    """hf:PATH, a folder with a Hugging Face config.json, or that file; weights are not read. Otherwise the sizes below,
    of llama (also None), qwen2, gpt or moe (plait's own decoders)."""
    layers: int | None = None
    """Layers of a decoder."""
    width: int | None = None
    """Elements of a hidden vector."""
    ffn: int | None = None
    """The width inside its MLP; unless given, 8/3 of the width, up to a multiple of 32."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Key and value heads; as many as attention heads unless given."""
    vocab: int | None = None
    """Rows of its embedding, and of its head."""
    experts: int | None = None
    """Experts of each layer (moe); 8 unless given."""
    chosen: int | None = None
    """Experts of a token (moe); 2 unless given."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(SizeFlags):
    """Rank layouts of a model on a cluster: whether they fit, how long a step takes, and what bounds it.

    Exit code 0: a layout fits, 1: none does, 2: bad input.
    """

    job: str | None = None
    """FILE.py:NAME, a plait.UserJob of your own: its forward and loss run once on meta, with its batch."""
    params: str | None = None
    """Number of parameters, as 10B or 1T, if no sizes are known: only their state is counted."""
    hosts: int | None = None
    """Hosts of the cluster; 1 unless a cluster file says otherwise."""
    gpus: str = "8xh100"
    """Accelerators of a host, as 8xh100 (rtx4090, a100-40, a100-80, h100, h200, b200, gb200)."""
    cluster: str | None = None
    """A TOML file that describes the cluster instead."""
    batch: int | None = None
    """Samples of one step, over all ranks and microbatches. None: about four million tokens."""
    length: int = 4096
    """Tokens of a sample."""
    dtype: Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"] = "bf16-mixed"
    """Type of parameters and activations; mixed: sums of gradients and the optimizer are in fp32."""
    offload: bool = False
    """Keep the optimizer's state, and the copy of the parameters that it updates, in the hosts' memory."""
    search: bool = False
    """Try every mesh, row, order, number of microbatches and recomputation; otherwise the usual ones."""
    mesh: str | None = None
    """One mesh instead, as in "shard=16 tensor=8"; then strategy, microbatches, ... are as given."""
    strategy: str | None = None
    """A row of the table, or your own; None: zero3 with a mesh, the usual ones without."""
    microbatches: int = 1
    """With a mesh: microbatches of one step on each data rank."""
    schedule: str | None = None
    """With a mesh: the order of its pipeline."""
    chunks: int | None = None
    """With a mesh: stages on each rank, for the order interleaved."""
    recompute: Literal["full", "selective"] | None = None
    """With a mesh: activations to recompute in the backward."""
    all_to_all: bool = False
    """With a mesh: over its expert axis, each token goes only to the ranks of its experts."""
    sequence_parallel: bool = False
    """With a mesh: cut the activations between tensor-parallel products in time."""
    top: int = 10
    """Layouts to show."""
    measure: int = 0
    """Train this many of the first layouts for a few steps here, and show predicted and measured numbers."""
    out: str | None = None
    """A folder for report.html: one page that draws the best layout, with sliders for its neighbours."""
    toml: str | None = None
    """Write the best layout here, as plait train --config reads it; nothing if none fits."""
    write_script: Literal["slurm", "kubernetes", "skypilot", "modal", "ray", "torchx"] | None = None
    """Write the job of plait train for this scheduler next to the TOML, as plait submit does."""
    json: str | None = None
    """Write the result here as JSON; "-" is the standard output."""


def run(config: PlanConfig, argv: Sequence[str] = ()) -> int:
    console = screen(stderr=config.json == "-", soft_wrap=True)
    cluster = read_cluster(config)
    if config.write_script is not None and config.toml is None:
        raise ValueError(f"--write-script {config.write_script} without --toml, which the job reads: give --toml FILE")
    if config.toml is not None:
        check_file("toml", config.toml)
    if config.out is not None:
        check_folder("out", config.out, [REPORT])
        if (Path(config.out) / REPORT).exists():
            raise ValueError(f"out {config.out!r} has a {REPORT}, which would be lost: give another folder")
    if config.params is not None:
        if beside := first_given(config, "job", "measure", "out", "toml", "mesh"):
            raise ValueError(
                f"{beside} beside params: a number of parameters has no layers to lay out; give --model, or "
                f"--layers --width --heads --vocab"
            )
        return _show_states(config, cluster, console)
    model: Transformer | Chain
    if config.job is not None:
        model, config = read_job(config.job, config)
    else:
        model = read_model(config)
    place = Path((config.model or "hf:.").removeprefix("hf:")) if config.model not in OURS else Path()
    if not place.is_dir() and place.name != "config.json":
        raise ValueError(f"model {config.model!r}: give a folder with a config.json, which train reads too")
    rows = usable_rows(config)
    found = ranked(asked_plans(config, model, cluster, rows))
    if not found:
        raise ValueError(
            f"no mesh of {cluster.size:,} devices divides a batch of {config.batch:,} samples and the heads of a "
            f"decoder: give another batch, as of {cluster.size}"
        )
    of_tokens = "" if config.job else f" of {config.length:,} tokens"
    best, (dtype, _, mixed) = found[0], config.dtype.partition("-")
    console.print(
        f"{model.num_parameters:,} parameters on {described(cluster)}; {best.plan.batch:,} samples{of_tokens} a step; "
        f"{len(found):,} layouts judged, {sum(one.fits for one in found):,} fit"
    )
    console.print(table_of(found[: config.top], console))
    for line in details(best):
        console.print(line)
    every_row = rows_in(dtype, mixed=bool(mixed), offload=config.offload)
    if not best.fits:
        console.print(f"it does not fit: {change_text(best, every_row).removeprefix('none: ')}")
        if config.toml is not None:
            console.print(f"no layout fits, so {config.toml} is not written")
    else:
        console.print("\nplait train --config FILE, with this in it:\n")
        console.print(toml := to_config(config, best.plan))
        if config.toml is not None:
            write_text(config.toml, toml)
        if config.toml is not None and config.write_script is not None:
            file, text = script_of(config.write_script, config.toml, cluster)
            write_text(file, text)
            console.print(f"{file}:\n\n{text}")
    runs = [
        MeasuredPlan(one, measure_layout(to_config(config, one.plan)))
        for one in [one for one in found if one.fits][: config.measure]
    ]
    if runs:
        console.print(measured_table(runs))
        console.print(errors_text(runs))
    if config.out is not None:
        name = config.model or f"{model.num_parameters / 1e9:.3g} B parameters"
        report = plan_report(found, every_row, f"{name} on {described(cluster)}", config.top)
        rows = [row for row in every_row if row.name in USUAL or row == best.plan.strategy]
        report["explorer"] = explorer(best.plan, rows)
        Path(config.out).mkdir(parents=True, exist_ok=True)
        write_text(Path(config.out) / REPORT, page([report]))
        console.print(f"report: {Path(config.out) / REPORT}")
    if config.json is not None:
        layouts, measured = [as_json(one) for one in found[: config.top]], [one.as_json() for one in runs]
        write_json(config.json, {"layouts": layouts, "judged": len(found), "measured": measured})
    return 0 if best.fits else 1


# ---- from flags ---------------------------------------------------------------------------------------------


def read_cluster(config: PlanConfig) -> Cluster:
    if config.cluster is None:
        return preset(config.gpus, config.hosts or 1)
    found = parse_cluster(read_text(config.cluster, "the cluster"), config.cluster)
    return found if config.hosts is None else replace(found, hosts=config.hosts)


def first_given(config: PlanConfig, *names: str) -> str | None:
    """The first given flag among these and the size flags."""
    every = (*names, *(one.name for one in fields(SizeFlags)))
    return next((name for name in every if getattr(config, name) != getattr(PlanConfig, name)), None)


def read_job(place: str, config: PlanConfig) -> tuple[Chain, PlanConfig]:
    """A user's job as a chain, and the settings with its samples; such a sample counts as one token."""
    from plait.run.job.outline import outline  # only a job needs torch
    from plait.run.job.own import load_job

    if given := first_given(config, "batch", "length", "out"):
        why = "whose page is not drawn" if given == "out" else "which has its own model and batch"
        raise ValueError(f"{given} beside job, {why}: leave it out")
    model, samples = outline(load_job(place))
    return model, replace(config, batch=samples, length=1)


def read_model(config: SizeFlags) -> Transformer:
    model = config.model
    flags = {one.name: getattr(config, one.name) for one in fields(SizeFlags) if one.name != "model"}
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
    if model is not None and model not in OURS:
        if given:
            raise ValueError(f"{given[0]} beside --model {model}, which says it: leave one of them out")
        kind, _, path = model.partition(":")
        if kind != "hf" or not path:
            raise ValueError(
                f"model {model!r}: give hf:PATH, one of {', '.join(OURS)}, or sizes: --layers --width --heads --vocab"
            )
        place = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        found = from_hugging_face(text := read_text(place, "the config"), str(place))
        if found.layers > (most := BOUNDS["layers"].most):  # each has its place in the layout
            spot = where(str(place), text, HF_FAMILIES[found.family].layers)
            raise ValueError(f"{spot}: {found.layers}: give a whole number from 1 to {most:,}")
        return found
    if missing := [name for name in ("layers", "width", "heads", "vocab") if flags[name] is None]:
        more = ", --params" * hasattr(config, "params")
        raise ValueError(f"no {missing[0]}: give --model hf:PATH{more}, or --layers --width --heads --vocab")
    width = flags.pop("width")
    flags["ffn"] = flags["ffn"] or -(-8 * width // 96) * 32
    flags["kv_heads"] = flags["kv_heads"] or flags["heads"]
    number, chosen = flags.pop("experts"), flags.pop("chosen")
    if model == "moe":
        flags |= {"experts": number or 8, "chosen": chosen or 2, "shared_ffn": flags["ffn"]}
    elif number or chosen:
        raise ValueError(f"{'experts' if number else 'chosen'} without --model moe, which alone has experts: give it")
    tied = model in ("gpt", "moe")
    return Transformer(**flags, hidden=width, tied=tied, qkv_bias=model == "qwen2")


def usable_rows(config: PlanConfig) -> list[Strategy]:
    """The rows that the flags allow, in their dtypes."""
    dtype, _, mixed = config.dtype.partition("-")
    if config.strategy is not None:
        row = find_strategy(config.strategy)
        row = row.mixed(dtype) if mixed and not names_dtypes(row) else row
        return [row.offloaded() if config.offload else row]
    rows = rows_in(dtype, mixed=bool(mixed), offload=config.offload)
    if config.mesh is not None:
        rows = [row for row in rows if row.name == "zero3"]
    return [row for row in rows if config.search or row.name in USUAL]


def names_dtypes(row: Strategy) -> bool:
    """True if a row itself names the dtypes of its state."""
    return any(cell.dtype for cell in (row.params, row.grads, row.optim))


def asked_plans(
    config: PlanConfig, model: Transformer | Chain, cluster: Cluster, rows: Sequence[Strategy]
) -> Iterable[Plan]:
    """The plan of the flags if there is a mesh, otherwise the candidates."""
    dtype, parts = config.dtype.partition("-")[0], cluster.size
    if config.strategy is not None and names_dtypes(find_strategy(config.strategy)):
        dtype = rows[0].params.dtype or "fp32"  # as in train
    mesh = Mesh() if config.mesh is None else Mesh.parse(config.mesh)
    if config.mesh is not None:
        parts = mesh.data_size * config.microbatches
        if "hosts" not in config.mesh and mesh.size == cluster.size:
            mesh = replace(mesh, hosts=cluster.hosts)
    batch = config.batch or max(1, round(TOKENS / config.length / parts)) * parts
    if config.mesh is None:
        return candidates(Question(model, cluster, batch, config.length, dtype), rows, everything=config.search)
    plan = Plan(
        *(model, cluster, mesh, rows[0], batch, config.length),
        *(config.microbatches, config.schedule, config.chunks),
        recompute=config.recompute,
        sequence_parallel=config.sequence_parallel,
        all_to_all=config.all_to_all,
        dtype=dtype,
        **implementation(model, cluster),
    )
    return [plan]


def parse_count(text: str) -> int:
    """Parses ``7B`` or ``1.5T`` into a number.  Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([MBT])", text)
    if match is None or not float(match[1]):
        raise ValueError(f"params {text!r}: give a number and M, B or T, as in 10B")
    return round(float(match[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[match[2]])


# ---- to the screen ------------------------------------------------------------------------------------------


def _show_states(config: PlanConfig, cluster: Cluster, console: Console) -> int:
    """Shows the bytes between steps of a number of parameters, under each row, with all devices on the data axes."""
    assert config.params is not None
    count, dtype = parse_count(config.params), config.dtype.partition("-")[0]
    mesh = Mesh(replica=cluster.hosts, shard=cluster.devices, hosts=cluster.hosts)
    rows = usable_rows(replace(config, search=True))
    whole = formula(count, Mesh(), rows[0], **state_bytes(rows[0], dtype))
    found, table = states_table(count, mesh, rows, dtype, cluster.device.memory)
    fits = any(row["fits"] for row in found)
    console.print(
        f"{count:,} parameters in {config.dtype} are {gb(whole.params)}, and {gb(whole.total)} with their gradients "
        f"and Adam's state; on {described(cluster)} each device holds between steps:"
    )
    console.print(table)
    if not fits:
        console.print(f"zero3 fits on {-int(-whole.total // cluster.device.memory):,} of these devices")
    console.print("Activations depend on sizes: give --model, or --layers --width --heads --vocab.")
    write_json(config.json, {"parameters": count, "whole": asdict(whole), "rows": found})
    return 0 if fits else 1


# ---- to files -----------------------------------------------------------------------------------------------


def to_config(config: PlanConfig, plan: Plan) -> str:
    """The layout as the TOML that ``plait train --config`` reads."""
    model, values = plan.model, dict[str, Any]()
    if isinstance(model, Chain):
        values["job"] = config.job
    elif config.model is not None and config.model not in OURS:
        path = config.model.removeprefix("hf:")
        values["model"] = f"hf:{path if Path(path).is_dir() else Path(path).parent}"
    else:
        values |= {"model": config.model or "llama", "layers": model.layers}
        values |= {"width": model.hidden, "ffn": model.ffn, "heads": model.heads, "kv_heads": model.kv_heads}
        values |= {"vocab": model.vocab, "dropout": 0.0}
        values |= {"experts": model.experts, "chosen": model.chosen} if model.experts else {}
    values |= {} if isinstance(model, Chain) else {"length": plan.length, "batch": plan.batch}
    values["dtype"] = config.dtype
    own = config.strategy if config.strategy is not None and ":" in config.strategy else None
    if own is not None and names_dtypes(find_strategy(own)):
        values["dtype"] = "fp32"  # the row names its dtypes itself
    values |= {"offload": config.offload, "world": plan.cluster.world, "device": plan.cluster.kind}
    values |= settings_of(plan) | ({"strategy": own} if own else {})
    return tomli_w.dumps({name: value for name, value in values.items() if value is not None and value is not False})


def script_of(target: str, toml: str, cluster: Cluster) -> tuple[Path, str]:
    """The file and the text of the job that trains by the TOML on this cluster."""
    spec = LaunchSpec(
        hosts=cluster.hosts,
        ranks_per_host=cluster.devices,
        command=("-m", "plait", "train", "--config", toml),
        gpu=None if cluster.kind == "cpu" else cluster.name,
    )
    row = TARGETS[target]
    return Path(toml).with_suffix(Path(row.file).suffix), row.render(spec)
