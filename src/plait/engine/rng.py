"""Random streams that belong to the model, not to the process.

Dropout is a pure function of (seed, step, *global sample index*, site, element index), where the site is the
name of the module and the number of its call.  Whoever computes a sample, in whatever microbatch, on whatever
rank, draws the same mask: no cut of the batch changes it, and nothing draws from a global generator.

    key (64 bits)   <- blake2b(seed, step, sample, site)                    one per sample
    bits (32 bits)  <- mix(mix(element index xor key_low) + key_high)       one per element
    keep            <- bits >= p * 2**32

The mixing is the two-round multiply-and-shift hash of the "hash prospector" family, in int64 so that no product
overflows; it needs no generator object, runs on every device, and gives any slice of a mask by itself.

A ``TorchFunctionMode`` serves ``F.dropout`` and the attention kernel; composite functions (multi-head attention)
run under a dispatch mode that serves their Bernoulli draws; every other random operator raises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.engine.generator import draws_nothing, is_random, no_stream, quiet, seeded, stream_key, without_dropout

_LOW32 = 0xFFFFFFFF
_CHUNK = 1 << 15
"""Elements hashed at a time: eight bytes each, they stay in the second-level cache."""


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread: a forward now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def checkpoint_around() -> object:
    """What tells one ``torch.utils.checkpoint`` from another, of the innermost that is around this line; or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook") else None


def _mix(x: Tensor) -> Tensor:
    """One round on int64 values below 2**32, in place: both multipliers are below 2**31."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x6C078965)):
        x ^= x >> shift
        x *= factor
        x &= _LOW32
    x ^= x >> 16
    return x


@dataclass(frozen=True)
class Slice:
    """The part of an activation that a rank holds: ``start`` and on of ``whole`` elements along ``dim``."""

    dim: int
    start: int
    whole: int

    def indices(self, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """From flat indices within a local tensor of ``shape`` to flat indices within the whole one."""
        inner = math.prod(shape[self.dim + 1 :])
        here, there = shape[self.dim] * inner, self.whole * inner

        def whole_index(index: Tensor) -> Tensor:
            return index + index.div(max(here, 1), rounding_mode="floor") * (there - here) + self.start * inner

        return whole_index


def keep_mask(
    keys: Sequence[int],
    numel: int,
    p: float,
    device: torch.device,
    place: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Which elements survive dropout with probability ``p``: bool [len(keys), numel], one key a row.

    ``numel`` may be at most 2**32.  ``place`` maps the indices of these elements to those of the whole activation,
    where this is a slice of it.
    """
    threshold = math.floor(p * 2**32)
    low = torch.tensor([k & _LOW32 for k in keys], dtype=torch.int64, device=device)[:, None]
    high = torch.tensor([k >> 32 for k in keys], dtype=torch.int64, device=device)[:, None]
    keep = torch.empty(len(keys), numel, dtype=torch.bool, device=device)
    width = _CHUNK if device.type == "cpu" else numel
    for start in range(0, numel, max(width, 1)):
        index = torch.arange(start, min(start + width, numel), dtype=torch.int64, device=device)
        index = index if place is None else place(index)
        rows = max(1, _CHUNK // len(index)) if device.type == "cpu" else len(keys)
        for first in range(0, len(keys), rows):
            some = slice(first, first + rows)
            bits = _mix(index ^ low[some])
            bits += high[some]
            bits &= _LOW32
            torch.ge(_mix(bits), threshold, out=keep[some, start : start + len(index)])
    return keep


@dataclass(frozen=True)
class Draw:
    """Where in the run a forward pass stands: what its dropout masks depend on, beside the seed.

    ``first_sample`` is the global index of the microbatch's first sample within the step.
    """

    step: int
    microbatch: int
    first_sample: int
    num_samples: int


@dataclass(frozen=True)
class Mark:
    """A place in a forward, to which a recomputation comes back.

    ``modules`` run there, innermost last; the innermost has drawn ``calls`` masks so far.
    """

    draw: Draw | None
    modules: tuple[str, ...]
    calls: int
    drawing: bool


class Streams(TorchFunctionMode):
    """The dropout of one stage; on inside the model's forward, where it sees every torch function.

    ``enter_module`` and ``leave_module`` are called by hooks and keep track of whose call it is.  A forward that
    runs inside a backward is a recomputation: its modules count their calls anew, so they draw the masks again
    that they drew the first time.

    Args:
        beside: other function modes that are on exactly as long.
    """

    def __init__(self, seed: int, beside: Sequence[TorchFunctionMode] = ()) -> None:
        super().__init__()
        self.seed = seed
        self.before: Counter[str] = Counter()
        self.beside = tuple(beside)
        self.drawing = False
        self.draw: Draw | None = None
        self.slice_of: Callable[[str, Sequence[int]], Slice | None] | None = None
        """Tells which slice of its whole activation a module draws for, where activations are cut."""
        self.modules: list[str] = []
        self.checkpoints: list[object] = []
        """What was around each of them when it was entered (see ``checkpoint_around``)."""
        self.calls: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self.recomputing = False
        self.twice = False
        """What runs now will run again in the backward, or does so for the second time."""
        self.active = False
        self._by_module = False

    def begin(self, draw: Draw) -> None:
        """Start the forward pass of a microbatch."""
        self.draw = draw
        self.calls = self.before.copy()
        self.entered.clear()

    def resume(self, draw: Draw) -> None:
        """The backward of an earlier forward begins: what is recomputed draws its masks again."""
        self.draw = draw

    def mark(self) -> Mark:
        """Where the forward stands."""
        modules = tuple(self.modules)
        return Mark(self.draw, modules, self.calls[modules[-1] if modules else ""], self.drawing)

    @contextmanager
    def again(self, mark: Mark, *, whole: bool) -> Iterator[None]:
        """In a backward: what runs inside draws what it drew behind the mark.

        Args:
            whole: modules are called inside, and count their draws anew.
        """
        before = self.draw, self.modules, self.calls, self.recomputing
        self.draw, self.modules, self.calls = mark.draw, [*mark.modules], self.calls.copy()
        self.calls[mark.modules[-1] if mark.modules else ""] = mark.calls
        self.recomputing = whole
        began = self.switch_on(mark.drawing)
        try:
            yield
        finally:
            if began:
                self.switch_off()
            self.draw, self.modules, self.calls, self.recomputing = before

    @property
    def comes_back(self) -> bool:
        """Whether the streams will be on if what runs now is recomputed.

        A module's call switches them on. A checkpoint around a function that is no module's call runs without them.
        """
        return checkpoint_around() is (self.checkpoints[-1] if self.checkpoints else None)

    @contextmanager
    def runs_twice(self) -> Iterator[None]:
        """What runs inside is recomputed: a generator of its own would have gone on meanwhile, so it is refused."""
        before = self.twice, self.checkpoints
        self.twice, self.checkpoints = True, [*self.checkpoints, checkpoint_around()]
        try:
            yield
        finally:
            self.twice, self.checkpoints = before

    def switch_on(self, drawing: bool) -> bool:
        """See every torch function from here on, serving randomness if ``drawing``; False if it was on already."""
        self.drawing = drawing
        if self.active:
            return False
        self.active = True
        for mode in (self, *self.beside):
            mode.__enter__()
        return True

    def switch_off(self) -> None:
        """The end of what ``switch_on`` began."""
        self.active = False
        for mode in (*reversed(self.beside), self):
            mode.__exit__(None, None, None)

    def enter_module(self, name: str, training: bool, recomputing: bool) -> None:
        """A module's forward begins; the outermost one switches the streams on, unless they are."""
        if not self.modules:
            self.recomputing = recomputing
            self._by_module = self.switch_on(training)
        self.modules.append(name)
        self.checkpoints.append(checkpoint_around())
        if recomputing:
            self.calls[name] = self.before[name]
        else:
            self.entered[name] += 1

    def leave_module(self) -> None:
        """The innermost module's forward has ended, or raised; nothing to leave if it raised before it began."""
        if not self.modules:
            return
        self.modules.pop()
        self.checkpoints.pop()
        if not self.modules and self._by_module:
            self.switch_off()

    def attach(
        self, model: nn.Module, sites: Mapping[str, tuple[str, int]] | None = None, *, every: bool = False
    ) -> None:
        """Follow the modules of a model, so that draws know their site.

        Args:
            sites: modules that another part of the model calls first: under which name, and how often.
            every: also those that draw nothing.
        """
        known = sites or {}
        self.before = Counter(dict(known.values()))

        def entering(name: str) -> Callable[..., None]:
            return lambda module, args: self.enter_module(name, model.training, in_backward())

        for name, module in model.named_modules():
            if not every and module is not model and quiet(module):
                continue
            module.register_forward_pre_hook(entering(known.get(name, (name, 0))[0]), prepend=True)
            module.register_forward_hook(lambda *_: self.leave_module(), always_call=True)

    def mask(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """The next mask of the running module: bool, ``shape``, True where an element survives.

        The first dim is taken as samples when its size is the microbatch's number of samples; otherwise the module
        has lost the sample dim and the mask belongs to the global microbatch.
        """
        assert self.draw is not None
        module = self.modules[-1] if self.modules else ""
        if self.modules and not self.comes_back:
            raise ValueError(
                f"module {module!r} draws dropout in a checkpoint around a function that is no module's call: in the "
                f"backward nobody would know which mask to draw again; checkpoint a module's call, as in "
                f"checkpoint(self.block, x, use_reentrant=False), or let the engine recompute"
            )
        if self.recomputing and self.entered[module] > 1:
            raise ValueError(
                f"module {module!r} ran {self.entered[module]} times in this forward and draws dropout while it is "
                f"recomputed: which call's mask to draw again is not known; recompute around it, or give each call its "
                f"own module"
            )
        site = f"{module}#{self.calls[module]}"
        self.calls[module] += 1
        draw, shape = self.draw, tuple(shape)
        if shape and shape[0] == draw.num_samples:
            samples = range(draw.first_sample, draw.first_sample + draw.num_samples)
            keys = [stream_key("dropout", self.seed, draw.step, i, site) for i in samples]
        else:
            keys = [stream_key("microbatch dropout", self.seed, draw.step, draw.microbatch, site)]
        held = self.slice_of(module, shape) if self.slice_of else None
        place = held.indices(shape) if held else None
        return keep_mask(keys, math.prod(shape) // len(keys) if keys else 0, p, device, place).view(shape)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``F.dropout`` from this stream."""
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability {p}: it must be from 0 to 1")
        if not training or p == 0:
            return x
        scale = 1 / (1 - p) if p < 1 else 0.0
        factor = self.mask(x.shape, p, x.device).to(x.dtype).mul_(scale)
        return x.mul_(factor) if inplace else x * factor

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``F.scaled_dot_product_attention`` with dropout on the weights, written out."""
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            future = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p) @ value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.twice and kwargs.get("generator") is not None and is_random(func):
            where = repr(self.modules[-1]) if self.modules else "the model"
            raise ValueError(
                f"module {where} draws from a generator of its own, and would draw other values when it is recomputed: "
                f"draw them in the data pipeline, or leave recompute out"
            )
        if not self.drawing:
            return func(*args, **kwargs)
        if func in _SERVED:
            return self._serve(func, args, kwargs)
        if func in _COMPOSITE:
            with _Bernoulli(self):
                return func(*args, **kwargs)
        if is_random(func) and kwargs.get("generator") is None and not without_dropout(func, args):
            raise no_stream(getattr(func, "__name__", str(func)), self.modules)
        return func(*args, **kwargs)

    def _serve(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            dropped = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            return self.attention(*args, **kwargs) if dropped else func(*args, **kwargs)
        if func is torch.dropout:
            return self.dropout(args[0], *args[1:], **{"training" if k == "train" else k: v for k, v in kwargs.items()})
        return self.dropout(*args, **kwargs)


class _Bernoulli(TorchDispatchMode):
    """Serves the Bernoulli draws inside a composite function; refuses any other."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            target, keep_probability = args[0], args[1]
            return target.copy_(self.streams.mask(target.shape, 1 - keep_probability, target.device))
        if func is torch.ops.aten.native_dropout.default and args[2] is not False:
            keep = self.streams.mask(args[0].shape, args[1], args[0].device)
            return args[0] * keep.to(args[0].dtype).mul_(1 / (1 - args[1])), keep
        if seeded(func) and not draws_nothing(func, args, kwargs or {}):
            raise no_stream(str(func), self.streams.modules)
        return func(*args, **(kwargs or {}))


_SERVED = {F.dropout, torch.dropout, F.scaled_dot_product_attention}
_COMPOSITE = {F.multi_head_attention_forward, F.dropout1d, F.dropout2d, F.dropout3d}
