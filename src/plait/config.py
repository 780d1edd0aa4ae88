"""A run as one frozen value, checked before any process starts.

    defaults  <-  --config FILE.toml  <-  flags of the command line

``TrainConfig`` and ``VerifyConfig`` share the fields of ``RunConfig``; ``validate`` refuses what can be
known without starting anything (a mesh, a row, sizes that don't divide), with the numbers and the fix, so
that a mistake costs a second and not a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from plait.config_file import from_toml as from_toml
from plait.core.actions import Schedule, parse_schedule
from plait.core.cells import find_strategy
from plait.core.check import check
from plait.core.mesh import Mesh
from plait.core.orders import ORDERS
from plait.core.pipeline import Pipeline
from plait.machine import Device, World, check_machine
from plait.machine import Machine as Machine
from plait.machine import resolve_device as resolve_device
from plait.models.gpt import GPTConfig
from plait.models.hf import HFConfig, check_installed
from plait.models.mlp import MLPConfig


@dataclass(frozen=True)
class RunConfig:
    """What training and verifying have in common: the layout, the model, the data and the machine."""

    config: str | None = None
    """A TOML file whose keys are these names; flags given beside it win."""

    mesh: str = "shard=4"
    """Ranks on named axes, as in "replica=2 shard=2"; their product is the number of ranks."""
    strategy: str = "zero3"
    """A row of the table (ddp, zero1, ... hpz), or your own: "name: params | kept | grads | state"."""
    microbatches: int = 1
    """Microbatches of one step on each data rank."""
    schedule: str | None = None
    """Who of the pipe axis does what when: an order (naive, gpipe, 1f1b, interleaved, zb_h1, zb_h2, zbv, dualpipe_v),
    or a file that plait schedule check proves. None: 1f1b, where there is a pipeline."""
    chunks: int | None = None
    """Stages on each rank, for interleaved; None: 2."""
    hold: int | None = 1
    """Stages that a rank keeps unsharded for its next passes, under a row that splits parameters; None: units are
    gathered one by one in every pass, which takes the least memory and the most messages."""
    split: str | None = None
    """Links of the model on each stage, as in "5 4"; "measured" balances what they cost. None: equally many."""
    world: World = "process"
    """What a rank is: a process, or a thread of this one."""

    model: Literal["mlp", "gpt", "llama", "qwen2"] = "gpt"
    """gpt: a small decoder on text. llama, qwen2: Hugging Face's. mlp: linear layers on regression data."""
    layers: int | None = None
    """Layers (mlp: 16, the others: 4 unless given)."""
    width: int = 128
    """Elements of a hidden vector."""
    heads: int = 4
    """Attention heads (all but mlp)."""
    kv_heads: int = 2
    """Key/value heads, shared by groups of heads (all but mlp)."""
    dropout: float = 0.1
    """The probability of dropping (llama, qwen2: attention weights only)."""

    steps: int = 60
    """Steps of the optimizer."""
    batch: int = 16
    """Samples of one step, over all ranks and microbatches."""
    length: int = 128
    """Tokens of one sample (all but mlp)."""
    ragged: bool = False
    """Samples of different token counts, so that ranks and microbatches differ too."""
    data: str | None = None
    """A file or folder of text; None is the source of Python's standard library."""
    seed: int = 0
    """Decides initial weights, data order and dropout."""

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """The optimizer, as torch.optim has it."""
    lr: float = 3e-3
    """The learning rate."""
    clip: float | None = 1.0
    """The largest global gradient norm; None does not clip."""
    dtype: Literal["fp32", "fp64", "bf16"] = "fp32"
    """Of the parameters and the computation."""

    sequence_parallel: bool = False
    """Cut the stream between tensor-parallel products in time (over one rank: nothing)."""
    cut: Literal["element", "tensor"] = "element"
    """Where the data axes may cut: anywhere in a parameter, or only between parameters."""
    prefetch: int = 1
    """How many units are gathered ahead of the running one."""
    device: Device = "cpu"
    """Where ranks compute; auto is cuda where there is one."""
    threads: int = 1
    """Compute threads of each rank."""
    deadline: float = 60.0
    """Seconds after which a rank that waits for another gives up."""
    port: int = 0
    """The port at which own processes meet; 0 takes a free one."""
    json: str | None = None
    """Write the results here as JSON; "-" is the standard output."""

    @property
    def parsed_mesh(self) -> Mesh:
        """The mesh as a value."""
        return Mesh.parse(self.mesh)

    @property
    def pipeline(self) -> Pipeline:
        """How the ranks of the pipe axis share the work.

        Raises:
            ValueError: an unknown order, or a file that holds no schedule for this mesh.
        """
        name = self.schedule
        written = name is not None and name not in ORDERS and Path(name).is_file()
        return Pipeline(read_schedule(str(name)) if written else name, self.parsed_mesh.pipe, self.chunks, self.hold)

    @property
    def sizes_of_stages(self) -> tuple[int, ...] | None:
        """The split as numbers; None: equally many, or measured."""
        if self.split is None or self.split == "measured":
            return None
        words = self.split.replace(",", " ").split()
        if not words or not all(word.isdecimal() for word in words):
            raise ValueError(f'split {self.split!r}: give the links of each stage, as in "5 4", or "measured"')
        return tuple(map(int, words))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch calls it."""
        return {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}[self.dtype]

    @property
    def model_config(self) -> GPTConfig | HFConfig | MLPConfig:
        """The sizes of the chosen model.

        Raises:
            ValueError: sizes that don't fit together, or a model whose package is not installed.
        """
        if self.model == "mlp":
            return MLPConfig(
                num_layers=16 if self.layers is None else self.layers, width=self.width, dropout=self.dropout
            )
        sizes = GPTConfig(
            num_layers=4 if self.layers is None else self.layers,
            width=self.width,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            max_length=self.length,
            dropout=self.dropout,
        )
        if self.model == "gpt":
            return sizes
        check_installed()
        return HFConfig(**vars(sizes), kind=self.model)


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Train a model on a mesh; show its loss, its speed and its bytes, predicted and measured."""

    out: str | None = None
    """A folder for metrics.jsonl (one object a step), the summary, and the timeline of a step (SVG, Perfetto)."""
    verify: bool = False
    """At the end, train again as one process and compare."""
    log_every: int = 10
    """Steps between two lines on the screen."""


@dataclass(frozen=True)
class VerifyConfig(RunConfig):
    """Hold a layout against the single process: losses, every gradient, norm, parameters, optimizer state.

    Exit code 0: equal, 1: not equal, 2: bad input.
    """

    mesh: str = "shard=2"
    steps: int = 5
    width: int = 64
    batch: int = 12
    length: int = 32
    ragged: bool = True
    world: World = "thread"
    tensors: bool = False
    """Print every tensor that was compared, not only a line per kind."""


def validate(config: RunConfig) -> None:
    """Refuses what is known to be impossible before anything starts.

    Raises:
        ValueError: with the numbers and the fix.
    """
    mesh = config.parsed_mesh
    find_strategy(config.strategy)
    if config.sequence_parallel and config.model == "mlp":
        raise ValueError("sequence_parallel cuts activations in time, which mlp has not: choose gpt, or leave it out")
    _at_least(config, "microbatches", 1)
    _check_pipeline(config)
    for name in ("steps", "batch", "length", "threads", "log_every"):
        _at_least(config, name, 1)
    _at_least(config, "prefetch", 0)
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
    if isinstance(config, TrainConfig) and config.out is not None and Path(config.out).is_file():
        raise ValueError(f"out {config.out!r} is a file: give a folder for the metrics")
    check_machine(config)


def _check_pipeline(config: RunConfig) -> None:
    """Refuses a schedule that is wrong, or does not fit the mesh and the microbatches; it is proved here."""
    pipeline = config.pipeline
    schedule = pipeline.completed(config.microbatches, find_strategy(config.strategy))
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


def read_schedule(path: str) -> Schedule:
    """The schedule in a file.

    Raises:
        ValueError: a file that cannot be read, or holds something else.
    """
    try:
        return parse_schedule(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read the schedule {path!r}: {reason}") from error


def _at_least(config: RunConfig, name: str, least: int) -> None:
    value = getattr(config, name, least)
    if value < least:
        raise ValueError(f"{name} is {value}: give a whole number from {least}")
