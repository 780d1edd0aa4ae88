"""A handler for dropout that depends on the model, not on the process.

A mask is a pure function of (seed, step, *global sample index*, site, number of the draw there, element index), and the
name of a site comes from ``sites``.  Every rank that computes a sample, in any microbatch, draws the same mask: no cut
of the batch changes it, and nothing draws from a global generator.  The bits (see ``forward.masks``) come from a hash
of the "hash prospector" family, which needs no generator object and runs on every device.

The handler sees every function that draws.  It serves ``F.dropout`` and the attention kernel, runs composite functions
(multi-head attention) under a dispatch mode that serves their Bernoulli draws, and refuses every other random operator.
It ignores functions that are given a generator, unless they run twice, and everything in eval mode.

A model that draws does so from its first steps on: one that has drawn nothing by then runs without this handler.  One
of torch's layers with p = 0 may get another p at any time, and so may code that has called ``F.dropout`` with p = 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.forward.context import CurrentForward, RNGPosition
from plait.forward.interceptor import EVERY, FIRST, Function, Handler
from plait.forward.masks import keep_mask, stream_key
from plait.forward.random_ops import draws_nothing, is_random, no_stream, seeded
from plait.forward.random_streams import STREAMS
from plait.torch_private import TorchDispatchMode

SliceOf = Callable[[str, Sequence[int]], Any]


class DropoutRNG(Handler):
    """The dropout of one stage.  If the engine ``recomputes``, parts of the model draw the same masks twice."""

    slice_of: SliceOf | None = None
    """Returns the slice of its whole activation that a module draws for, where activations are cut."""

    def __init__(
        self,
        seed: int,
        current: CurrentForward,
        *,
        recomputes: bool = False,
        layers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.seed, self.current, self.layers = seed, current, layers or {}
        self.rests = True  # until a forward may draw
        self.attends = False
        """True while a mask is drawn for attention weights, [..., queries, keys]."""
        self.in_eval = recomputes

    def sees(self, func: Function) -> bool:
        return func in _SERVED or func in _COMPOSITE or is_random(func)

    def mask(self, shape: Sequence[int], p: float, device: torch.device, *, by_head: bool = False) -> Tensor:
        """The next mask of the running module: bool, ``shape``, True where an element survives.

        Its rows are samples or tokens where their number fits (``RNGPosition.of_samples``), or ``by_head`` the heads
        of each.  Otherwise the module has lost the sample dim, and the mask belongs to the global microbatch.
        """
        position, module, site = self.site()
        if position.of_samples(shape) or (by_head and shape[0] % position.num_samples == 0):
            keys = self.sample_keys("dropout", site)
        else:
            keys = [stream_key("microbatch dropout", self.seed, position.step, position.microbatch, site)]
        place = self.place(module, shape)
        return keep_mask(keys, math.prod(shape) // len(keys) if keys else 0, p, device, place).view(tuple(shape))

    def sample_keys(self, kind: str, site: str) -> list[int]:
        """Returns one key for each sample of the microbatch, by its global index."""
        position = self.current.context.position
        assert position is not None
        samples = range(position.first_sample, position.first_sample + position.num_samples)
        return [stream_key(kind, self.seed, position.step, i, site) for i in samples]

    def place(self, module: str, shape: Sequence[int]) -> Callable[[Tensor], Tensor] | None:
        """Maps indices of a module's activation of this shape to those of the whole one, if it is cut."""
        part = self.slice_of(module, tuple(shape)) if self.slice_of else None
        return part.indices(shape) if part else None

    def site(self) -> tuple[RNGPosition, str, str]:
        """Returns the place of the running module's next draw: the forward's position, the module, and the site."""
        context = self.current.context
        position, counts, module, site = context.position, context.counts, context.module.name, context.module.site
        if self.rested:
            raise ValueError(
                f"module {module!r} draws random numbers now, and nothing did in the first {FIRST} steps: from then on "
                f"plait looks in every {EVERY}th step only, and forwards in between may have drawn from the rank's own "
                f"generator. Call F.dropout from the first step on, with p=0 where nothing is to be dropped yet"
            )
        if position is None:
            raise ValueError(
                f"{f'module {module!r}' if module else 'the program'} draws random numbers before the model itself was "
                f"called: only the model's forward says where they are in the run; call this (a method of the model) "
                f"from it, or draw with your own generator"
            )
        if not self.current.comes_back:
            raise ValueError(
                f"{f'module {module!r}' if module else 'loss_fn'} draws dropout in a checkpoint around a function that "
                f"is no module's call: in the backward the mask to draw again would be unknown; checkpoint a "
                f"module's call, as in checkpoint(self.block, x, use_reentrant=False), or let the engine recompute"
            )
        if context.module.again > 1:
            raise ValueError(
                f"module {module!r} ran several times in this forward and draws dropout while it is recomputed, or in "
                f"several forwards: it is not known which call's mask to draw again. Call engine.backward after each "
                f"forward and give each call its own module, or let the engine recompute"
            )
        drawn = counts.masks.get(site, 0)
        counts.masks[site] = drawn + 1
        return position, module, f"{site}#{drawn}"

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``F.dropout``, with the next mask of the running module."""
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability {p}: it must be from 0 to 1")
        layer = self.layers.get(self.current.context.module.name)
        if layer is None or layer.p != p:  # a hook of the layer may call it with another p
            self.rests = False
        if not training or p == 0:
            return input
        scale = 1 / (1 - p) if p < 1 else 0.0
        factor = self.mask(input.shape, p, input.device).to(input.dtype).mul_(scale)
        return input.mul_(factor) if inplace else input * factor

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
        """``F.scaled_dot_product_attention``, written out if the weights have dropout.

        Like torch's, it scales queries and keys (fp16 overflows late); a query that attends to nothing gets zeros.
        """
        if not dropout_p:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scale = query.size(-1) ** -0.5 if scale is None else scale
        root = math.sqrt(abs(scale))
        scores = (query * math.copysign(root, scale)) @ (key * root).transpose(-2, -1)
        if is_causal:
            future = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
            nothing = scores.isneginf().all(-1, keepdim=True)
            weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
        else:
            weights = scores.softmax(-1)
        self.attends = True
        try:
            return self.dropout(weights, dropout_p) @ value
        finally:
            self.attends = False

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        context, own_generator = self.current.context, kwargs.get("generator") is not None
        if context.module.twice and own_generator and is_random(func):
            where = repr(context.module.name) if context.module.name else "the model"
            raise ValueError(
                f"module {where} draws from its own generator, and would draw other values when it is recomputed: "
                f"draw them in the data pipeline, or leave recompute out"
            )
        if not context.draws:
            return call_next(*args, **kwargs)
        if func in _SERVED:
            return _SERVED[func](self, *args, **kwargs)
        self.rests = self.rests and _drops_nothing(func, args)
        if func in _COMPOSITE:
            with _Bernoulli(self, by_head=func is F.multi_head_attention_forward):
                return func(*args, **kwargs)
        if not own_generator and not _drops_nothing(func, args):
            if func in STREAMS:
                return STREAMS[func](self, *args, **kwargs)
            raise no_stream(getattr(func, "__name__", str(func)), context.module.name)
        return func(*args, **kwargs)


class _Bernoulli(TorchDispatchMode):
    """Serves the Bernoulli draws inside a composite function; refuses any other."""

    def __init__(self, dropout: DropoutRNG, *, by_head: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dropout, self.mask = dropout, partial(dropout.mask, by_head=by_head)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            target, keep_probability = args[0], args[1] if len(args) > 1 else 0.5  # torch omits its default
            return target.copy_(self.mask(target.shape, 1 - keep_probability, target.device))
        if func is torch.ops.aten.native_dropout.default and args[2] is not False:
            keep = self.mask(args[0].shape, args[1], args[0].device)
            return args[0] * keep.to(args[0].dtype).mul_(1 / (1 - args[1])), keep
        if func is torch.ops.aten.exponential_.default:
            return STREAMS[Tensor.exponential_](self.dropout, *args, **(kwargs or {}))
        if seeded(func) and not draws_nothing(func, args, kwargs or {}):
            raise no_stream(str(func), self.dropout.current.context.module.name)
        return func(*args, **(kwargs or {}))


def _drops_nothing(func: Function, args: Sequence[Any]) -> bool:
    """Returns True for a recurrent layer without dropout between its layers."""
    if getattr(func, "__name__", "") not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return False
    weights = next(place for place, value in enumerate(args) if isinstance(value, list))
    _has_biases, num_layers, dropout, train = args[weights + 1 : weights + 5]
    return not (dropout and train and num_layers > 1)


_SERVED: dict[Function, Function] = {
    F.dropout: DropoutRNG.dropout,
    torch.dropout: lambda self, input, p, train: self.dropout(input, p, train),
    F.scaled_dot_product_attention: DropoutRNG.attention,
}
_COMPOSITE = {F.multi_head_attention_forward, F.dropout1d, F.dropout2d, F.dropout3d, F.gumbel_softmax}
