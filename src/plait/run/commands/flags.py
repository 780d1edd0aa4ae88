"""Parses a command line into a config: groups the flags, and gives hints for flags that are nearly right.

TrainConfig   ──►   a group for each section: model, data, optimizer, layout, machine, ...   ──►   TrainConfig
"""

from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from typing import Any, TypeVar

import tyro

from plait.messages.escape import one_line
from plait.messages.wording import did_you_mean

Config = TypeVar("Config")

_OTHERS = """
batch        batch-size global-batch-size train-batch-size
width        hidden hidden-size d-model n-embd dim
layers       num-layers n-layers n-layer depth
heads        num-heads n-heads n-head num-attention-heads
ffn          intermediate-size ffn-hidden-size mlp-width
vocab        vocabulary vocab-size
length       seq-len seq-length sequence-length context block-size max-length
lr           learning-rate
steps        max-steps iters train-iters num-steps
microbatches accumulation gradient-accumulation-steps micro-batches
mesh         gpus ranks nproc-per-node world-size
strategy     zero zero-stage stage sharding-strategy
dtype        precision mixed mixed-precision bf16 fp16
recompute    gradient-checkpointing activation-checkpointing checkpointing
clip         max-grad-norm grad-clip clip-grad gradient-clipping
out          output output-dir out-dir save-dir
data         dataset data-path train-data
"""
ELSEWHERE = {other: ours for ours, *others in map(str.split, _OTHERS.strip().splitlines()) for other in others}
"""Maps flags of other programs to the plait flag with the same meaning."""


def check_flags(command: str, kind: Any, words: Sequence[str]) -> None:
    """Raises ValueError, with the nearest names, for a flag that a command does not have.

    tyro checks the commands with subcommands (``schedule``, ``checkpoint``).
    """
    known = [f"--{one.name.replace('_', '-')}" for one in fields(kind)]
    known += [f"--no-{one.name.replace('_', '-')}" for one in fields(kind) if one.type in (bool, "bool")]
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and flag not in ("--", "--help", *known) and not flag.startswith("--tyro-"):
            hint = did_you_mean(ELSEWHERE.get(flag[2:].lower(), flag), known)
            help_text = f"plait {command} --help lists all flags"
            raise ValueError(f"plait {command} has no flag {one_line(flag, 60)}: {hint and f'{hint} '}{help_text}")


def parse_sections(default: Config, prog: str, words: Sequence[str]) -> Config:
    """Applies the words to a default config.

    The help text has a group for each section.  A section is a dataclass that the config inherits from and that itself
    inherits from none.
    """
    kind: Any = type(default)
    parts: list[Any] = [part for part in kind.__mro__ if _is_section(part)]
    groups: list[Any] = []
    for part in parts:
        given = part(**{one.name: getattr(default, one.name) for one in fields(part)})
        groups.append((part.__name__.removesuffix("Config").lower(), part, field(default=given)))
    grouped = make_dataclass(kind.__name__, groups, frozen=True)
    grouped.__doc__ = kind.__doc__
    found: Any = tyro.cli(grouped, prog=prog, args=words, config=(tyro.conf.OmitArgPrefixes,))
    values = {name: value for group, *_ in groups for name, value in vars(getattr(found, group)).items()}
    return replace(default, **values)  # type: ignore[type-var]


def _is_section(part: type) -> bool:
    return is_dataclass(part) and not any(map(is_dataclass, part.__mro__[1:]))
