"""Everything that decides a run, as texts that ranks can compare: a model's structure and code, an optimizer's groups.

    field                      text
    blocks.3                   gpt.Block
    blocks.3.act               torch.nn.functional.gelu
    code of gpt.Block          1f3a9c20                     a digest of the file that defines it
    optimizer group 0 lr       0.001

A text has only facts that are the same on all ranks of a right program: no addresses, no device indices, no file names.
Objects other than numbers, strings, functions, containers and configs are compared only by class.  Attributes whose
names say that they differ by rank (``of_the_model``) are left out.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.zero.elementwise import declared

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, slice, enum.Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
LEFT_OUT = {"training", "name_or_path"}
"""Attributes in which ranks may differ: the mode before the first step, the folder that a model was read from."""
DEEPEST = 6
"""The most levels of nested containers; deeper ones are compared by class."""


def model_fields(model: nn.Module) -> dict[str, str]:
    """Every module's class, plain attributes and code, under the names of the modules."""
    fields: dict[str, str] = {}
    known: dict[int, str] = {}
    for name, module in model.named_modules():
        kind = type(module)
        fields[name or "the model"] = _name_of(kind)
        for key, value in vars(module).items():
            if of_the_model(key) and key not in LEFT_OUT:
                if id(value) not in known:
                    known[id(value)] = text_of(value)
                fields[f"{name}.{key}" if name else key] = known[id(value)]
        for cls in kind.__mro__:
            if cls is not object and not cls.__module__.startswith("torch.") and id(cls) not in known:
                known[id(cls)] = fields[f"code of {_name_of(cls)}"] = code_of(cls)
    return fields


def optimizer_fields(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, str]:
    """The optimizers' classes, and each group's options and parameters."""
    fields = {}
    for number, optimizer in enumerate(optimizers):
        which = f"optimizer {number}" if len(optimizers) > 1 else "optimizer"
        fields[which] = _name_of(type(optimizer)) + (", declared element-wise" if declared(optimizer) else "")
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    pieces = all(hasattr(p, "piece") for p in value)  # these differ by rank
                    value = "pieces" if pieces else [names.get(id(p), "not the model's") for p in value]
                fields[f"{which} group {place} {key}"] = text_of(value)
    return fields


def text_of(value: Any, depth: int = 0) -> str:
    """Returns a value as a text that ranks compare."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        compared = not (value.requires_grad or isinstance(value, nn.Parameter))  # parameters are compared by name
        return f"{value.dtype} {tuple(value.shape)}{f' {fingerprint(value):016x}' if compared else ''}"
    if isinstance(value, functools.partial):
        return f"partial({text_of(value.func)}, {text_of([list(value.args), value.keywords], depth + 1)})"
    if isinstance(value, _FUNCTIONS):
        return f"{_name_of(value)} {code_of(value)}".rstrip()
    if depth < DEEPEST and isinstance(value, list | tuple):
        return f"[{', '.join(text_of(one, depth + 1) for one in value)}]"
    if depth < DEEPEST and isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(text_of(one, depth + 1) for one in value))}}}"
    if depth < DEEPEST and isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key}: {text_of(one, depth + 1)}' for key, one in value.items()))}}}"
    config = dataclasses.is_dataclass(value) or callable(getattr(value, "to_dict", None))
    if depth < DEEPEST and config and not isinstance(value, type) and hasattr(value, "__dict__"):
        public = {key: one for key, one in vars(value).items() if of_the_model(key)}
        return f"{_name_of(type(value))} {text_of(public, depth + 1)}"
    return _name_of(value if isinstance(value, type) else type(value))


def fingerprint(tensor: Tensor, *more: object) -> int:
    """Returns 63 bits from a tensor's shape, dtype and values (on meta: without values), and from the other objects."""
    digest = hashlib.blake2b(f"{more} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    if not tensor.is_meta:
        whole = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        whole = whole.resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(bytes(whole.view(-1).view(torch.uint8).numpy().data))
    return int.from_bytes(digest.digest(), "little") >> 1


def some_elements(tensor: Tensor) -> Tensor:
    """Returns about 1,024 elements of a tensor, spread over all of its dims: enough to recognise another batch, or
    other weights, without reading all; only these are copied."""
    apart = max(1, round((tensor.numel() / 1024) ** (1 / max(1, tensor.dim()))))
    return tensor.detach()[(slice(None, None, apart),) * tensor.dim()].reshape(-1)


def of_the_model(attribute: str) -> bool:
    """True if an attribute's name says that all ranks have the same value: no leading underscore, and no rank in it."""
    return not attribute.startswith("_") and "rank" not in attribute


def _name_of(named: Any) -> str:
    module = getattr(named, "__module__", None)
    name = getattr(named, "__qualname__", None) or getattr(named, "__name__", type(named).__qualname__)
    return f"{module}.{name}" if module and module != "__main__" else str(name)


def code_of(defined: Any) -> str:
    """A digest of the file that defines a function or class, with a function's line and the plain values of its
    defaults; "" if there is no file."""
    function = defined
    while isinstance(defined, functools.partial):
        defined = defined.func
    defined = inspect.unwrap(getattr(defined, "__func__", defined))
    if not isinstance(defined, type | types.FunctionType):
        defined = type(defined)
    try:
        digest = _digest_of(inspect.getfile(defined))
    except (TypeError, OSError):  # it is built in, or comes from exec
        return ""
    return digest if isinstance(defined, type) else f"{digest} line {defined.__code__.co_firstlineno}{_given(function)}"


def _given(function: Any) -> str:
    """The plain values of a function's parameters: its defaults, and those of a partial."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not a function, or one written in C
        return ""
    return "".join(
        f", {one.name}={one.default!r}"
        for one in parameters
        if isinstance(one.default, _PLAIN) and of_the_model(one.name)
    )


@functools.cache
def _digest_of(file: str) -> str:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=4).hexdigest()
