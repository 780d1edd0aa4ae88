"""Stacked LSTM, GRU and RNN with dropout between their layers: torch's kernel draws from the process's generator, so
the layers run one at a time.

    lstm(x, hx, weights, num_layers=2, dropout=p)     x ──► layer 0 ──► dropout ──► layer 1 ──► out      no dropout here
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]
NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Stack(NamedTuple):
    """The arguments of torch's recurrent functions, but for packed sequences."""

    input: Tensor
    states: Any
    weights: list[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def is_packed(args: Sequence[Any]) -> bool:
    """Whether the sequences are packed: rows of several samples are mixed, and which is whose is not told."""
    return isinstance(args[3], list)


def draws(func: Function, args: Sequence[Any]) -> bool | None:
    """Whether a recurrent function drops elements between its layers; None where it is another function."""
    if getattr(func, "__name__", "") not in NAMES:
        return None
    weights = next(place for place, value in enumerate(args) if isinstance(value, list))
    _has_biases, num_layers, dropout, train = args[weights + 1 : weights + 5]
    return bool(dropout and train and num_layers > 1)


def layer_by_layer(func: Function, args: Sequence[Any], drop: Callable[[Tensor], Tensor]) -> Any:
    """What ``func`` returns, with ``drop`` between the layers; it gets [samples, time, features]."""
    stack = Stack(*args)
    ways = 2 if stack.bidirectional else 1
    each = len(stack.weights) // stack.num_layers
    x, many = stack.input, isinstance(stack.states, tuple | list)
    ends: list[Sequence[Tensor]] = []
    for layer in range(stack.num_layers):
        first = [state[layer * ways : (layer + 1) * ways] for state in (stack.states if many else [stack.states])]
        weights = stack.weights[layer * each : (layer + 1) * each]
        here = stack._replace(input=x, states=tuple(first) if many else first[0], weights=weights, num_layers=1)
        x, *last = func(*here._replace(dropout=0.0))
        ends.append(last)
        if layer < stack.num_layers - 1:
            x = drop(x) if stack.batch_first else drop(x.transpose(0, 1)).transpose(0, 1)
    return (x, *(torch.cat(states) for states in zip(*ends, strict=True)))
