"""What is known to be impossible is refused here, before any process starts, with the numbers and the fix.

A mistake costs a second and not a job.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from plait.config.machine import check_machine, resolve_device
from plait.config.settings import RunConfig, TrainConfig, VerifyConfig
from plait.core.check import check
from plait.core.precision import LossScale
from plait.sinks import check_sinks


def validate(config: RunConfig) -> None:
    """Refuses what is known to be impossible before anything starts.

    Raises:
        ValueError: with the numbers and the fix.
    """
    mesh = config.parsed_mesh
    assert config.row
    if config.sequence_parallel and config.model == "mlp":
        raise ValueError("sequence_parallel cuts activations in time, which mlp has not: choose gpt, or leave it out")
    if config.recompute == "selective" and config.model == "mlp":
        raise ValueError("recompute selective is for attention, which mlp has not: choose full, or leave it out")
    _at_least(config, "microbatches", 1)
    _check_pipeline(config)
    for name in ("steps", "batch", "length", "threads", "log_every"):
        _at_least(config, name, 1)
    _at_least(config, "prefetch", 0)
    _at_least(config, "warmup", 0)
    _check_data(config)
    if config.epochs is None and config.warmup > config.steps:
        raise ValueError(f"a warmup of {config.warmup} steps in a run of {config.steps}: give at most {config.steps}")
    if not 0 <= config.min_lr <= 1:
        raise ValueError(f"min_lr is {config.min_lr}, a fraction of lr: give a number from 0 to 1")
    if config.weight_decay is not None and not 0 <= config.weight_decay < math.inf:
        raise ValueError(f"weight_decay is {config.weight_decay}: give a number from 0")
    for name in ("lr", "deadline", "clip"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: give a number above 0")
    assert config.model_config
    parts = mesh.data_size * config.microbatches
    if config.batch < parts:
        raise ValueError(
            f"a batch of {config.batch} samples cannot fill {mesh.data_size} data ranks x "
            f"{config.microbatches} microbatches = {parts} parts: "
            f"give batch >= {parts}, or fewer microbatches"
        )
    if config.data is not None and not Path(config.data).exists():
        raise ValueError(
            f"no file or folder at data {config.data!r}: check the path, or leave it out for Python's own source"
        )
    if isinstance(config, TrainConfig):
        _check_training(config)
    if config.json not in (None, "-"):
        if not Path(str(config.json)).absolute().parent.is_dir():
            raise ValueError(f"json {config.json!r}: there is no such folder; make it, or give another")
        _check_writable("json", config.json)
    check_machine(config)
    _check_dtypes(config)


def _check_training(config: TrainConfig) -> None:
    """Refuses what a run could not write, and an evaluation that has no data."""
    if config.out is not None and Path(config.out).is_file():
        raise ValueError(f"out {config.out!r} is a file: give a folder for the metrics")
    _check_writable("out", config.out)
    _check_writable("export", config.export)
    if config.export is not None:
        if config.model in ("mlp", "gpt"):
            raise ValueError(f"export writes models of transformers, which {config.model} is not: leave it out")
        if Path(config.export).exists():
            raise ValueError(f"there is something at export {config.export!r} already: give a new folder")
    check_sinks(config.out, tensorboard=config.tensorboard, wandb=config.wandb)
    if config.eval_every is not None:
        _at_least(config, "eval_every", 0)
        if config.eval_steps is not None:
            _at_least(config, "eval_steps", 1)
        if config.model == "mlp":
            raise ValueError("eval_every, but mlp's regression data has no held-out part: leave it out")
    elif config.eval_steps is not None:
        raise ValueError(f"eval_steps {config.eval_steps} without eval_every: give that as well, 0 for once at the end")


def _check_writable(name: str, path: str | None) -> None:
    """Refuses a place that nothing can be written to; what a run leaves is written at its end."""
    if path is None:
        return
    place = Path(path).absolute()
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        raise ValueError(f"{name} {path!r}: nothing can be written in {str(there)!r}; give another place")


def _check_dtypes(config: RunConfig) -> None:
    """Refuses a dtype in which the device cannot compute, and a loss scale that is none."""
    dtype, device = config.torch_dtype, resolve_device(config.device)
    if dtype != torch.float32:
        try:
            matrix = torch.ones(2, 2, dtype=dtype, device=device)
            assert (matrix @ matrix).numel()
        except RuntimeError as error:
            raise ValueError(f"{device} cannot multiply matrices in {dtype}: choose another dtype ({error})") from error
    if config.loss_scale is not None:
        LossScale(config.loss_scale)


def _check_data(config: RunConfig) -> None:
    """Refuses what the data of the model cannot do."""
    for name, given in (("epochs", config.epochs is not None), ("pack", config.pack)):
        if given and config.model == "mlp":
            raise ValueError(f"{name} is for text, and mlp's regression data has no end and no documents: leave it out")
    if config.epochs is not None:
        _at_least(config, "epochs", 1)
    _at_least(config, "workers", 0)


def _check_pipeline(config: RunConfig) -> None:
    """Refuses a schedule that is wrong, or does not fit the mesh and the microbatches; it is proved here."""
    pipeline = config.pipeline
    schedule = pipeline.completed(config.microbatches, config.row)
    if isinstance(config, VerifyConfig) or (isinstance(config, TrainConfig) and config.verify):
        check(schedule, in_order=True)
    sizes = config.sizes_of_stages
    if pipeline.num_stages == 1 and config.split is not None:
        raise ValueError(f"split {config.split!r}, but there is one stage: give the mesh a pipe axis, or leave it out")
    if sizes is not None and len(sizes) != pipeline.num_stages:
        raise ValueError(
            f"split {config.split!r} is for {len(sizes)} stages, but the pipeline has {pipeline.num_stages}: "
            f"give {pipeline.num_stages} numbers"
        )


def _at_least(config: RunConfig, name: str, least: int) -> None:
    value = getattr(config, name, least)
    if value < least:
        raise ValueError(f"{name} is {value}: give a whole number from {least}")
