"""Converts values to JSON and back, with every bit and every type.

    number, string, True, None, list      themselves
    inf, nan                              {"float": "inf"}
    tuple, dict, Counter                  {"tuple": [...]}, {"dict": [[key, value], ...]}, {"counter": [[...], ...]}
    a real tensor without dims            {"number": 3.0, "dtype": "float32"}
    any other tensor                      {"tensor": name}: a file has the tensor under this name

Other values are refused, so a file cannot contain any.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.manifest import DTYPES

DEEPEST = 64
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class InFile:
    """A placeholder for a tensor that several ranks write under this name."""

    name: str


def encoded(value: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Converts a value to JSON; adds its tensors to ``tensors`` under new names.  Raises ValueError for another type,
    or deep nesting."""
    if depth > DEEPEST:
        raise ValueError(f"a value is nested more than {DEEPEST} deep, or in itself, and cannot be saved")
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, InFile):
        return {"tensor": value.name}

    def inside(one: Any) -> Any:
        return encoded(one, tensors, depth + 1)

    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout is not torch.strided or value.is_meta:
            raise ValueError(f"a tensor of {value.dtype}, {value.layout} on {value.device} cannot be saved")
        if not value.dim() and not value.is_complex():
            return {"number": inside(value.item()), "dtype": dtype}
        name = f"value/{len(tensors)}"
        tensors[name] = value.detach().resolve_conj().resolve_neg()
        return {"tensor": name}
    if type(value) is list:
        return [inside(one) for one in value]
    if type(value) is tuple:
        return {"tuple": [inside(one) for one in value]}
    if type(value) in (dict, OrderedDict, Counter):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[inside(_key(key)), inside(one)] for key, one in value.items()]}
    raise ValueError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved: give numbers, strings, tensors, and "
        f"lists, tuples and dicts of them (an object's state_dict() is one)"
    )


def _key(key: Any) -> Any:
    """Returns a dict's key; raises ValueError for an object."""
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    if not isinstance(key, _PLAIN):
        raise ValueError(f"a dict has a {type(key).__name__} as a key: give numbers, strings, and tuples of them")
    return key


def decoded(value: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """Reverses ``encoded``; ``tensor`` returns the tensor with a name.  ValueError for anything else."""
    if depth > DEEPEST + 1:
        raise ValueError("a value in it is nested too deeply")

    def inside(one: Any) -> Any:
        return decoded(one, tensor, depth + 1)

    match value:
        case {"float": "nan" | "inf" | "-inf" as number, **rest} if not rest:
            return float(number)
        case {"number": number, "dtype": str(dtype), **rest} if not rest and dtype in DTYPES:
            if isinstance(number := inside(number), bool | int | float) and not DTYPES[dtype].is_complex:
                try:
                    return torch.tensor(number, dtype=DTYPES[dtype])
                except (RuntimeError, OverflowError) as error:
                    raise ValueError(f"a number in it is no {dtype}: {error}") from error
        case {"tensor": str(name), **rest} if not rest:
            return tensor(name)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(map(inside, items))
        case {"dict": list(items), **rest} | {"counter": list(items), **rest} if not rest:
            if all(isinstance(item, list) and len(item) == 2 for item in items):
                found = {_key(inside(key)): inside(one) for key, one in items}
                return Counter(found) if "counter" in value else found
        case list():
            return [inside(one) for one in value]
        case _ if type(value) in _PLAIN:
            return value
    raise ValueError("a value in it was not written by plait")


def check_run(state: Any, step: int) -> None:
    """Raises ValueError if the decoded values of a manifest are not those of a run after ``step`` steps."""
    match state:
        case {"optimizer": optimizer, "run": {"step": int(made), "seed": int(), "loss_scale": dict() | None},
              "ema": float() | int() | None, "extra": _,
              "optimizer_classes": list() | None as classes, **rest} if made == step and not rest:  # fmt: skip
            pass
        case _:
            raise ValueError("its values are not those of a run")
    if optimizer is None:
        return
    groups = len(optimizer["param_groups"]) if _is_optimizer_state(optimizer) else -1
    if groups < 0 or (classes is not None and (len(classes) != groups or not all(type(c) is str for c in classes))):
        raise ValueError("its optimizer state has not the form of one")


def _is_optimizer_state(optimizer: Any) -> bool:
    """True for a flat dict for each parameter, by name, with a number as ``step``, and groups of parameters' names."""
    match optimizer:
        case {"state": dict(values), "param_groups": list(groups)}:
            flat = all(
                _is_named(own)
                and not any(isinstance(one, dict | list | tuple) for one in own.values())
                and not isinstance(own.get("step", 0), str | None)
                for own in values.values()
            )
            return flat and _is_named(values) and all(map(_names_parameters, groups))
    return False


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _names_parameters(group: Any) -> bool:
    return _is_named(group) and isinstance(own := group.get("params"), list) and all(type(n) is str for n in own)
