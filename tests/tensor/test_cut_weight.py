"""The class of a cut weight: the products that it carries out, refusals by name, and copies of it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from parallel_cases import is_close, part_of, values
from parallel_cases import on_ranks as on_axes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.comm import Comm
from plait.step import Engine
from plait.tensor import TensorAxis, whole
from plait.tensor.linear import Entered, row
from plait.tensor.vocabulary import embedding

PLAN = {"up": "column", "gate": "column", "down": "row", "head": "vocabulary"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 5)
        self.head = nn.Linear(5, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.tanh(self.up(x)) * self.gate(x)))


def net() -> Any:
    return cases.distinct(Net())


def on_ranks(body: Callable[[Comm, Any], Any], mesh: str = "tensor=2", row: str = "ddp") -> list[Any]:
    def start(comm: Comm) -> Any:
        model = net()
        Engine(model, comm, strategy=row, tensor_plan=PLAN)
        return body(comm, model)

    return plait.run_threads(mesh, start, deadline=30)


X = values(4, 5)


def test_no_mode_is_active_in_a_forward_that_draws_nothing() -> None:
    class Asks(Net):
        modes = -1

        def forward(self, x: Tensor) -> Tensor:
            self.modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
            return super().forward(x)

    def body(comm: Comm) -> int:
        model: Any = cases.distinct(Asks()).eval()
        Engine(model, comm, strategy="ddp", tensor_plan=PLAN)
        model(X)
        return int(model.modes)

    assert plait.run_threads("tensor=2", body) == [0, 0]


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "down.weight", "head.weight"])
def test_the_whole_of_a_weight_is_gathered_and_its_gradient_is_the_pieces(name: str) -> None:
    truth = dict(net().named_parameters())[name]
    truth.square().sum().backward()

    def body(comm: Comm, model: Any) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        weight = dict(model.named_parameters())[name]
        (gradient,) = torch.autograd.grad(whole(weight).square().sum(), [weight])
        return whole(weight).detach(), gradient, tuple(weight.shape)

    ranks = on_ranks(body, "tensor=3")
    dim = 1 if name == "down.weight" else 0
    assert all(torch.equal(found, truth.detach()) for found, _, _ in ranks)
    is_close(torch.cat([gradient for _, gradient, _ in ranks], dim), truth.grad)


def test_any_other_tensor_is_whole_already() -> None:
    assert whole(X) is X


READS: dict[str, Callable[[Tensor], object]] = {
    "t": lambda w: w.t(),
    "sum": lambda w: w.sum(),
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack(tensors=[w, w]),
    "mT": lambda w: w.mT,
    "embedding": lambda w: F.embedding(torch.tensor([0]), w),
    "functional_call": lambda w: torch.mul(2, w),
    "linear": lambda w: F.linear(w, w),
    "linear of another bias": lambda w: F.linear(X, w, values(7)),
}


@pytest.mark.parametrize("how", READS)
def test_a_function_that_would_take_a_piece_for_the_whole_is_refused_by_the_weights_name(how: str) -> None:
    with pytest.raises(ValueError, match=r"reads a parameter that is cut over the tensor axis, 'up\.weight'"):
        on_ranks(lambda comm, model: READS[how](model.up.weight))


def test_between_forwards_a_piece_may_be_read_and_written_without_gradients() -> None:
    def body(comm: Comm, model: Any) -> float:
        with torch.no_grad():
            model.up.weight.mul_(2)
            return float(model.up.weight.norm().detach())

    a, b = on_ranks(body)
    assert (a**2 + b**2) ** 0.5 == pytest.approx(2 * float(net().up.weight.detach().norm()), rel=1e-12)


def test_a_linear_of_a_cut_weight_beside_its_module_is_the_product() -> None:
    def body(comm: Comm, model: Any) -> Tensor:
        hidden = F.linear(X, model.up.weight, model.up.bias)
        return F.linear(hidden, model.down.weight).detach()

    model = net()
    for found in on_ranks(body):
        is_close(found, F.linear(model.up(X), model.down.weight).detach())


def test_a_linear_of_another_modules_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reads a parameter that is cut over the tensor axis, 'up\.weight'"):
        on_ranks(lambda comm, model: F.linear(X, model.up.weight, model.gate.bias))


def test_a_tensor_that_enters_again_after_its_backward_has_the_same_gradients() -> None:
    def gradients(weight: Tensor) -> list[list[Tensor]]:
        x = X.clone().requires_grad_()
        again = range(2)
        return [[*torch.autograd.grad(F.linear(x, weight).square().sum(), [x, weight])] for _ in again]

    wanted = gradients(net().up.weight)
    ranks = on_ranks(lambda comm, model: gradients(model.up.weight))
    for found, (dx, dw) in zip(zip(*ranks, strict=True), wanted, strict=True):
        for dx_here, _ in found:
            is_close(dx_here, dx)
        is_close(torch.cat([dw_here for _, dw_here in found]), dw)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {"norm": torch.norm, "data": lambda w: w.data.norm()}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("how", LOOKS)
def test_a_loss_function_takes_no_piece_for_the_whole_even_without_gradients(how: str, evaluates: bool) -> None:
    def loss_fn(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = LOOKS[how](model.up.weight)
        return model(x).full().sum() / scale

    def body(comm: Comm) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: Any = {"loss_fn": loss_fn, "count_fn": len, "tensor_plan": PLAN, "optimizer": optimizer}
        engine = Engine(model, comm, strategy="ddp", **settings)
        (engine.evaluate if evaluates else engine.step)([X])

    with pytest.raises(ValueError, match=rf"'{how}' reads a parameter that is cut over the tensor axis, 'up\.weight'"):
        plait.run_threads("tensor=2", body, deadline=30)


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_a_piece_is_neither_copied_nor_pickled_as_the_whole(take: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"'up\.weight' is a piece.*plait\.save"):
        on_ranks(lambda comm, model: take(model.up.weight))


class Tied(Net):
    """One weight in two siblings and in another module, each with its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(5, 7))
        self.gate.weight = self.other[0].weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.down(self.other(x)))


class SomeAgain(Net):
    """A checkpoint of the program's around one of two siblings."""

    def forward(self, x: Tensor) -> Tensor:
        again: Any = checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=False)
        return self.head(x + self.down(again * self.gate(x)))


PLANS = {Tied: {**PLAN, "other.0": "column"}, SomeAgain: PLAN}


@pytest.mark.parametrize(("mesh", "row"), [("tensor=2", "ddp"), ("tensor=3", "ddp"), ("shard=2 tensor=2", "zero3")])
@pytest.mark.parametrize("kind", [Tied, SomeAgain])
def test_it_trains_as_one_process_does(kind: type[Net], mesh: str, row: str) -> None:
    targets = torch.tensor([0, 8, 2, 3])

    def body(comm: Comm, plan: Any) -> dict[str, Tensor]:
        model = cases.distinct(kind())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, tensor_plan=plan)
        for _ in range(2):
            engine.backward(plait.cross_entropy_sum(model(X), targets), count=4)
            optimizer.step()
        return engine.full_state_dict()

    wanted = plait.run_threads(mesh.replace("tensor=", "replica="), lambda comm: body(comm, None))[0]
    for state in plait.run_threads(mesh, lambda comm: body(comm, PLANS[kind])):
        for name, value in wanted.items():
            is_close(state[name], value, name)


# ---- cut logits --------------------------------------------------------------------------------------------------

KEPT: dict[str, Callable[[Any], Tensor]] = {
    "itself": lambda y: y,
    "flatten": lambda y: y.view(2, 2, 9).flatten(0, 1),
    "view": lambda y: y.view(-1, 9),
    "reshape": lambda y: y.reshape(4, -1),
    "cap": lambda y: (y / 3.0).tanh() * 3.0,
    "float": lambda y: y.float().double(),
    "slice": lambda y: y[torch.tensor([True, True, True, True])],
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("how", KEPT)
def test_cross_entropy_takes_cut_logits(how: str, reduction: str) -> None:
    targets = torch.tensor([0, 8, -100, 3])

    def loss(model: Any) -> Tensor:
        return F.cross_entropy(KEPT[how](model(X)), targets, reduction=reduction)

    def body(comm: Comm, model: Any) -> tuple[Tensor, tuple[int, ...]]:
        return loss(model).detach(), tuple(model(X).shape)

    for found, shape in on_ranks(body, "tensor=3"):
        assert shape == (4, 9)
        is_close(found.double(), loss(net()).detach().double())


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.argmax(-1),
        lambda y: y.softmax(-1),
        lambda y: y[:, :3],
        lambda y: y[..., 0],
        lambda y: y[:3][:, 0, ...],
        lambda y: y.data.argmax(-1),
        lambda y: y.T,
        lambda y: torch.cat([y, y]),
        lambda y: y.sum(),
        lambda y: y + torch.ones(9),
        lambda y: F.cross_entropy(y, torch.zeros(4, dtype=torch.int64), label_smoothing=0.1),
    ],
)
def test_a_function_that_would_take_some_classes_for_all_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"logits\.full\(\)"):
        on_ranks(lambda comm, model: function(model(X)), "tensor=3")


def test_full_logits_are_those_of_one_process() -> None:
    for found in on_ranks(lambda comm, model: model(X).full().detach(), "tensor=3"):
        is_close(found, net()(X).detach())


# ---- backwards in two parts --------------------------------------------------------------------------------------


class Deferring(TensorAxis):
    """An axis whose microbatch makes its weight gradients in a pass of their own."""

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__(axis.comm, sequence=axis.sequence)
        self.length = axis.length
        self.lists: dict[int, Any] = {}

    def later(self, parameter: Tensor) -> Any:
        return self.lists.setdefault(id(parameter), []) if parameter.requires_grad else []


@pytest.mark.parametrize("wants", [True, False], ids=["wants", "input without gradient"])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias"])
def test_products_that_wait_are_those_that_do_not(frozen: str, wants: bool) -> None:
    """The backward makes the input's gradient; a weight is no input of it, and its products wait in a list."""

    def run(axis: TensorAxis) -> list[Tensor | None]:
        x = values(2, 7, 3).requires_grad_(wants)
        w, b = (part_of(t, 0, axis).requires_grad_() for t in (values(7, 3, seed=1), values(7, seed=2)))
        down, table = part_of(values(4, 7, seed=3), 1, axis), part_of(values(11, 3, seed=4), 0, axis)
        w.requires_grad_(frozen != "weight")
        b.requires_grad_(frozen != "bias")
        entered = Entered(x, axis, "up", [(w, b)])
        y = row(entered.column(0).tanh() * entered.column(0), down.requires_grad_(), axis, "down")
        tokens = torch.arange(14).view(2, 7) % 11
        rows = embedding(tokens, table.requires_grad_(), 11, 3, axis, "embed")
        (y.sum() + (rows * values(2, 7, 3, seed=5)).sum()).backward()
        parameters = [w, b, down, table]
        if isinstance(axis, Deferring):
            assert all(p.grad is None for p in parameters), "the backward gave a weight its gradient"
            waiting = (axis.lists.get(id(p), []) for p in parameters)
            return [x.grad, *(sum(make() for make in makes) if makes else None for makes in waiting)]
        return [x.grad, *(p.grad for p in parameters)]

    for now, later in on_axes(3, lambda axis: (run(axis), run(Deferring(axis)))):
        for a, b in zip(now, later, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert torch.equal(a, b)
