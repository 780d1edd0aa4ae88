"""The dropout of a compiled unit without a compiler: graphs written by hand, carried out node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from plait.forward import compiled
from plait.forward.compiled import check_compile, closed_units
from plait.forward.context import CurrentForward, RNGPosition
from plait.forward.dropout import DropoutRNG
from plait.forward.graph_dropout import NotCompiledError, refuse_random, rows_of, serve
from plait.table.parallelism import Parallelism

CPU = torch.device("cpu")


def dropout_at(step: int = 3, samples: int = 5) -> DropoutRNG:
    """In training, in a microbatch whose first sample is the 7th."""
    current = CurrentForward()
    current.begin(RNGPosition(step, 2, 6, samples), draws=True)
    return DropoutRNG(11, current)


def graph_of(function: Callable[..., Any], *inputs: Tensor, **settings: Any) -> fx.Graph:
    """One call, as Dynamo would write it."""
    graph = fx.Graph(nn.Module())
    nodes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    for node, value in zip(nodes, inputs, strict=True):
        node.meta["example_value"] = value
    graph.output(graph.call_function(function, tuple(nodes), settings))
    return graph


def carried_out(graph: fx.Graph, dropout: DropoutRNG, *inputs: Tensor) -> Tensor:
    draws = serve(graph, lambda node: "")
    rows = [row for draw in draws for row in rows_of(dropout, draw)]
    keys = [torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).T] if draws else []
    out: Tensor = fx.GraphModule(nn.Module(), graph)(*inputs, *keys)
    return out


@pytest.mark.parametrize("shape", [(5, 7), (5,), (5, 3, 9), (4, 7), (1, 129), (), (0, 3)], ids=str)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_masks_are_those_of_the_engine(p: float, shape: tuple[int, ...]) -> None:
    """Of samples, of a microbatch whose first dim is no samples, and of one number."""
    x = torch.randn(shape)
    wanted = dropout_at().dropout(x, p)
    assert torch.equal(carried_out(graph_of(F.dropout, x, p=p), dropout_at(), x), wanted)
    if x.numel() > 6 and p < 1:
        assert 0 < int((wanted == 0).sum()) < x.numel()
        later = carried_out(graph_of(F.dropout, x, p=p), dropout_at(step=4), x)
        assert not torch.equal(later, wanted)


@pytest.mark.parametrize("queries", [(5, 4, 3, 2), (2, 5, 3, 2)], ids=["of samples", "of a microbatch"])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_weights(grouped: bool, queries: tuple[int, ...]) -> None:
    q = torch.randn(queries)
    k, v = (torch.randn(queries[0], queries[1] - 3 if grouped else queries[1], 6, 2) for _ in range(2))
    if grouped and queries[1] % k.size(1):
        k, v = k[:, :1], v[:, :1]
    settings = {"dropout_p": 0.4, "is_causal": True, "enable_gqa": grouped}
    graph = graph_of(F.scaled_dot_product_attention, q, k, v, **settings)
    assert torch.equal(carried_out(graph, dropout_at(), q, k, v), dropout_at().attention(q, k, v, **settings))


def test_two_draws_have_keys_of_their_own() -> None:
    x, graph = torch.ones(5, 40), fx.Graph(nn.Module())
    node = graph.placeholder("x")
    node.meta["example_value"] = x
    first = graph.call_function(F.dropout, (node, 0.5))
    first.meta["example_value"] = x
    graph.output(graph.call_function(F.dropout, (first, 0.5, True, True)))
    dropout = dropout_at()
    wanted = dropout.dropout(dropout.dropout(x, 0.5), 0.5)
    assert torch.equal(carried_out(graph, dropout_at(), x), wanted)


@pytest.mark.parametrize("settings", [{"p": 0.0}, {"training": False}])
def test_what_draws_nothing_is_left_alone(settings: dict[str, Any]) -> None:
    x = torch.randn(5, 3)
    graph = graph_of(F.dropout, x, **settings)
    assert not serve(graph, lambda node: "")
    assert torch.equal(fx.GraphModule(nn.Module(), graph)(x), x)


@pytest.mark.parametrize("function", [torch.rand_like, torch.bernoulli, F.rrelu, torch.ops.aten.rand_like.default])
def test_other_random_functions_are_refused(function: Callable[..., Any]) -> None:
    settings = {"training": True} if function is F.rrelu else {}
    with pytest.raises(NotCompiledError, match=r"it calls .*, which only draws uncompiled"):
        serve(graph_of(function, torch.ones(2), **settings), lambda node: "")


def test_what_a_decomposition_leaves_is_refused_too() -> None:
    graph = graph_of(torch.ops.aten.bernoulli.p, torch.ones(2), p=0.5)
    with pytest.raises(NotCompiledError, match="bernoulli"):
        refuse_random(graph)
    refuse_random(graph_of(torch.ops.aten.mul.Tensor, torch.ones(2), torch.ones(2)))


def test_a_checkpoint_that_draws_is_refused() -> None:
    inner = fx.GraphModule(nn.Module(), graph_of(F.dropout, torch.ones(2, 3), p=0.5))
    root = nn.Module()
    root.body = inner
    graph = fx.Graph(root)
    graph.output(graph.get_attr("body"))
    with pytest.raises(NotCompiledError, match="in a checkpoint or condition of its own"):
        serve(graph, lambda node: "")


# ---- which units, and what is refused -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_units_with_no_unit_inside_are_compiled() -> None:
    model = nn.Sequential(Block(nn.Linear(2, 2)), nn.Linear(2, 2), Block(Block(nn.Linear(2, 2))))
    assert closed_units(model, ["", "0", "1", "2", "2.inner"]) == ["0", "2.inner"]
    assert closed_units(model, ["", "0", "2"], links=["2.inner"]) == ["0"]
    assert closed_units(model, [""]) == [""]
    assert closed_units(Block(nn.SyncBatchNorm(3)), [""]) == []


@pytest.mark.parametrize(
    ("settings", "tensor", "says"),
    [
        ({}, 2, "compile with a mesh of tensor=2: the messages inside of cut modules"),
        ({"recompute": "selective"}, 1, "compile with recompute 'selective'"),
        ({"gemm": "onednn"}, 1, "compile with gemm 'onednn'"),
    ],
)
def test_settings_that_do_not_go_with_it(settings: dict[str, Any], tensor: int, says: str) -> None:
    check_compile(Parallelism(**settings), tensor, CPU)
    with pytest.raises(ValueError, match=says):
        check_compile(Parallelism(compile=True, **settings), tensor, CPU)


def test_no_compiler_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "missing_compiler", lambda device: f"a compiler for {device}")
    with pytest.raises(ValueError, match="compile needs a compiler for cpu; or leave compile out"):
        check_compile(Parallelism(compile=True), 1, CPU)
    check_compile(Parallelism(), 1, CPU)
