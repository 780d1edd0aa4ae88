"""Any operator on any mesh in any layout: the values and gradients of one process, or a refusal; never a message.

Refused operators are tried again under ``auto_redistribute``, where they must equal those of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_cases import MESHES, OPERATORS, Shapes, layouts, shard, values
from torch import Tensor

from plait import run_threads
from plait.comm import Comm
from plait.sharded import LayoutError, ShardedTensor, auto_redistribute
from plait.sharded.layout import Layout
from plait.table.mesh import Mesh


def flat(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, list | tuple) else [out]


def expected(shapes: Shapes, fn: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs, their weights in the loss, and the gradients of the operands."""
    full = [values(shape, k) for k, shape in enumerate(shapes)]
    outs = flat(fn(*full))
    weights = [values(tuple(y.shape), 7 + k, False) for k, y in enumerate(outs)]
    grads = torch.autograd.grad(outs, full, weights, allow_unused=True)
    return (
        [y.detach() for y in outs],
        weights,
        [torch.zeros_like(x) if g is None else g for x, g in zip(full, grads, strict=True)],
    )


def holds(comm: Comm, shapes: Shapes, fn: Callable[..., Any], cuts: list[Layout]) -> bool:
    """True where the operator took these layouts; its results are compared."""
    outs, weights, grads = expected(shapes, fn)
    legal = True
    for auto in (False, True):
        operands = [shard(values(s, k), cut, comm) for k, (s, cut) in enumerate(zip(shapes, cuts, strict=True))]
        comm.ledger.clear()
        try:
            if auto:
                with auto_redistribute():
                    results = flat(fn(*operands))
            else:
                results = flat(fn(*operands))
                assert not comm.ledger.entries
        except LayoutError as refusal:
            assert " of [" in str(refusal) and not comm.ledger.entries
            assert not auto or ".redistribute(" not in str(refusal), refusal
            legal = False
            continue
        for got, want in zip(results, outs, strict=True):
            assert isinstance(got, ShardedTensor) and got.shape == want.shape and got.dtype == want.dtype
            assert tuple(got.local.shape) == tuple(got._spec.local_shape)
            torch.testing.assert_close(got.full(), want, rtol=1e-9, atol=1e-9)
        comm.ledger.clear()
        ours = torch.autograd.grad(results, operands, weights, allow_unused=True)
        assert auto or not comm.ledger.entries, "a backward of operators communicated"
        for got, want, x in zip(ours, grads, operands, strict=True):
            if got is None:
                assert not want.any()
                continue
            assert isinstance(got, ShardedTensor) and got.sharding == x.sharding.dual(comm.mesh)
            torch.testing.assert_close(got.full(), want, rtol=1e-9, atol=1e-9)
        if legal and not auto:
            break
    return legal


@pytest.mark.parametrize("name", OPERATORS)
def test_replicated_and_cut_by_the_first_dim(name: str) -> None:
    shapes, fn = OPERATORS[name]

    def body(comm: Comm) -> None:
        assert holds(comm, shapes, fn, [Layout.replicated(len(s)) for s in shapes])
        first = [Layout((("tensor",),) + ((),) * (len(s) - 1)) if s else Layout(()) for s in shapes]
        holds(comm, shapes, fn, first)

    run_threads("tensor=4", body)


@st.composite
def situations(draw: Any) -> tuple[str, str, list[Layout]]:
    mesh = draw(st.sampled_from(MESHES))
    name = draw(st.sampled_from(sorted(OPERATORS)))
    return mesh, name, [draw(layouts(Mesh.parse(mesh), len(s))) for s in OPERATORS[name][0]]


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(situations())
def test_any_operator_in_any_layout(situation: tuple[str, str, list[Layout]]) -> None:
    mesh, name, cuts = situation
    shapes, fn = OPERATORS[name]
    run_threads(mesh, lambda comm: holds(comm, shapes, fn, cuts))


STEPS: list[Callable[..., Tensor]] = [
    lambda x, w: x.relu(),
    lambda x, w: x + w,
    lambda x, w: x * w,
    lambda x, w: F.linear(x, w),
    lambda x, w: F.linear(x, w, w[0]),
    lambda x, w: x @ w.T + x,
    lambda x, w: F.layer_norm(x, (6,), w[1]),
    lambda x, w: x.softmax(-1) - w,
    lambda x, w: x.T.contiguous() * 0.5,
    lambda x, w: x - x.mean(0),
    lambda x, w: torch.cat([x[:, 3:], w[:, :3]], 1),
    lambda x, w: x.view(2, 3, 6).sum(1, keepdim=True).expand(2, 3, 6).flatten(0, 1),
]
"""x and w [6, 6] -> [6, 6]"""


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_programs_of_several_operators(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    steps = data.draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=6))
    cuts = [data.draw(layouts(Mesh.parse(mesh), 2)) for _ in range(2)]

    def program(x: Tensor, w: Tensor) -> Tensor:
        for step in steps:
            x = step(x, w)
        return x

    run_threads(mesh, lambda comm: holds(comm, ((6, 6), (6, 6)), program, cuts))
