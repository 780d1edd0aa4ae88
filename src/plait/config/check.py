"""What is known to be impossible is refused here, before any process starts: a mistake costs a second and not a job."""

import math
import os
from pathlib import Path

import torch

from plait.config.machine import MachineConfig, check_machine, resolve_device
from plait.config.settings import RunConfig, TrainConfig, VerifyConfig
from plait.config.sinks import METRICS, check_sinks
from plait.core.precision import LossScale
from plait.engine.pipeline.build_stages import split_of
from plait.engine.pipeline.chain import chain_of
from plait.inject.faults import parse_fault
from plait.job.job import build_model, make_job
from plait.schedule.check import check
from plait.tensor_parallel import parallel_plan
from plait.tensor_parallel.gemm import find_gemm

AT_LEAST = {
    **dict.fromkeys(("microbatches", "steps", "epochs", "batch", "length", "threads", "log_every", "eval_steps"), 1),
    **dict.fromkeys(("save_every", "keep"), 1),
    **dict.fromkeys(("prefetch", "warmup", "workers", "eval_every", "restarts", "grace"), 0),
    "repeat": 1,
}
"""The least that a setting may be, where it is given."""

FOR_TEXT = {
    "sequence_parallel": "can be cut in time",
    "epochs": "has an end",
    "pack": "has documents",
    "eval_every": "has a held-out part",
}
"""Settings for models of text, and what text has that other data does not."""


def validate(config: RunConfig) -> None:
    """Refuses what is known to be impossible, by a ValueError with the numbers and the fix."""
    _ = config.row, config.optimizer_row  # raise what is wrong with them
    _check_family(config)
    check_numbers(config)
    _check_rates(config)
    _check_pipeline(config)
    ranks, parts = config.parsed_mesh.data_size, config.parsed_mesh.data_size * config.microbatches
    if config.batch < parts:
        raise ValueError(
            f"a batch of {config.batch} samples cannot fill {ranks} data ranks x {config.microbatches} microbatches = "
            f"{parts} parts: give batch >= {parts}, or fewer microbatches"
        )
    if config.data is not None and not Path(config.data).exists():
        raise ValueError(
            f"no file or folder at data {config.data!r}: check the path, or leave it out for Python's own source"
        )
    if isinstance(config, TrainConfig):
        _check_training(config)
    if config.json is not None and config.json != "-":
        if not Path(config.json).absolute().parent.is_dir():
            raise ValueError(f"json {config.json!r}: there is no such folder; make it, or give another")
        _check_writable("json", config.json)
    check_machine(config)
    _check_dtypes(config)
    _check_model(config)


def _check_family(config: RunConfig) -> None:
    """Refuses an unknown model, sizes that do not fit together, and settings that are not for its family."""
    _ = config.sizes
    if config.family.reads_text:
        return
    for name, why in FOR_TEXT.items():
        if getattr(config, name, None) not in (None, False):
            raise ValueError(f"{name} is for text, which {why}; {config.title} reads none: leave it out")
    if config.recompute == "selective":
        raise ValueError(
            f"recompute selective is for attention, which {config.title} lacks: choose full, or leave it out"
        )


def check_numbers(config: MachineConfig) -> None:
    """Refuses numbers out of range, of those settings that a config has."""
    for name, least in AT_LEAST.items():
        value = getattr(config, name, None)
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}: give a {'' if name == 'grace' else 'whole '}number from {least}")
    for name in ("lr", "deadline", "clip"):
        value = getattr(config, name, None)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: give a number above 0")


def _check_rates(config: RunConfig) -> None:
    """Refuses a schedule of the learning rate that does not fit the run, and rates out of range."""
    if config.epochs is None and config.warmup > config.steps:
        raise ValueError(f"a warmup of {config.warmup} steps in a run of {config.steps}: give at most {config.steps}")
    if not 0 <= config.min_lr <= 1:
        raise ValueError(f"min_lr is {config.min_lr}, a fraction of lr: give a number from 0 to 1")
    if config.weight_decay is not None and not 0 <= config.weight_decay < math.inf:
        raise ValueError(f"weight_decay is {config.weight_decay}: give a number from 0")


def _check_pipeline(config: RunConfig) -> None:
    """Refuses a schedule that is wrong, or does not fit the mesh and the microbatches; it is proved here."""
    pipeline = config.pipeline
    schedule = pipeline.completed(config.microbatches, config.row)
    if isinstance(config, VerifyConfig) or (isinstance(config, TrainConfig) and config.verify):
        check(schedule, in_order=True)
    if pipeline.num_stages == 1 and config.split is not None:
        raise ValueError(f"split {config.split!r}, but there is one stage: give the mesh a pipe axis, or leave it out")


def _check_training(config: TrainConfig) -> None:
    """Refuses places that a run could not write to, and a limit on evaluations where there are none."""
    if config.out is not None and Path(config.out).is_file():
        raise ValueError(f"out {config.out!r} is a file: give a folder for the metrics")
    if config.out is not None and not (config.overwrite or config.resume) and (Path(config.out) / METRICS).exists():
        raise ValueError(
            f"out {config.out!r} has the metrics of an earlier run: give another folder, --resume auto to go on with "
            f"that run, or --overwrite"
        )
    for fault in config.inject:
        parse_fault(fault, config.parsed_mesh.size, threads=config.world == "thread")
    _check_writable("out", config.out)
    _check_writable("export", config.export)
    if config.export is not None:
        if not config.family.transformers:
            raise ValueError(f"export writes models of transformers, which {config.title} is not: leave it out")
        if Path(config.export).exists():
            raise ValueError(f"there is something at export {config.export!r} already: give a new folder")
    check_sinks(config.out, tensorboard=config.tensorboard, wandb=config.wandb)
    if config.eval_every is None and config.eval_steps != TrainConfig.eval_steps:
        raise ValueError(f"eval_steps {config.eval_steps} without eval_every: give that as well, 0 for once at the end")


def _check_writable(name: str, path: str | None) -> None:
    """Refuses a place that nothing can be written to, which a run would notice only at its end."""
    if path is not None:
        place = Path(path).absolute()
        there = next(parent for parent in (place, *place.parents) if parent.exists())
        if not os.access(there, os.W_OK):
            raise ValueError(f"{name} {path!r}: nothing can be written in {str(there)!r}; give another place")


def _check_dtypes(config: RunConfig) -> None:
    """Refuses a dtype in which the device cannot compute, and an impossible loss scale."""
    dtype, device = config.torch_dtype, resolve_device(config.device)
    if dtype != torch.float32:
        try:
            matrix = torch.ones(2, 2, dtype=dtype, device=device)
            assert (matrix @ matrix).numel()
        except RuntimeError as error:
            raise ValueError(f"{device} cannot multiply matrices in {dtype}: choose another dtype ({error})") from error
    if config.loss_scale is not None:
        LossScale(config.loss_scale)


def _check_model(config: RunConfig) -> None:
    """Refuses files that do not fit together, a gemm that this torch lacks, and a mesh that cannot cut this model."""
    mesh, pipeline = config.parsed_mesh, config.pipeline
    find_gemm(config.gemm)
    if config.family.weights is not None:
        make_job(config)
    if pipeline.num_stages > 1:
        split_of(chain_of(build_model(config)), pipeline.num_stages, config.sizes_of_stages)
    if mesh.tensor > 1:
        parallel = parallel_plan(build_model(config), mesh.tensor, sequence=config.sequence_parallel)
        if not parallel.cuts:
            raise ValueError(
                f"tensor={mesh.tensor}, but the plan cuts no parameter of {config.title}: give it more layers (mlp has "
                f"its first pair of cut layers with 4), or leave the tensor axis out"
            )
