"""Values as JSON, and back as what they were: to the bit, and to the type.

    number, string, True, None, list      themselves
    inf, nan                              {"float": "inf"}
    tuple, dict, Counter                  {"tuple": [...]}, {"dict": [[key, value], ...]}, {"counter": [[...], ...]}
    a tensor that is one real number      {"number": 3.0, "dtype": "float32"}
    any other tensor                      {"tensor": name}: it lies in a file under this name

Nothing else is taken: what is read can be nothing else.
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
    """Stands for a tensor that other ranks write too, under this name."""

    name: str


def encoded(value: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """A value as JSON; its tensors go into ``tensors``, under new names.

    Raises:
        ValueError: it is of another type, or nested too deeply.
    """
    if depth > DEEPEST:
        raise ValueError(f"a value is nested more than {DEEPEST} deep, or in itself, and cannot be saved")
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, InFile):
        return {"tensor": value.name}
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout is not torch.strided or value.is_meta:
            raise ValueError(f"a tensor of {value.dtype}, {value.layout} on {value.device} cannot be saved")
        if not value.dim() and not value.is_complex():
            return {"number": encoded(value.item(), tensors, depth + 1), "dtype": dtype}
        name = f"value/{len(tensors)}"
        tensors[name] = value.detach().resolve_conj().resolve_neg()
        return {"tensor": name}

    def inside(one: Any) -> Any:
        return encoded(one, tensors, depth + 1)

    if type(value) is list:
        return [inside(one) for one in value]
    if type(value) is tuple:
        return {"tuple": [inside(one) for one in value]}
    if type(value) in (dict, OrderedDict, Counter):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[inside(key), inside(one)] for key, one in value.items()]}
    raise ValueError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved: give numbers, strings, tensors, and "
        f"lists, tuples and dicts of them (an object's state_dict() is one)"
    )


def decoded(value: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """What was ``encoded``; ``tensor`` gives those that lie in files.

    Raises:
        ValueError: anything that ``encoded`` does not write.
    """
    if depth > DEEPEST + 1:
        raise ValueError("a value in it is nested too deeply")

    def inside(one: Any) -> Any:
        return decoded(one, tensor, depth + 1)

    match value:
        case {"float": "nan" | "inf" | "-inf" as number, **rest} if not rest:
            return float(number)
        case {"number": number, "dtype": str(dtype), **rest} if not rest and dtype in DTYPES:
            if isinstance(number := inside(number), bool | int | float):
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
                found = {inside(key): inside(one) for key, one in items}
                return Counter(found) if "counter" in value else found
        case list():
            return [inside(one) for one in value]
        case _ if type(value) in _PLAIN:
            return value
    raise ValueError("a value in it was not written by plait")
