"""The words of a command line as a config: flags in groups, and hints for flags that are nearly right.

TrainConfig   ──►   a group for each section: model, data, optimizer, layout, machine, ...   ──►   TrainConfig
"""

from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from typing import Any, TypeVar

import tyro

from plait.core.escape import one_line
from plait.core.wording import did_you_mean

Config = TypeVar("Config")

ELSEWHERE = {
    **dict.fromkeys(("batch-size", "global-batch-size", "train-batch-size"), "batch"),
    **dict.fromkeys(("hidden", "hidden-size", "d-model", "n-embd", "dim"), "width"),
    **dict.fromkeys(("num-layers", "n-layers", "n-layer", "depth"), "layers"),
    **dict.fromkeys(("num-heads", "n-heads", "n-head", "num-attention-heads"), "heads"),
    **dict.fromkeys(("intermediate-size", "ffn-hidden-size", "mlp-width"), "ffn"),
    **dict.fromkeys(("vocabulary", "vocab-size"), "vocab"),
    **dict.fromkeys(("seq-len", "seq-length", "sequence-length", "context", "block-size", "max-length"), "length"),
    **dict.fromkeys(("learning-rate",), "lr"),
    **dict.fromkeys(("max-steps", "iters", "train-iters", "num-steps"), "steps"),
    **dict.fromkeys(("accumulation", "gradient-accumulation-steps", "micro-batches"), "microbatches"),
    **dict.fromkeys(("gpus", "ranks", "nproc-per-node", "world-size"), "mesh"),
    **dict.fromkeys(("zero", "zero-stage", "stage", "sharding-strategy"), "strategy"),
    **dict.fromkeys(("precision", "mixed", "mixed-precision", "bf16", "fp16"), "dtype"),
    **dict.fromkeys(("gradient-checkpointing", "activation-checkpointing", "checkpointing"), "recompute"),
    **dict.fromkeys(("max-grad-norm", "grad-clip", "clip-grad", "gradient-clipping"), "clip"),
    **dict.fromkeys(("output", "output-dir", "out-dir", "save-dir"), "out"),
    **dict.fromkeys(("dataset", "data-path", "train-data"), "data"),
}
"""Flags of other programs, and the flag of plait that means the same."""


def check_flags(command: str, kind: Any, words: Sequence[str]) -> None:
    """Refuses, by a ValueError with the nearest names, a flag that a command does not have.

    Commands that have commands of their own (``schedule``, ``checkpoint``) are left to tyro.
    """
    known = [one.name.replace("_", "-") for one in fields(kind)]
    known += [f"no-{one.name.replace('_', '-')}" for one in fields(kind) if one.type in (bool, "bool")]
    for word in words:
        flag = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if not word.startswith("--") or flag in ("", "help", *known) or flag.startswith("tyro-"):
            continue
        meant = ELSEWHERE.get(flag.lower(), flag)
        hint = did_you_mean(meant, known).replace(" or ", " or --").replace("mean ", "mean --")
        help_text = f"plait {command} --help lists all flags"
        raise ValueError(f"plait {command} has no flag --{one_line(flag, 60)}: {hint and f'{hint} '}{help_text}")


def parse_sections(default: Config, prog: str, words: Sequence[str]) -> Config:
    """The config that words make of a default.

    The help text has a group for each section: a dataclass from which the config inherits, and which inherits from
    none.
    """
    kind: Any = type(default)
    parts: dict[str, tuple[list[str], Any]] = {
        str(part.__name__).removesuffix("Config").lower(): ([one.name for one in fields(part)], part)
        for part in kind.__mro__
        if _is_section(part)
    }
    given = {word: part(**{name: getattr(default, name) for name in names}) for word, (names, part) in parts.items()}
    groups = [(word, part, field(default=given[word])) for word, (_, part) in parts.items()]
    grouped = make_dataclass(kind.__name__, groups, frozen=True)
    grouped.__doc__ = kind.__doc__
    found: Any = tyro.cli(grouped, prog=prog, args=words, config=(tyro.conf.OmitArgPrefixes,))
    values = {name: getattr(getattr(found, word), name) for word, (names, _) in parts.items() for name in names}
    return replace(default, **values)  # type: ignore[type-var]


def _is_section(part: type) -> bool:
    return is_dataclass(part) and not any(map(is_dataclass, part.__mro__[1:]))
