"""Writes a config as a TOML file and reads it back: a key for each field, checked by the field's type.

TrainConfig(mesh="shard=2", layers=None)  ──► mesh = "shard=2"  ──► TrainConfig(mesh="shard=2", layers=None)
"""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tomli_w
import tyro

from plait.checkpoint.files.reading import read_text, shown
from plait.messages.wording import did_you_mean
from plait.run.job.sections import flag_hints, flags

Config = TypeVar("Config")

NONE = "None"
"""The word for a None that is not the default, as on the command line.  TOML has no word for None."""


@dataclass(frozen=True)
class FileConfig:
    """Files that a command reads and writes."""

    config: str | None = None
    """A TOML file whose keys are the names of the flags, with _ for -; flags on the command line win."""
    plugin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE.py")] = ()
    """Run this file first, on every rank: it adds strategies, orders, styles, models, optimizers. May be repeated."""
    json: str | None = None
    """Write the results here as JSON; "-" is the standard output."""


def to_toml(config: Any) -> str:
    """Writes a config as TOML from which ``from_toml`` reads an equal config.  Leaves out a None that is the field's
    default, the steps that follow from epochs, and the permission to overwrite, which counts only once."""
    values = {}
    given, unsaid = flags(config), flags(type(config)())
    left_out = ["config", "overwrite", "resume", "change"] + ["steps"] * (given.get("epochs") is not None)
    for name, value in given.items():
        if name not in left_out and (value is not None or unsaid[name] is not None):
            values[name] = NONE if value is None else value
    return tomli_w.dumps(values)


def from_toml(kind: type[Config], path: str, others: Collection[str] = ()) -> Config:
    """Reads the config in a TOML file.  Fields that it does not name keep their defaults; keys of ``others``, which
    other commands read, are ignored.  ValueError for no such file, no TOML, an unknown key (the nearest are named), a
    value of another type, or both steps and epochs."""
    text = read_text(path, "the config").removeprefix("\ufeff")  # some editors write it
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else "it is nested too deeply"
        raise ValueError(f"the config {shown(path)} is not TOML: {reason}") from error
    hints = flag_hints(kind)
    names = [name for name in hints if name != "config"]
    values = {name: value for name, value in values.items() if name in names or name not in others}
    for name, value in values.items():
        if name not in names:
            hint = did_you_mean(name, names, f"the keys are {', '.join(names)}", most=3)
            raise ValueError(f"unknown key {name!r} in the config {shown(path)}: {hint}")
        values[name] = _typed(value, hints[name], f"{name} in the config {shown(path)}")
    if "steps" in values and values.get("epochs") is not None:
        raise ValueError(
            f"the config {shown(path)} says steps = {values['steps']} and epochs = {values['epochs']}, which is a "
            f"number of steps too: leave one of them out"
        )
    return kind(**values)


def _typed(value: Any, hint: Any, what: str) -> Any:
    """Checks that ``value`` has the field's type.  Accepts a whole number for a float, and "None" for None."""
    kinds = get_args(hint) if get_origin(hint) not in (Literal, tuple, None) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is tuple and isinstance(value, list):
            return tuple(_typed(item, get_args(kind)[0], what) for item in value)
        if kind is float and type(value) in (int, float):
            return float(value)
        if kind is type(None) and value == NONE:
            return None
        if kind is type(value):
            return value
    if get_origin(hint) is Literal:
        raise ValueError(f"{what} is {value!r}: choose one of {', '.join(map(str, get_args(hint)))}")
    names = " or ".join(k.__name__ for k in kinds if isinstance(k, type) and k is not type(None))
    raise ValueError(f"{what} is {value!r}, a {type(value).__name__}: give {names or hint}")
