"""Refuses impossible runs before any process starts, so that a mistake costs a second and not a job."""

import os
from functools import partial

import torch

from plait.anymodel.tensor import resolve_carried
from plait.checkpoint.files.reading import read_text
from plait.checkpoint.files.writing import check_file, check_folder
from plait.forward.compiled import check_compile
from plait.pipeline.blocks import cut
from plait.pipeline.build_stages import split_of
from plait.predict.cluster import parse_cluster
from plait.run.config.bounds import MANY, check_values
from plait.run.config.machine import check_machine, resolve_device
from plait.run.config.room import check_room, checkpoint_bytes
from plait.run.config.settings import RunConfig, TrainConfig, VerifyConfig
from plait.run.config.sinks import METRICS, check_sinks
from plait.run.data.text import size_of
from plait.run.data.tokens import token_files
from plait.run.formats.huggingface import copied_files
from plait.run.injection.faults import parse_fault
from plait.run.job.config import JobConfig
from plait.run.job.dataset import make_data
from plait.run.job.families import FOLDER, OF_MIXTURES, OF_THE_FOLDER
from plait.run.job.job import build_model, make_job
from plait.run.job.sections import flags
from plait.run.report.page.saved import REPORT
from plait.schedule.check import check

WRITTEN = (METRICS, "config.toml", "summary.json", REPORT, "trace.json")
"""The files that a run leaves in its folder, in addition to checkpoints."""

LOOKED_INTO = 1 << 24
"""Largest text, in bytes, that is read before the ranks start."""

NEEDS = {
    **{"keep": "save_every", "restarts": "save_every", "change": "resume", "eval_steps": "eval_every"},
    **dict.fromkeys(("save_every", "cluster", "tensorboard"), "out"),
}
"""Settings that have no effect without another one."""

FOR_TEXT = {
    "sequence_parallel": "can be cut in time",
    "epochs": "has an end",
    "pack": "has documents",
    "eval_every": "has a held-out part",
}
"""Settings that only models of text have, each with the property of text that it needs."""


def validate(config: RunConfig) -> None:
    """Raises ValueError, with the numbers and the fix, for a run that is known to be impossible."""
    check_values(config)
    check_machine(config.machine)
    _ = config.row, config.task.optimizer_row  # raise if they are wrong
    _check_family(config)
    warmup, samples = config.task.update.warmup, config.task.samples
    if samples.epochs is None and warmup > samples.steps:
        raise ValueError(f"a warmup of {warmup} steps in a run of {samples.steps}: give at most {samples.steps}")
    _check_pipeline(config)
    ranks, microbatches = config.machine.parsed_mesh.data_size, config.layout.microbatches
    if (batch := config.task.samples.batch) < (parts := ranks * microbatches):
        raise ValueError(
            f"a batch of {batch} samples cannot fill {ranks} data ranks x {microbatches} microbatches = "
            f"{parts} parts: give batch >= {parts}, or fewer microbatches"
        )
    _check_data(config)
    check_room(config)
    if isinstance(config, TrainConfig):
        _check_training(config)
    if config.files.json not in (None, "-"):
        check_file("json", config.files.json)
    _check_model(config)


def _check_family(config: RunConfig) -> None:
    """Refuses an unknown model, sizes that do not fit together, and settings that its family does not have."""
    given, unsaid = flags(config), (flags(JobConfig()), flags(type(config)()))
    said = {name: given[name] for name in OF_THE_FOLDER if all(given[name] != one[name] for one in unsaid)}
    for name, value in said.items():
        if given["model"].startswith(FOLDER):
            raise ValueError(f"{name} {value} beside model {given['model']!r}, whose own holds: leave it out")
        if name in OF_MIXTURES and not hasattr(config.task.sizes, "num_experts"):
            raise ValueError(f"{name} {value}: {config.task.title} has no experts: give --model moe, or leave it out")
    if given["capacity"] is not None and given.get("pack"):
        raise ValueError("capacity beside pack: a row's documents would share the room of its experts: leave one out")
    if config.task.family.reads_text:
        return
    own = config.task.network.job is not None  # the engine checks whether it fits
    for name, why in FOR_TEXT.items():
        if own and name == "sequence_parallel":
            continue
        if given.get(name) not in (None, False):
            raise ValueError(f"{name} is for text, which {why}; {config.task.title} reads none: leave it out")
    if config.layout.recompute == "selective" and not own:
        raise ValueError(
            f"recompute selective is for attention, which {config.task.title} lacks: choose full, or leave it out"
        )


def _check_pipeline(config: RunConfig) -> None:
    """Proves the schedule.  Refuses one that is wrong, or that does not fit the mesh and the microbatches."""
    pipeline = config.pipeline
    schedule = pipeline.completed(config.layout.microbatches, config.row)
    if isinstance(config, VerifyConfig) or (isinstance(config, TrainConfig) and config.course.verify):
        check(schedule, in_order=True)
    if pipeline.num_stages == 1 and config.layout.split is not None:
        raise ValueError(
            f"split {config.layout.split!r}, but there is one stage: give the mesh a pipe axis, or leave it out"
        )


def _check_data(config: RunConfig) -> None:
    """Refuses data that is not text, or too little of it for a step.  Only the ranks read a large text."""
    data, family = config.task.samples.data, config.task.family
    large = data is not None and not token_files(data) and size_of(data) > LOOKED_INTO  # for every model
    if not (large and family.reads_text) and family.weights is None and config.task.network.job is None:
        make_data(config.task, config.dtypes.computed)


def _check_training(config: TrainConfig) -> None:
    """Refuses paths that a run could not write to, and settings without an effect."""
    output, course = config.output, config.course
    given, unsaid = flags(config), flags(TrainConfig())
    for name, needed in NEEDS.items():
        if given[name] != unsaid[name] and given[needed] is None:
            raise ValueError(f"{name} without {needed}: give --{needed.replace('_', '-')} too, or leave it out")
    if output.cluster is not None:
        parse_cluster(read_text(output.cluster, "the cluster"), output.cluster)
    if output.out is not None:
        files = [name for name in WRITTEN if os.path.lexists(os.path.join(output.out, name))]
        if files and not (output.overwrite or output.resume):
            raise ValueError(
                f"out {output.out!r} has the {', '.join(files)} of an earlier run: give another folder, "
                f"--resume auto to go on with that run, or --overwrite"
            )
        check_folder("out", output.out, WRITTEN, checkpoint_bytes(config) if output.save_every else 0)
    steps = config.task.samples.steps if config.task.samples.epochs is None else MANY
    for text in course.inject:
        fault = parse_fault(text, config.machine.parsed_mesh.size, threads=config.machine.world == "thread")
        if fault.step > steps:
            raise ValueError(f"the fault {text!r} is in step {fault.step}, but the run has {steps} steps")
    if output.export is not None:
        if not config.task.family.transformers:
            raise ValueError(f"export writes models of transformers, which {config.task.title} is not: leave it out")
        if os.path.lexists(output.export):
            raise ValueError(f"export {output.export!r} exists already: give a new folder")
        check_folder("export", output.export)
        copied_files(getattr(config.task.sizes, "path", None))
    check_sinks(tensorboard=output.tensorboard, wandb=output.wandb)


def _check_model(config: RunConfig) -> None:
    """Refuses files that do not fit together, a missing compiler, and a mesh that cannot cut this model."""
    mesh, stages, layout = config.machine.parsed_mesh, config.pipeline.num_stages, config.layout
    check_compile(config.parallelism, mesh.tensor, torch.device(resolve_device(config.machine)))
    if config.task.family.weights is not None:
        make_job(config.task, config.dtypes)
    if isinstance(config, VerifyConfig) and config.comparison.engine is not None:
        return  # another engine cuts models in its own way
    build = partial(build_model, config.task, config.dtypes)
    if stages > 1:
        split_of(cut(build()).blocks, stages, layout.sizes_of_stages)
    if mesh.tensor > 1 and not resolve_carried(build(), mesh.tensor, sequence=layout.sequence_parallel).cuts:
        raise ValueError(
            f"tensor={mesh.tensor}, but the plan cuts no parameter of {config.task.title}: give it more layers (mlp "
            f"has its first pair of cut layers with 4), or leave the tensor axis out"
        )
