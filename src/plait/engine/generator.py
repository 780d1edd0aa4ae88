"""Which operators are random, and a generator of one's own for all of them.

A stream is named by what it depends on (``stream_key``), never by how often anybody drew before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_QUIET = {"linear", "sparse", "conv", "normalization", "batchnorm"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_OTHERS = {
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.gumbel_softmax,
    F.rrelu,
    F.fractional_max_pool2d,
    F.fractional_max_pool3d,
}


def stream_key(*parts: object) -> int:
    """64 bits from anything printable; equal parts give equal keys on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def seeded(op: Any) -> bool:
    """Whether an operator draws from a generator, by its tag."""
    return torch.Tag.nondeterministic_seeded in op.tags


def draws_nothing(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention kernels carry the random tag but draw nothing without dropout."""
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


def quiet(module: nn.Module) -> bool:
    """Whether it is one of torch's layers that draw nothing, and no code of the user's runs in its call."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return type(module).forward.__module__.removeprefix("torch.nn.modules.") in _QUIET


def without_dropout(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Recurrent kernels carry the random tag, but draw nothing without dropout between their layers.

    Their arguments go: ..., list of weights, has biases, number of layers, dropout, train, ...
    """
    if getattr(func, "__name__", "") not in _RECURRENT:
        return False
    weights = next(i for i, value in enumerate(args) if isinstance(value, list))
    return not args[weights + 3] or not args[weights + 4]


@cache
def is_random(func: Callable[..., Any]) -> bool:
    """Whether a torch function draws from a generator, read off the tags of the operator of its name."""
    if func in _OTHERS:
        return True
    name = getattr(func, "__name__", "")
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    if packet is None or name == "scaled_dot_product_attention":
        return False
    return any(seeded(getattr(packet, overload)) for overload in packet.overloads())


def no_stream(operator: str, modules: Sequence[str]) -> ValueError:
    """What to raise where a random operator runs that nobody serves; ``modules`` run, innermost last."""
    where = f"module {modules[-1]!r}" if modules and modules[-1] else "the model"
    return ValueError(
        f"{where} calls the random operator {operator!r}, which no stream serves: its values would depend on how the "
        f"batch is cut. Use nn.Dropout, F.dropout or F.scaled_dot_product_attention, pass generator=..., or draw the "
        f"values in the data pipeline"
    )


class PrivateGenerator(TorchDispatchMode):
    """Everything random inside draws from one generator of its own, whatever the code passes."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if seeded(func):
            if all(a.name != "generator" for a in func._schema.arguments):
                overload = getattr(func.overloadpacket, "generator", None)
                if overload is None:
                    raise no_stream(str(func), ())
                func = overload
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


@contextmanager
def private_generator(device: torch.device, *key: object) -> Iterator[None]:
    """Random operators inside draw from a stream that depends on ``key`` alone."""
    generator = torch.Generator(device=device).manual_seed(stream_key(*key) & (2**63 - 1))
    with PrivateGenerator(generator):
        yield
