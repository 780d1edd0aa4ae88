"""A run as one frozen value: every flag of ``plait train`` and ``plait verify``, and what follows from it.

defaults  <-  --config FILE.toml  <-  flags of the command line
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from plait.config.machine import Device, World
from plait.core.actions import Schedule, parse_schedule
from plait.core.cells import LONG, Strategy, find_strategy
from plait.core.mesh import Mesh
from plait.core.orders import ORDERS
from plait.core.pipeline import Pipeline
from plait.core.precision import LossScale
from plait.models.gpt import GPTConfig
from plait.models.hf import HFConfig, check_installed
from plait.models.mlp import MLPConfig
from plait.models.pretrained import Pretrained

MODELS = ("gpt", "llama", "qwen2", "mlp")
"""The models that are built from their sizes."""


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

    model: str = "gpt"
    """gpt: a small decoder on text. llama, qwen2: Hugging Face's. hf:PATH: a Hugging Face folder with weights, config
    and tokenizer, whose sizes and dropout hold. mlp: linear layers on regression data."""
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
    epochs: int | None = None
    """Passes over the data, instead of steps; the last step of each has the samples that are left (all but mlp)."""
    length: int = 128
    """Tokens of one sample (all but mlp)."""
    pack: bool = False
    """Pack documents of the text into rows, with attention inside each only (all but mlp)."""
    ragged: bool = False
    """Samples of different token counts, so that ranks and microbatches differ too."""
    data: str | None = None
    """A file or folder of text, or of .jsonl with a "text" a line; None: the source of Python's standard library."""
    seed: int = 0
    """Decides initial weights, data order and dropout."""

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """The optimizer, as torch.optim has it."""
    lr: float = 3e-3
    """The learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warmup: linear and cosine fall to min_lr."""
    warmup: int = 0
    """Steps in which the learning rate grows to lr, in equal parts."""
    min_lr: float = 0.1
    """What linear and cosine fall to, as a fraction of lr."""
    weight_decay: float | None = None
    """Decay of matrices and embeddings, and not of norms and biases; None: as torch's optimizer has it, for all."""
    clip: float | None = 1.0
    """The largest global gradient norm; None does not clip."""
    dtype: Literal["fp32", "fp64", "bf16", "bf16-mixed", "fp16-mixed"] = "fp32"
    """Of the parameters and the computation; mixed: sums of gradients, and the copy of the parameters that the
    optimizer updates, are in fp32. A row written by hand may say its own dtypes, as in "full bf16 | ..."."""
    offload: bool = False
    """Keep the optimizer's state, and the copy of the parameters that it updates, on the CPU."""
    loss_scale: float | None = None
    """The first factor of the loss, which follows the gradients from then on; None: 65536 for fp16, 1 otherwise."""

    recompute: Literal["full", "selective"] | None = None
    """Make activations a second time in the backward instead of keeping them: full, all inside a block; selective,
    those of attention, which grow with the square of the length. None: keep all."""
    gemm: Literal["torch", "onednn"] = "torch"
    """Who multiplies the fp32 matrices of linear layers on a CPU; plait doctor measures both on this machine."""
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
        order = read_schedule(name) if name is not None and names_a_file(name) else name
        return Pipeline(order, self.parsed_mesh.pipe, self.chunks, self.hold)

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
    def row(self) -> Strategy:
        """The strategy, with the dtypes and the device that other settings give its cells.

        Raises:
            ValueError: no such row, or one that says its own dtypes beside another setting that does.
        """
        row = find_strategy(self.strategy)
        if self.dtype != "fp32" and (row.params.dtype or row.grads.dtype or row.optim.dtype):
            raise ValueError(f"strategy {row.name!r} says dtypes of its own ({row.row()}), beside dtype {self.dtype}")
        name, _, mixed = self.dtype.partition("-")
        row = row.mixed(name) if mixed else row
        return row.offloaded() if self.offload else row

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the computation."""
        return _named(self.row.params.dtype or self.dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        """In which the model is built: that of the master weights, where there are any."""
        row = self.row
        return _named(row.optim.dtype or row.params.dtype or self.dtype)

    @property
    def first_scale(self) -> float | None:
        """What the loss is multiplied by at first; None: the loss is left alone."""
        fp16 = self.torch_dtype == torch.float16
        return LossScale().scale if self.loss_scale is None and fp16 else self.loss_scale

    @property
    def model_config(self) -> GPTConfig | HFConfig | MLPConfig | Pretrained:
        """The sizes of the chosen model, or the folder that has them.

        Raises:
            ValueError: no such model, sizes that don't fit together, a folder without a model, or a package that is not
                installed.
        """
        if self.model.startswith("hf:"):
            check_installed()
            return Pretrained(self.model.removeprefix("hf:"))
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}: {_nearest_model(self.model)}")
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
        return HFConfig(**vars(sizes), kind="llama" if self.model == "llama" else "qwen2")


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Train a model on a mesh; show its loss, its speed and its bytes, predicted and measured."""

    out: str | None = None
    """A folder for metrics.jsonl (one object a step), the summary, and the timeline of a step (SVG, Perfetto)."""
    verify: bool = False
    """At the end, train again as one process and compare."""
    export: str | None = None
    """A new folder for the trained model, as transformers loads it (llama, qwen2, hf:PATH)."""
    workers: int = 0
    """Processes of each rank that make the batches of the coming steps; 0: the rank makes them itself."""
    log_every: int = 10
    """Steps between two lines on the screen."""
    eval_every: int | None = None
    """Steps between two losses on the held-out text; the last step has one too. 0: only that one. None: none."""
    eval_steps: int | None = None
    """Batches of one evaluation at most; None: all of the held-out text."""
    tensorboard: bool = False
    """Write TensorBoard's event files into the folder out as well."""
    wandb: str | None = None
    """The project of Weights & Biases to which the metrics go as well."""


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
    matrix: Literal["small", "full"] | None = None
    """Go through many layouts instead of one: every two settings together, on up to 8 ranks (small) or 16 (full)."""
    tensors: bool = False
    """Print every tensor that was compared, not only a line per kind."""


def _nearest_model(name: str) -> str:
    """What may have been meant by a model that there is not."""
    if Path(name).is_dir():
        return f"for the folder write hf:{name}"
    near = difflib.get_close_matches(name, MODELS, n=2)
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(MODELS)}, or hf:PATH"


def _named(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, LONG[dtype])
    return found


def names_a_file(schedule: str) -> bool:
    """Whether a file is meant and not an order: it has a dot or a slash in its name, or is there."""
    return schedule not in ORDERS and (bool({".", "/"} & {*schedule}) or Path(schedule).is_file())


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
