"""Split products against the whole product: values, every gradient, and the messages for them."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from parallel_cases import is_close, lines, on_ranks, part_of, together, values
from torch import Tensor

from plait.comm import Comm
from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor.axis import TensorAxis
from plait.tensor.linear import Entered, row

WAYS = [1, 2, 3, 4]
SHAPES = {"2-D": (6, 3), "3-D": (2, 7, 3), "4-D": (2, 3, 2, 3)}
HIDDEN = 5
"""Over 3 ranks 2, 2, 1 features, over 4 ranks 2, 2, 1, 0."""

Siblings = list[tuple[Tensor, Tensor | None]]


class SourceModel:
    """Three siblings that read x, what they leave combined, and a product back; with every gradient."""

    def __init__(self, shape: tuple[int, ...], bias: bool) -> None:
        width = shape[-1]
        self.x = values(*shape).requires_grad_()
        self.weights = [values(HIDDEN, width, seed=i + 1).requires_grad_() for i in range(3)]
        self.biases = [values(HIDDEN, seed=i + 1).requires_grad_() if bias else None for i in range(3)]
        self.down = values(4, HIDDEN, seed=7).requires_grad_()
        self.probe = values(*shape[:-1], 4, seed=8)
        a, b, c = (F.linear(self.x, w, bias) for w, bias in zip(self.weights, self.biases, strict=True))
        self.y = F.linear(a * b.tanh() + c, self.down)
        (self.y * self.probe).sum().backward()


def split(axis: TensorAxis, whole: SourceModel) -> dict[str, Any]:
    timed = axis.sequence
    x = (part_of(whole.x.detach(), 1, axis) if timed else whole.x.detach().clone()).requires_grad_()
    weights = [part_of(w.detach(), 0, axis).requires_grad_() for w in whole.weights]
    biases = [None if b is None else part_of(b.detach(), 0, axis).requires_grad_() for b in whole.biases]
    down = part_of(whole.down.detach(), 1, axis).requires_grad_()
    pairs: Siblings = list(zip(weights, biases, strict=True))
    entered = Entered(x, axis, "mlp", pairs)
    a, b, c = (entered.column(i) for i in range(3))
    y = row(a * b.tanh() + c, down, axis, "down")
    (y * (part_of(whole.probe, 1, axis) if timed else whole.probe)).sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        "weights": [w.grad for w in weights],
        "biases": [None if b is None else b.grad for b in biases],
        "down": down.grad,
        "lines": lines(axis),
    }


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("shape", "sequence"), [("2-D", False), ("3-D", False), ("4-D", False), ("3-D", True), ("4-D", True)]
)
def test_columns_and_a_row_are_the_whole_product(shape: str, sequence: bool, bias: bool, ways: int) -> None:
    whole = SourceModel(SHAPES[shape], bias)
    ranks = on_ranks(ways, lambda axis: split(axis, whole), sequence=sequence, length=SHAPES[shape][1])
    for name, wanted in (("y", whole.y.detach()), ("x", whole.x.grad)):
        if sequence:
            is_close(together([r[name] for r in ranks], 1), wanted, name)
        else:
            for r in ranks:
                is_close(r[name], wanted, name)
                assert torch.equal(r[name], ranks[0][name]), "ranks agree to the bit"
    for i in range(3):
        is_close(together([r["weights"][i] for r in ranks], 0), whole.weights[i].grad, f"weight {i}")
        if bias:
            is_close(together([r["biases"][i] for r in ranks], 0), whole.biases[i].grad, f"bias {i}")
    is_close(together([r["down"] for r in ranks], 1), whole.down.grad, "down")
    if ways > 1:
        sent = (
            [
                ("all_gather", FORWARD, "mlp"),
                ("reduce_scatter", FORWARD, "down"),
                ("all_gather", BACKWARD, "down"),
                ("reduce_scatter", BACKWARD, "mlp"),
            ]
            if sequence
            else [("all_reduce", FORWARD, "down"), ("all_reduce", BACKWARD, "mlp")]
        )
        assert all(r["lines"] == sent for r in ranks), "three siblings share one reduction"


def two(axis: TensorAxis, *, frozen: bool = False) -> tuple[Tensor, Siblings]:
    """An input and two siblings of this rank."""
    x = values(2, 7, 3)
    weights = [part_of(values(HIDDEN, 3, seed=i + 1), 0, axis).requires_grad_(not frozen) for i in range(2)]
    return x, [(w, None) for w in weights]


def whole_two(*calls: int, wants: bool = True) -> tuple[Tensor, list[Tensor]]:
    """The truth for calls of the two siblings: sum of squares of the outputs added up."""
    x = values(2, 7, 3).requires_grad_(wants)
    weights = [values(HIDDEN, 3, seed=i + 1).requires_grad_() for i in range(2)]
    sum((k + 1) * F.linear(x, weights[i]).tanh() for k, i in enumerate(calls)).square().sum().backward()
    return x.grad, [w.grad for w in weights]


@pytest.mark.parametrize("calls", [(0,), (1,), (1, 0), (0, 0), (0, 1, 0)])
@pytest.mark.parametrize("wants", [True, False], ids=["", "input without gradient"])
def test_siblings_may_be_called_in_any_order_any_number_of_times(wants: bool, calls: tuple[int, ...]) -> None:
    dx, dw = whole_two(*calls, wants=wants)

    def body(axis: TensorAxis) -> Any:
        x, pairs = two(axis)
        x.requires_grad_(wants)
        entered = Entered(x, axis, "mlp", pairs)
        sum((k + 1) * entered.column(i).tanh() for k, i in enumerate(calls)).square().sum().backward()
        return x.grad, [w.grad for w, _ in pairs], lines(axis)

    ranks = on_ranks(3, body)
    for gradient, _, sent in ranks:
        assert sent == ([("all_reduce", BACKWARD, "mlp")] if wants else []), "once, and only where it is wanted"
        if wants:
            is_close(gradient, dx)
        else:
            assert gradient is None
    for i in range(2):
        if i in calls:
            is_close(together([r[1][i] for r in ranks], 0), dw[i])
        else:
            assert all(r[1][i] is None for r in ranks), "zero is a gradient, none is not"


@each_rank("tensor=2")
def test_a_tensor_is_entered_anew_when_anything_about_it_changed(comm: Comm) -> None:
    axis = TensorAxis(comm, sequence=False)
    x, pairs = two(axis)
    y = x.requires_grad_() * 1
    entered = Entered(y, axis, "mlp", pairs)
    assert entered.is_of(y, "mlp")
    assert not entered.is_of(y, "attention"), "another site"
    assert not entered.is_of(y.view_as(y), "mlp"), "another tensor"
    with torch.no_grad():
        assert not entered.is_of(y, "mlp"), "entered for a backward"
    y.mul_(2)
    assert not entered.is_of(y, "mlp"), "written to"


def test_what_entered_is_free_after_backward_without_a_garbage_collection() -> None:
    def body(axis: TensorAxis) -> weakref.ref[Tensor]:
        x, pairs = two(axis)
        entered = Entered(x.requires_grad_() * 1, axis, "mlp", pairs)
        seen = weakref.ref(entered.tensor)
        entered.column(0).sum().backward()
        return seen

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in on_ranks(2, body)] == [None, None]
    finally:
        gc.enable()


def test_backward_runs_twice_where_the_graph_is_kept() -> None:
    dx, dw = whole_two(0, 1)

    def body(axis: TensorAxis) -> Any:
        x, pairs = two(axis)
        entered = Entered(x.requires_grad_(), axis, "mlp", pairs)
        loss = (entered.column(0).tanh() + 2 * entered.column(1).tanh()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad, [w.grad for w, _ in pairs]

    ranks = on_ranks(3, body)
    for gradient, _ in ranks:
        is_close(gradient, 2 * dx)
    for i in range(2):
        is_close(together([r[1][i] for r in ranks], 0), 2 * dw[i])


def test_autocast_computes_in_its_own_dtype_and_leaves_gradients_in_the_weights() -> None:
    x, weight, down = (
        values(*s, seed=i, dtype=torch.float32) for i, s in enumerate([(2, 7, 3), (HIDDEN, 3), (3, HIDDEN)])
    )

    def body(axis: TensorAxis) -> Any:
        w, d = part_of(weight, 0, axis).requires_grad_(), part_of(down, 1, axis).requires_grad_()
        mine = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = row(Entered(mine, axis, "up", [(w, None)]).column(0).tanh(), d, axis, "down")
        y.float().square().sum().backward()
        return y.detach(), mine.grad, w.grad, d.grad

    alone, ranks = on_ranks(1, body)[0], on_ranks(2, body)
    for r in ranks:
        assert (r[0].dtype, r[1].dtype, r[2].dtype) == (torch.bfloat16, torch.float32, torch.float32)
        torch.testing.assert_close(r[0], alone[0], rtol=0.05, atol=0.05)
        torch.testing.assert_close(r[1], alone[1], rtol=0.05, atol=0.5)
    torch.testing.assert_close(together([r[2] for r in ranks], 0), alone[2], rtol=0.05, atol=0.5)


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
@pytest.mark.parametrize("wants", [True, False], ids=["wants", "input without gradient"])
@each_rank("tensor=2")
def test_an_input_is_kept_for_a_weight_that_trains_and_no_weight_is(comm: Comm, wants: bool, trains: bool) -> None:
    axis, kept = TensorAxis(comm, sequence=False), list[int]()
    x, pairs = two(axis, frozen=not trains)
    down = part_of(values(4, HIDDEN, seed=7), 1, axis).requires_grad_(trains)
    hidden = part_of(values(2, 7, HIDDEN), 2, axis).requires_grad_(wants)
    x.requires_grad_(wants)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        column = Entered(x, axis, "mlp", pairs).column(0)
        y_row = row(hidden, down, axis, "down")
    assert y_row.requires_grad == column.requires_grad == (wants or trains)
    assert [t.data_ptr() in kept for t in (x, hidden, pairs[0][0], down)] == [trains, trains, False, False]


@each_rank("tensor=2")
def test_gradients_that_cannot_be_differentiated_again_say_so(comm: Comm) -> None:
    axis = TensorAxis(comm, sequence=False)
    x, pairs = two(axis)
    column = Entered(x.requires_grad_(), axis, "mlp", pairs).column(0)
    y_row = row(part_of(values(2, 7, HIDDEN), 2, axis).requires_grad_(), pairs[0][0].t(), axis, "down")
    for y in (column, y_row):
        with pytest.raises(ValueError, match=r"create_graph=True.*without the tensor axis"):
            torch.autograd.grad(y.sum(), pairs[0][0], create_graph=True)
