"""Random numbers other than dropout: noise, stochastic depth, jitter, from streams that depend on the place in the run.

    torch.rand(B, 1, 1), randn_like(x), x.new_empty(B, 1).bernoulli_(p), ...      one stream for each sample
    torch.rand(B * T, E): a router's draw for each token                          the same
    torch.rand([])                                                                one for the step (layerdrop)
    anything else                                                                 refused

A draw belongs to the samples if its first dim is the microbatch's number of samples or tokens (samples * a length that
the batch has), and to the step if it has no dim.  Then no cut of the batch changes it, and all ranks drop the same
layer.  Draws of other shapes are refused, because it is unknown what they belong to.

    bits            32 for each element, and 32 more for the normal distribution       (``forward.masks``)
    uniform         the first bits, as many as the dtype has digits, / 2**digits       [0, 1)
    normal          sqrt(-2 ln u) cos(2 pi v)                                          Box and Muller (1958), in fp64
    exponential     -ln u
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.forward.context import RNGPosition
from plait.forward.masks import stream_bits, stream_key

if TYPE_CHECKING:
    from plait.forward.dropout import DropoutRNG as Draws

DIGITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Binary digits of a uniform number, by dtype."""


def _bits(draws: Draws, like: Tensor, words: int, name: str) -> list[Tensor]:
    """Returns ``words`` tensors of random bits in a tensor's shape.

    Raises:
        ValueError: the shape belongs neither to the samples nor to the step.
    """
    position, module, site = draws.site()
    shape = tuple(like.shape)
    if shape and not position.of_samples(shape):
        where = f"module {module!r}" if module else "the model"
        raise ValueError(
            f"{where} draws {name} of shape {shape}, which belongs neither to the {position.num_samples} samples of "
            f"the microbatch (its first dim{_or_tokens(position)}) nor, without dims, to the step: another cut would "
            f"have others. Draw [samples, ...] or [samples * time, ...], pass generator=..., or draw it in the data "
            f"pipeline"
        )
    found = []
    for word in range(words):
        kind = f"draw {word}"
        keys = draws.sample_keys(kind, site) if shape else [stream_key(f"step {kind}", draws.seed, position.step, site)]
        place = draws.place(module, shape) if shape else None
        found.append(stream_bits(keys, math.prod(shape) // max(len(keys), 1), like.device, place).view(shape))
    return found


def _or_tokens(position: RNGPosition) -> str:
    tokens = sorted({position.num_samples * length for length in position.lengths})
    return f", or their {' or '.join(map(str, tokens))} tokens" if tokens else ""


def _open(bits: Tensor) -> Tensor:
    """Uniform fp64 numbers strictly between 0 and 1."""
    return (bits.double() + 0.5) * 2.0**-32


def _fill_uniform(draws: Draws, out: Tensor, low: float = 0.0, high: float = 1.0, name: str = "uniform_") -> Tensor:
    (bits,) = _bits(draws, out, 1, name)
    digits = DIGITS[out.dtype]
    values = (bits >> (32 - digits)).to(out.dtype) * 2.0**-digits
    return out.copy_(values if (low, high) == (0, 1) else values * (high - low) + low)


def _fill_normal(draws: Draws, out: Tensor, mean: float = 0.0, std: float = 1.0, name: str = "normal_") -> Tensor:
    radius, angle = _bits(draws, out, 2, name)
    values = (-2 * _open(radius).log()).sqrt() * (2 * math.pi * _open(angle)).cos()
    return out.copy_(values * std + mean)


def _fill_exponential(draws: Draws, out: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    (bits,) = _bits(draws, out, 1, "exponential_")
    return out.copy_(-_open(bits).log() / lambd)


def _fill_bernoulli(draws: Draws, out: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
    (bits,) = _bits(draws, out, 1, "bernoulli_")
    return out.copy_(bits.double() * 2.0**-32 < p)


def _bernoulli(draws: Draws, probabilities: Tensor, p: float | None = None, **_: Any) -> Tensor:
    return _fill_bernoulli(draws, torch.empty_like(probabilities), probabilities if p is None else p)


Fill = Callable[..., Tensor]


def _serving(fill: Fill, name: str, make: Callable[..., Tensor] | None = None) -> Fill:
    """Returns a function that fills its first argument, or the tensor that ``make`` creates from all of them."""

    def serve(draws: Draws, *args: Any, generator: None = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        out = args[0] if make is None else make(*args, **kwargs)
        if out.dtype not in DIGITS or any(isinstance(value, nn.Parameter) for value in args):
            raise ValueError(
                f"{name} of a parameter's shape, or in {out.dtype}, is drawn in the forward, and no stream serves it: "
                f"pass generator=..., or draw the values in the data pipeline"
            )
        if make is None:
            return fill(draws, *args, **kwargs)
        return fill(draws, out, name=name).requires_grad_(requires_grad)

    return serve


STREAMS: Mapping[Callable[..., Any], Fill] = {
    torch.rand: _serving(_fill_uniform, "rand", torch.empty),
    torch.randn: _serving(_fill_normal, "randn", torch.empty),
    torch.rand_like: _serving(_fill_uniform, "rand_like", torch.empty_like),
    torch.randn_like: _serving(_fill_normal, "randn_like", torch.empty_like),
    Tensor.uniform_: _serving(_fill_uniform, "uniform_"),
    Tensor.normal_: _serving(_fill_normal, "normal_"),
    Tensor.exponential_: _serving(_fill_exponential, "exponential_"),
    Tensor.bernoulli_: _serving(_fill_bernoulli, "bernoulli_"),
    Tensor.bernoulli: _bernoulli,
    torch.bernoulli: _bernoulli,
}
"""The replacement of each random function; it takes the ``DropoutRNG`` before the function's own arguments."""
