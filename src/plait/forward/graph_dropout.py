"""The dropout of a compiled unit: the graph that the compiler is given reads its keys as one more input.

    Dynamo's graph      dropout(x, 0.1)            draws from the process's generator
    becomes             dropped(keys, 0, 0.1, x)   plain arithmetic, which the compiler fuses with what is around it
    and each call       keys, int64 [3, rows]      of this step, these samples, this module: made outside, by DropoutRNG

    row of a mask       one for each index of its first dim: both halves of the key, and the number of its first element

Nothing of a step is a constant of the graph, so no step makes another one, and the masks are those that ``DropoutRNG``
draws without a compiler: integers, to the bit.  Every other random function is refused.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from plait.forward.dropout import DropoutRNG, written_out
from plait.forward.masks import LOW32, random_bits
from plait.forward.random_ops import draws_nothing, is_random, seeded
from plait.torch_private import OpOverload


class NotCompiledError(ValueError):
    """A unit has something that only runs right without a compiler; the text says what."""


class GraphMask(NamedTuple):
    """A mask that a graph reads: of which module, by its name in the unit, and of which shape."""

    module: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Those of its keys."""
        return self.shape[0] if self.shape else 1


def kept(shape: Sequence[int], keys: Tensor, first: int, p: float) -> Tensor:
    """The mask of ``shape`` whose rows of ``keys``, int64 [3, all rows], begin at ``first``: True, it survives."""
    rows = shape[0] if shape else 1
    low, high, start = (keys[i, first : first + rows, None] for i in range(3))
    index = start + torch.arange(math.prod(shape[1:]), dtype=torch.int64, device=keys.device)
    return (random_bits(index, low, high) >= math.floor(p * 2**32)).view(tuple(shape))


def dropped(keys: Tensor, first: int, p: float, inplace: bool, input: Tensor) -> Tensor:
    """``F.dropout`` in training, by that mask."""
    factor = kept(input.shape, keys, first, p).to(input.dtype) * (1 / (1 - p) if p < 1 else 0.0)
    return input.mul_(factor) if inplace else input * factor


def attended(keys: Tensor, first: int, p: float, *args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` with that dropout on its weights."""
    return written_out(lambda weights: dropped(keys, first, p, False, weights), *args, **kwargs)


def serve(graph: fx.Graph, module_of: Callable[[fx.Node], str]) -> list[GraphMask]:
    """Make a graph of Dynamo's read its dropout from a last input ``keys``, which is added where there is any.

    Args:
        module_of: the name of the module, in its unit, that runs a node.

    Returns:
        The masks in the order of their rows in ``keys``.

    Raises:
        NotCompiledError: a random function that is no dropout, or one inside of a function of higher order.
    """
    draws: list[GraphMask] = []
    keys: fx.Node | None = None
    for node in list(graph.nodes):
        found = _drawn(node)
        if found is None:
            continue
        shape, function, args, kwargs = found
        if keys is None:
            last = [one for one in graph.nodes if one.op == "placeholder"][-1]
            with graph.inserting_after(last):
                keys = graph.placeholder("keys")
        first = sum(draw.rows for draw in draws)
        draws.append(GraphMask(module_of(node), shape))
        with graph.inserting_before(node):
            new = graph.call_function(function, (keys, first, *args), kwargs)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return draws


def _drawn(node: fx.Node) -> tuple[tuple[int, ...], Callable[..., Tensor], tuple[Any, ...], dict[str, Any]] | None:
    """The shape of the mask that a node draws, and what makes the same with keys; None for what draws nothing."""
    if node.op == "get_attr" or node.op in ("placeholder", "output"):
        _refuse_within(node)
        return None
    if node.target in (F.dropout, torch.dropout):
        given: dict[str, Any] = dict(zip(_DROPOUT, node.args, strict=False)) | dict(node.kwargs)
        p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
        if not training or p == 0:
            return None
        return _shape(given["input"]), dropped, (p, given.get("inplace", False)), {"input": given["input"]}
    if node.target is F.scaled_dot_product_attention:
        given = dict(zip(_ATTENTION, node.args, strict=False)) | dict(node.kwargs)
        p = given.pop("dropout_p", 0.0)
        if not p:
            return None
        query, key = _shape(given["query"]), _shape(given["key"])
        if given.get("enable_gqa"):
            key = (*key[:-3], query[-3], *key[-2:])
        shape = (*torch.broadcast_shapes(query[:-2], key[:-2]), query[-2], key[-2])
        return shape, attended, (p,), given
    function = getattr(Tensor, node.target, None) if isinstance(node.target, str) else node.target
    if callable(function) and (is_random(function) or _is_seeded(node)):
        raise NotCompiledError(f"it calls {getattr(function, '__name__', function)!r}, which only draws uncompiled")
    return None


_DROPOUT = ("input", "p", "training", "inplace")
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(map(int, node.meta["example_value"].shape))


def _is_seeded(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and seeded(op) and not draws_nothing(op, node.args, node.kwargs)


def _refuse_within(node: fx.Node) -> None:
    """Raises NotCompiledError for a subgraph (a checkpoint, a condition) that draws: it has no input for keys."""
    owner, inner = node.graph.owning_module, None
    if node.op == "get_attr" and owner is not None:
        inner = getattr(owner, str(node.target), None)
    if isinstance(inner, fx.GraphModule):
        for one in inner.graph.nodes:
            if _drawn(one) is not None:
                raise NotCompiledError("it draws dropout in a checkpoint or condition of its own")


def refuse_random(graph: fx.Graph) -> None:
    """Raises NotCompiledError for an operator that still draws from a generator in a graph that is to be compiled."""
    for node in graph.nodes:
        if _is_seeded(node):
            raise NotCompiledError(f"it calls {node.target!s}, which only draws uncompiled")
        if "inductor_seed" in str(node.target):
            raise NotCompiledError("it draws inside of a composite function, as nn.MultiheadAttention does")


def rows_of(dropout: DropoutRNG, draw: GraphMask) -> list[tuple[int, int, int]]:
    """The rows of keys of the running module's next mask, where it has the draw's shape."""
    keys = dropout.keys(draw.shape)
    inner = math.prod(draw.shape[1:])
    if draw.shape and len(keys) == draw.rows:
        return [(key & LOW32, key >> 32, 0) for key in keys]
    return [(keys[0] & LOW32, keys[0] >> 32, row * inner) for row in range(draw.rows)]
