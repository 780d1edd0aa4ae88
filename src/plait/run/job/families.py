"""The families of models that ``--model`` chooses from, a row each, and the flags that set their sizes.

    ModelConfig ── find_family(model) ──► Family ── sizes(config) ──► GPTConfig ── build ──► the model, on meta

No other module knows the families by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from plait.messages.wording import did_you_mean
from plait.run.data.batches import Batches
from plait.run.data.regression import SyntheticRegression
from plait.run.data.windows import as_tokens
from plait.run.formats.huggingface import open_folder
from plait.run.job.optimizer import OptimizerRow
from plait.run.job.own import PLACE, GivenBatches, UserJob
from plait.run.models import gpt, hf, mlp, moe
from plait.run.models.pretrained import Pretrained
from plait.step.step import num_samples
from plait.torch_private import tree_leaves
from plait.zero.state.weights import Weights

FOLDER = "hf:"
"""Prefix for the name of a Hugging Face folder.  No other family has a colon in its name."""

OF_MIXTURES = ("experts", "chosen", "capacity")
"""Settings that models without experts do not have."""

OF_THE_FOLDER = ("layers", "width", "ffn", "heads", "kv_heads", "vocab", "rope_base", "dropout", *OF_MIXTURES)
"""Settings that such a folder decides itself."""


def describe_families() -> str:
    """Lists the families, each with its summary, for help texts, as do the next three functions."""
    return " ".join(f"{row.heading or name}: {row.summary}." for name, row in FAMILIES.items())


def describe_layers() -> str:
    defaults = (f"{row.layers} ({name})" for name, row in FAMILIES.items() if row.layers is not None)
    return f"Layers; unless given {', '.join(defaults)}."


def stock_families() -> str:
    return ", ".join(row.heading or name for name, row in FAMILIES.items() if row.transformers)


def for_text(what: str) -> Any:
    others = ", ".join(name for name, row in FAMILIES.items() if not row.reads_text)
    return tyro.conf.arg(help=f"{what} (all but {others}).")


@dataclass(frozen=True)
class ModelConfig:
    """The model to train, and its sizes and dtypes."""

    model: Annotated[str, tyro.conf.arg(help=describe_families())] = "gpt"
    job: Annotated[str | UserJob | None, PLACE] = None
    """Your own job instead: a plait.UserJob in a file, with its model, loss, batches and optimizer."""
    layers: Annotated[int | None, tyro.conf.arg(help=describe_layers())] = None
    width: int = 128
    """Elements of a hidden vector."""
    ffn: Annotated[
        int | None, for_text("The width inside the MLP; unless given 8/3 of the width, up to a multiple of 32")
    ] = None
    heads: Annotated[int, for_text("Attention heads")] = 4
    kv_heads: Annotated[int, for_text("Key/value heads, shared by groups of heads")] = 2
    vocab: Annotated[int, for_text("Tokens of the vocabulary; 256 are the bytes of a text")] = 256
    experts: int = 8
    """Experts of a layer (moe)."""
    chosen: int = 2
    """Experts of a token (moe)."""
    capacity: float | None = None
    """Tokens of a sample that an expert takes, as a multiple of an even share; it drops later ones (moe). None: all."""
    rope_base: Annotated[float, for_text("The base of the rotary angles")] = 10000.0
    length: Annotated[int, for_text("Tokens of one sample")] = 128
    dropout: float = 0.1
    """The dropout probability (llama, qwen2: attention weights only)."""
    dtype: Literal["fp32", "fp64", "bf16", "bf16-mixed", "fp16-mixed"] = "fp32"
    """Type of the parameters and the computation; mixed: sums of gradients, and the copy of the parameters that the
    optimizer updates, are in fp32. A row written by hand may set its own dtypes, as in "full bf16 | ..."."""
    compile: bool = False
    """Compile the model's blocks by torch.compile, also in the process that it is compared with; needs g++."""


@dataclass(frozen=True)
class Family:
    """A kind of model, with everything that differs between kinds."""

    summary: str
    """Text for the help."""
    sizes: Callable[[Any], Any]
    """Makes the argument of ``build``, with a ``width``, from the flags.  Refuses flags that do not fit together."""
    build: Callable[[Any], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    """The sum of the losses of a batch."""
    layers: int | None = 4
    """The number of layers unless the flag sets it; None: the flag is not read."""
    count_fn: Callable[[Any], int] = gpt.token_count
    """Number of terms in that sum."""
    leading: Callable[[Any], tuple[int, ...]] = lambda batch: tuple(batch["tokens"].shape)
    """The shape of a batch's activations without their last dim."""
    batches: Callable[[Any, int, bool, torch.dtype], Batches] | None = None
    """Makes the training data from (sizes, seed, ragged, dtype): endless, without documents or attention over time.
    None: the data are tokens of the text."""
    encoder: Callable[[Any], Callable[[bytes], Tensor]] = lambda sizes: as_tokens
    """Turns UTF-8 text into tokens."""
    weights: Callable[[Any, nn.Module], Weights | None] | None = None
    """Source of the initial values; None: they are drawn."""
    transformers: bool = False
    """True for a transformers model, which can be exported as one."""
    predicted: bool = False
    """True if ``predict.activations`` predicts the activations that its blocks keep."""
    heading: str | None = None
    """Name in help texts; None: the key of its row."""
    valued: bool = False
    """True if ``build`` sets the parameters' values.  Otherwise they are drawn when the model is on its ranks."""
    one_stream: bool = True
    """True if all modules of a tensor plan read activations of the shape ``leading``, so that their messages can be
    predicted."""
    one_tensor: bool = True
    """True if a stage sends only activations of the sizes' ``width`` to the next."""
    samples: int | None = None
    """The samples of one step, if the data decides them instead of a flag."""
    optimizer: OptimizerRow | None = None
    """The job's own optimizer, if it has one, made from the parameters alone."""
    rate: float | None = None
    """The learning rate of that optimizer."""

    @property
    def reads_text(self) -> bool:
        return self.batches is None

    @property
    def unit(self) -> str:
        """The unit in which a run's speed is counted.  For a user's job, the terms of its loss."""
        return "terms" if self.samples else "tokens" if self.reads_text else "samples"


def find_family(model: str) -> Family:
    """Finds the row of a model.  Raises ValueError, with the nearest names, if there is none."""
    name = FOLDER if model.startswith(FOLDER) else model
    if name in FAMILIES:
        return FAMILIES[name]
    if os.path.isdir(model):
        raise ValueError(f"unknown model {model!r}: for the folder write {FOLDER}{model}")
    names = [name for name in FAMILIES if name != FOLDER]
    hint = did_you_mean(model, names, f"choose one of {', '.join(names)}, or {FOLDER}PATH")
    raise ValueError(f"unknown model {model!r}: {hint}")


def own_family(job: UserJob, seed: int) -> Family:
    """Makes a row from a user's job.  ValueError for a model or an optimizer of the wrong type, or a value that differs
    from call to call."""
    job.check()
    model, row, rate = job.model(0), None, None
    if job.optimizer is not None:
        made = job.optimizer(model.parameters())
        if not isinstance(made, Optimizer):
            raise ValueError(f"the job's optimizer is {type(made).__name__}: return one of torch.optim's kind")
        row = OptimizerRow(job.optimizer, states=_states_of(made), amplifies=not isinstance(made, SGD))
        rate = max(float(group["lr"]) for group in made.param_groups)
    return Family(
        "a user's job",
        lambda config: job,
        lambda job: job.model(seed),
        job.loss_fn,
        layers=None,
        count_fn=job.count_fn,
        leading=leading_dims,
        batches=lambda job, seed, ragged, dtype: GivenBatches(job, dtype),
        valued=True,
        one_stream=False,
        one_tensor=False,
        samples=num_samples(job.batch(0)),
        optimizer=row,
        rate=rate,
    )


def _states_of(optimizer: Optimizer) -> int:
    """Counts the tensors of a parameter's size that an optimizer keeps, by a step on its smallest matrix.  Returns 2
    if it cannot step without more arguments (a closure)."""
    every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    try:
        one = min([p for p in every if p.dim() > 1] or every, key=Tensor.numel)
        one.grad = torch.zeros_like(one)
        optimizer.step()
    except Exception:  # a foreign class may raise anything if other parameters have no gradient
        return 2
    return sum(isinstance(value, Tensor) and value.shape == one.shape for value in optimizer.state[one].values())


def leading_dims(batch: Any) -> tuple[int, ...]:
    """The leading dims of a batch: all dims of token numbers, only the samples of anything else."""
    first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return (len(first),) if first.is_floating_point() else tuple(first.shape)


# ---- the rows -----------------------------------------------------------------------------------------------


def _layers(config: ModelConfig) -> int:
    layers = find_family(config.model).layers if config.layers is None else config.layers
    assert layers is not None
    return layers


def _decoder(config: ModelConfig) -> gpt.GPTConfig:
    return gpt.GPTConfig(
        vocabulary=config.vocab,
        num_layers=_layers(config),
        width=config.width,
        hidden=config.ffn,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        max_length=config.length,
        dropout=config.dropout,
        rope_base=config.rope_base,
    )


def _stock(kind: Literal["llama", "qwen2"]) -> Family:
    def sizes(config: ModelConfig) -> hf.HFConfig:
        plain = _decoder(config)
        hf.check_installed()
        return hf.HFConfig(**vars(plain), kind=kind)

    return Family(f"Hugging Face's {kind} with random weights", sizes, hf.build, hf.loss_sum, transformers=True)


def _mixture(config: ModelConfig) -> moe.MoEConfig:
    mixture: dict[str, Any] = {"num_experts": config.experts, "num_chosen": config.chosen, "capacity": config.capacity}
    return moe.MoEConfig(**vars(_decoder(config)), **mixture)


def _folder(config: ModelConfig) -> Pretrained:
    hf.check_installed()
    folder = Pretrained(config.model.removeprefix(FOLDER))
    if config.length > (longest := folder.max_length or config.length):
        raise ValueError(f"length is {config.length}, but the model in {folder.path!r} has {longest} positions")
    return folder


def _load(folder: Pretrained) -> nn.Module:
    if folder.from_scratch:
        return folder.build()
    open_folder(folder.path, folder.outline())  # refuses sizes that the files do not have before they take memory
    model = folder.build()
    open_folder(folder.path, model).fill_buffers(model)
    return model


FAMILIES: dict[str, Family] = {
    "gpt": Family("a small decoder on text", _decoder, gpt.GPT, gpt.loss_sum, predicted=True),
    "moe": Family("the same with mixtures of experts", _mixture, moe.MoE, moe.loss_sum, one_tensor=False),
    "llama": _stock("llama"),
    "qwen2": _stock("qwen2"),
    FOLDER: Family(
        "a Hugging Face folder, whose sizes and dropout hold; weights that it lacks are drawn, and where it lacks a "
        "tokenizer too each byte is a token",
        _folder,
        _load,
        hf.loss_sum,
        layers=None,
        encoder=lambda folder: as_tokens if folder.reads_bytes else folder.encoder(),
        weights=lambda folder, model: None if folder.from_scratch else open_folder(folder.path, model),
        transformers=True,
        one_stream=False,
        heading=f"{FOLDER}PATH",
    ),
    "mlp": Family(
        "linear layers on regression data",
        lambda config: mlp.MLPConfig(_layers(config), config.width, dropout=config.dropout),
        mlp.MLP,
        mlp.loss_sum,
        layers=16,
        count_fn=mlp.sample_count,
        leading=lambda batch: (len(batch["x"]),),
        batches=lambda sizes, seed, ragged, dtype: SyntheticRegression(sizes.width, seed, ragged=ragged, dtype=dtype),
    ),
}
"""Every family of models.  A new one is a row: ``FAMILIES["mine"] = Family(...)``."""
