"""Random operators: which ones draw, and a private generator for all of them.

A stream is named by what it depends on (``stream_key``), never by how much was drawn before.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from plait.forward.masks import stream_key
from plait.torch_private import TorchDispatchMode

_QUIET = {
    *("linear", "sparse", "conv", "normalization", "batchnorm", "instancenorm", "activation", "pooling", "padding"),
    *("flatten", "pixelshuffle", "upsampling"),
}
"""Files of torch's layers that draw nothing, except for these layers:"""
_DRAWING = {"MultiheadAttention", "RReLU", "FractionalMaxPool2d", "FractionalMaxPool3d"}
_OTHERS = {
    *(F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax),
    *(F.rrelu, F.fractional_max_pool2d, F.fractional_max_pool3d),
    *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices, nn.init.kaiming_uniform_),
}
"""Functions that draw, but whose name is not that of the operator that draws; calls inside them are not seen."""


def seeded(op: Any) -> bool:
    """True if an operator's tag says that it draws from a generator."""
    return torch.Tag.nondeterministic_seeded in op.tags


def draws_nothing(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for attention kernels without dropout, which carry the random tag but draw nothing."""
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


def quiet(module: nn.Module) -> bool:
    """True if the module's forward is one of torch's that draw nothing, and its call runs no user code."""
    forward = type(module).forward
    drawing = forward.__qualname__.split(".")[0] in _DRAWING
    return _file_of(forward) in _QUIET and not drawing and not _changed(module)


class OwnLayer(nn.Module):
    """A module that the engine has put into the model: its call runs no user code and draws nothing."""


def dropout_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Torch's own dropout layers, by name."""
    return {name: module for name, module in model.named_modules() if _file_of(type(module)) == "dropout"}


def silent(module: nn.Module) -> bool:
    """True if a module certainly draws nothing: one of torch's own quiet layers, or a plain ``Sequential``."""
    if type(module) is nn.Sequential:
        return not _changed(module)
    if isinstance(module, OwnLayer):
        return True
    return quiet(module) and _file_of(type(module)) in _QUIET


def all_silent(model: nn.Module) -> bool:
    """True if no module of the model runs user code, or may draw."""
    return all(map(silent, model.modules()))


def _changed(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _file_of(defined: Any) -> str:
    """The name of the file in ``torch.nn.modules`` that defines a class or function."""
    name: str | None = defined.__module__  # None for code from exec()
    return (name or "").removeprefix("torch.nn.modules.")


@cache
def is_random(func: Callable[..., Any]) -> bool:
    """True if a torch function draws from a generator, according to the tags of the operator with its name."""
    if func in _OTHERS:
        return True
    name = getattr(func, "__name__", "")
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    if packet is None or name == "scaled_dot_product_attention":
        return False
    return any(seeded(getattr(packet, overload)) for overload in packet.overloads())


def no_stream(operator: str, module: str) -> ValueError:
    """Returns the error for a random operator that no stream serves, in a module ("" is the model)."""
    where = f"module {module!r}" if module else "the model"
    return ValueError(
        f"{where} calls the random operator {operator!r}, which no stream serves: its values would depend on how the "
        f"batch is cut. Use nn.Dropout, F.dropout or F.scaled_dot_product_attention, pass generator=..., or draw the "
        f"values in the data pipeline"
    )


class PrivateGenerator(TorchDispatchMode):
    """Makes all random operators inside draw from a stream that depends on ``key`` alone, even if given a generator."""

    def __init__(self, device: torch.device, *key: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator(device=device).manual_seed(stream_key(*key) & (2**63 - 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if seeded(func):
            if all(a.name != "generator" for a in func._schema.arguments):
                overload = getattr(func.overloadpacket, "generator", None)
                if overload is None:
                    raise no_stream(str(func), "")
                func = overload
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)
