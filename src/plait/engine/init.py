"""Initial weights that no layout changes, on ranks that never hold the model.

``empty_parameters()`` builds a model whose parameters are on the meta device (shapes without memory) while
buffers are computed for real.  ``initial_values`` then walks the modules once: each draws its own parameters, on
their full shapes, by its own ``reset_parameters``, from a stream that depends on (seed, module name) alone.  The
caller keeps the pieces it owns and drops the rest before the next module comes: the most a rank ever holds beside
its pieces is one module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from plait.engine.rng import private_generator

_EMPTY: ContextVar[bool] = ContextVar("empty_parameters", default=False)
"""Whether modules built in this thread (or task) get parameters without memory."""


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    if not _EMPTY.get() or parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


# torch keeps these hooks in one dict for the process and iterates over it unlocked, so threads that build models at
# the same time must not add and remove theirs: one hook stays, and does nothing outside empty_parameters().
register_module_parameter_registration_hook(_to_meta)


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device; buffers are computed as usual.

    Only this thread's modules are affected.  A tied parameter stays one parameter.
    """
    token = _EMPTY.set(True)
    try:
        yield
    finally:
        _EMPTY.reset(token)


def check_buffers(model: nn.Module) -> None:
    """Raises ValueError where a buffer has no values."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ValueError(
            f"{len(empty)} buffers are on the meta device and have no values ({', '.join(empty[:3])}): build the model "
            f"inside plait.empty_parameters(), which computes buffers for real, instead of torch.device('meta')"
        )


def initial_values(model: nn.Module, seed: int, device: torch.device) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The initial value of every parameter that is still on meta, one module at a time.

    Yields the meta parameter and its value on the full shape; the value is valid until the next module comes.

    Raises:
        ValueError: a module with meta parameters that has no ``reset_parameters``.
    """
    done: set[int] = set()
    for name, module in model.named_modules():
        own = {k: p for k, p in module._parameters.items() if p is not None}
        new = {k: p for k, p in own.items() if p.is_meta and id(p) not in done}
        if not new:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"module {name or 'root'!r} ({type(module).__name__}) has parameters on meta ({', '.join(new)}) and no "
                f"reset_parameters() to give them values: add one, or build the model with values"
            )
        fresh = {k: torch.empty(p.shape, dtype=p.dtype, device=device) for k, p in own.items()}
        try:
            for k, p in own.items():
                module._parameters[k] = nn.Parameter(fresh[k], requires_grad=p.requires_grad)
            with torch.no_grad(), private_generator(device, "init", seed, name):
                reset()
        finally:
            module._parameters.update(own)
        for k, p in new.items():
            done.add(id(p))
            yield p, fresh[k]


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever the model refers to ``old`` (the one time that a parameter changes its identity)."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                setattr(module, name, new)


def materialise(model: nn.Module, seed: int, device: torch.device) -> None:
    """Give a whole model its initial values in this process: what a single process would train."""
    check_buffers(model)
    for old, value in list(initial_values(model, seed, device)):
        replace_parameter(model, old, nn.Parameter(value, requires_grad=old.requires_grad))
