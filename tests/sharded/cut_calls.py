"""Calls on whole tensors, repeated on randomly cut ones: the result of each in one word.

right      values, shapes, dtypes and gradients of one process
refused    a LayoutError, which names the operator and the way out
unclear    any other error, where whole tensors raise none, or ranks that disagree
wrong      anything else
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensor_cases import shard
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from plait import run_threads
from plait.comm import Comm
from plait.sharded import LayoutError, ShardedTensor, auto_redistribute
from plait.sharded.layout import Layout
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class Call:
    """A function called one way on whole tensors, and what it gave."""

    function: Callable[..., Any]
    way: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    seeds: list[Tensor | None]
    gradients: list[Tensor | None]

    @classmethod
    def of(cls, function: Callable[..., Any], args: Any, kwargs: Any = None, way: str = "function") -> Call:
        """Makes the call, and keeps its arguments as they are after it."""
        args, kwargs = tree_map(lambda t: leaf(t) if isinstance(t, Tensor) else t, (args, kwargs or {}))
        results, leaves, _ = carried_out(function, way, args, kwargs, None)
        seeds = [seed_of(y) if isinstance(y, Tensor) and y.requires_grad else None for y in results]
        gradients = gradients_of(results, seeds, leaves)
        results = [y.detach() if isinstance(y, Tensor) else y for y in results]
        args = tree_map(lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, args)
        return cls(function, way, args, kwargs, results, seeds, gradients)


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def seed_of(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(y.numel()), dtype=torch.float64).to(y.dtype)


def gradients_of(results: list[Any], seeds: list[Tensor | None], leaves: list[Tensor]) -> list[Tensor | None]:
    ends = [(y, s) for y, s in zip(results, seeds, strict=True) if s is not None]
    wanted = [t for t in leaves if t.requires_grad]
    if not ends or not wanted:
        return []
    return list(torch.autograd.grad([y for y, _ in ends], wanted, [s for _, s in ends], allow_unused=True))


def carried_out(
    function: Callable[..., Any], way: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[list[Any], list[Any], list[Tensor]]:
    """The call's result, the argument that it returns as the same object, and its leaves."""
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if way == "in place":
        first = args[0].clone()
        back = function(first, *args[1:], **kwargs)
        return [first], leaves, [back is first]
    if way == "out=":
        with torch.no_grad():
            if out is None:
                got = function(*args, **kwargs)
                out = tree_map(torch.zeros_like, got)
                function(*args, **kwargs, out=out)
                return tree_leaves(got), [], []
            function(*args, **kwargs, out=out)
            return tree_leaves(out), [], []
    return tree_leaves(function(*args, **kwargs)), leaves, []


def any_layout(rng: random.Random, mesh: Mesh, t: Tensor, pending: float) -> Layout:
    dims: list[list[str]] = [[] for _ in t.shape]
    due = []
    axes = [a for a in ("replica", "tensor") if mesh.axis(a) > 1]
    rng.shuffle(axes)
    for axis in axes:
        draw = rng.random()
        if draw < pending and (t.is_floating_point() or t.is_complex()):
            due.append(axis)
        elif draw < 0.8 and t.dim():
            dims[rng.randrange(t.dim())].append(axis)
    return Layout(tuple(map(tuple, dims)), tuple(due))


def tried(call: Call, mesh: str, seed: int, auto: bool, values: bool = True) -> tuple[bool, str, str]:
    """One call on random layouts: whether an operand was cut or pending, the word for it, and what was said.

    Of every two seeds one leaves all operands but the first whole.
    """
    rng = random.Random(seed)
    given = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
    pending = rng.choice((0.0, 0.0, 0.3)) if seed % 2 else 0.0
    layouts = {id(t): any_layout(rng, Mesh.parse(mesh), t, pending) for t in given}
    if seed % 2 == 0:
        layouts |= {id(t): Layout.replicated(t.dim()) for t in given[1:]}
    outs = [any_layout(rng, Mesh.parse(mesh), y, 0.0) if isinstance(y, Tensor) else None for y in call.results]
    cut = any(layout.cut or layout.pending for layout in layouts.values())
    words: list[tuple[str, str]] = [("unclear", "no answer")] * Mesh.parse(mesh).size

    def body(comm: Comm) -> None:
        made = {i: shard(t, layouts[i], comm) for i, t in zip(map(id, given), given, strict=True)}
        args = tree_map(lambda t: made[id(t)] if isinstance(t, Tensor) else t, call.args)
        kwargs = tree_map(lambda t: made[id(t)] if isinstance(t, Tensor) else t, call.kwargs)
        into: Any = None
        if call.way == "out=":
            ends = zip(call.results, outs, strict=True)
            into = [ShardedTensor.from_full(torch.zeros_like(y), to, comm) for y, to in ends]
            into = into[0] if len(into) == 1 else tuple(into)
        try:
            if auto:
                with auto_redistribute():
                    results, leaves, same = carried_out(call.function, call.way, args, kwargs, into)
            else:
                comm.ledger.clear()
                results, leaves, same = carried_out(call.function, call.way, args, kwargs, into)
                if comm.ledger.entries:
                    words[comm.rank] = ("wrong", "it sent something")
                    return
            words[comm.rank] = ("right", "")
        except LayoutError as error:
            sent = comm.ledger.entries and not auto
            words[comm.rank] = ("wrong", "it sent something, and refused") if sent else ("refused", str(error))
            return
        except Exception as error:
            words[comm.rank] = ("unclear", f"{type(error).__name__}: {error}")
            raise
        said = compared(call, results, leaves, same, values, None if auto else comm)
        if said:
            words[comm.rank] = ("wrong", said)

    try:
        run_threads(mesh, body)
    except Exception as error:
        if all(said == "no answer" for _, said in words):
            return False, "none", ""
        if all(word in ("right", "refused") for word, _ in words) and len({w for w, _ in words}) == 1:
            return cut, "wrong" if words[0][0] == "right" else "unclear", f"afterwards {type(error).__name__}: {error}"
    kinds = {word for word, _ in words}
    if len(kinds) == 1:
        return cut, *words[0]
    worst = max(words, key=lambda w: ("right", "refused", "wrong", "unclear").index(w[0]))
    return cut, "unclear" if worst[0] != "wrong" else "wrong", f"ranks disagree, {sorted(kinds)}: {worst[1]}"


def compared(
    call: Call, results: list[Any], leaves: list[Tensor], same: list[Any], values: bool, silent: Comm | None
) -> str:
    """Differences from the whole tensors, and messages of a backward that should send none."""
    able = all(
        isinstance(y, Tensor) and y.requires_grad for y, s in zip(results, call.seeds, strict=False) if s is not None
    )
    found = (
        gradients_of(results, call.seeds, leaves) if call.gradients and able and len(results) == len(call.seeds) else []
    )
    if silent is not None and silent.ledger.entries:
        return "its backward sent something"
    if not all(same):
        return "in place, it returned another tensor"
    if len(results) != len(call.results):
        return f"{len(results)} results, not {len(call.results)}"
    for got, want in zip(results, call.results, strict=True):
        if not isinstance(want, Tensor):
            if got != want and got == got:
                return f"{got!r}, not {want!r}"
            continue
        if not isinstance(got, ShardedTensor):
            return f"a {type(got).__name__} {getattr(got, 'shape', '')}, no ShardedTensor"
        if said := unequal(got, want, "the result", values):
            return said
    if not call.gradients:
        return ""
    if not able:
        lost = any(g is not None and g.any() for g in call.gradients)
        return "a result has no gradient" if lost else ""
    ends = [t for t in leaves if t.requires_grad]
    for got, want, x in zip(found, call.gradients, ends, strict=True):
        if got is None or want is None:
            other = want if got is None else got.full()
            if other is not None and other.abs().nan_to_num().sum() != 0:
                return f"a gradient is {'missing' if got is None else 'new'}"
        elif got.sharding != x.sharding.dual(x.mesh):
            return f"a gradient of '{x.sharding}' is '{got.sharding}'"
        elif said := unequal(got, want, "a gradient", values):
            return said
    return ""


def unequal(got: Any, want: Tensor, what: str, values: bool) -> str:
    if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
        return f"{what} is {list(got.shape)} {got.dtype}, not {list(want.shape)} {want.dtype}"
    full = got.full()
    tolerance = 1e-4 if want.dtype in (torch.float32, torch.complex64) else 1e-8
    if values and not torch.allclose(full.resolve_conj(), want, rtol=tolerance, atol=tolerance, equal_nan=True):
        return f"{what} differs: {full.flatten()[:6].tolist()}, not {want.flatten()[:6].tolist()}"
    return ""
