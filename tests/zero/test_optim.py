"""The user's own optimizer on what this rank owns: the same numbers, or refused where a piece is another update."""

import inspect
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import agree, batches, distinct, loss_sum, net, plain, train
from optimizer_cases import Accumulating, Collecting, Packing, Rebinding, Remembering, RememberingBeside
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import plait
from plait import run_threads as run
from plait.comm import Comm
from plait.referee.sanitize import probe
from plait.referee.sanitize.probe import probe_elementwise
from plait.step import Engine, elementwise
from plait.table.flat import lay
from plait.table.mesh import Mesh
from plait.zero.elementwise import ELEMENTWISE
from plait.zero.place import RunPlace

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=0.01, eps=1e-4),
    "adamw fused": partial(AdamW, lr=0.01, eps=1e-4, fused=True),
    "adamw foreach": partial(AdamW, lr=0.01, eps=1e-4, foreach=True),
    "adam amsgrad": partial(Adam, lr=0.01, eps=1e-4, amsgrad=True),
    "sgd": partial(SGD, lr=0.05),
    "sgd momentum": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": partial(RMSprop, lr=0.01, eps=1e-3, momentum=0.5),
    "adagrad, state from the start": partial(Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "nadam": partial(NAdam, lr=0.01, eps=1e-4),
}


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3", "psdp"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_elementwise_optimizer(kind: str, row: str) -> None:
    make = OPTIMIZERS[kind]
    agree(train(net(), "replica=2 shard=2", row, batches(4), optimizer=make), plain(net(), batches(4), optimizer=make))


def matrices() -> nn.Module:
    """Matrices only, as Muon wants them."""
    widths = itertools.pairwise([cases.WIDTH, 12, 9, 3])
    return distinct(nn.Sequential(*(nn.Sequential(nn.Linear(a, b, bias=False), nn.Tanh()) for a, b in widths)))


@pytest.mark.parametrize("row", ["zero1", "zero3", "psdp"])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_what_looks_at_whole_tensors_is_refused_where_they_are_cut(kind: Any, row: str) -> None:
    with pytest.raises(ValueError, match=rf'(?s){kind.__name__}.*cut="tensor"'):
        train(matrices(), "shard=2", row, batches(), optimizer=kind)


class ByTheNorm(torch.optim.SGD):
    """Clips inside of its step, by the norm of all gradients that it has."""

    limit = 30.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(gradient.square().sum().item() for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, self.limit / (norm + 1e-6)))
        return super().step(closure)


class FindsItsRate(torch.optim.SGD):
    """As D-Adaptation does: the rate grows with a sum over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("found", 1e-3)
            super().step(closure)
            group["found"] = max(group["found"], sum(p.abs().sum().item() for p in group["params"]))
            group["lr"] = min(0.01, group["found"] * 1e-4)
        return None


@pytest.mark.parametrize("make", [ByTheNorm, FindsItsRate])
@pytest.mark.parametrize(
    ("mesh", "row", "cut"),
    [("shard=2", "zero1", "tensor"), ("shard=2", "zero3", "tensor"), ("pipe=2", "ddp", "element")],
)
def test_what_looks_at_all_parameters_is_refused_where_ranks_own_some(make: Any, mesh: str, row: str, cut: str) -> None:
    template = distinct(nn.Sequential(*(cases.Block() for _ in range(3))))
    sgd = partial(make, lr=0.01)
    agree(train(template, "shard=2", "ddp", batches(), optimizer=sgd), plain(template, batches(), optimizer=sgd))
    with pytest.raises(ValueError, match=rf"an update of {make.__name__} depends on other parameters too.*\(ddp\)"):
        train(template, mesh, row, batches(), optimizer=sgd, cut=cut)


class Counting(Optimizer):
    """Its constructor asks for something that is not among its defaults; ``early``: it makes its states there."""

    def __init__(self, parameters: Any, num_steps: int, *, early: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.num_steps, self.made = num_steps, 0
        for p in self.param_groups[0]["params"] if early else ():
            self.state[p]["sum"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.made += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.add_(p.grad, alpha=-0.1 * (1 - self.made / self.num_steps))


def test_a_class_that_cannot_be_built_again() -> None:
    make = partial(Counting, num_steps=10)
    for row, cut in (("ddp", "element"), ("zero3", "tensor")):
        ranks = train(net(), "shard=2", row, batches(), optimizer=make, cut=cut)
        agree(ranks, plain(net(), batches(), optimizer=make))
    words = r"nothing shows that it is, for a new Counting cannot be built .*'num_steps'.*a default.*cut=\"tensor\""
    with pytest.raises(ValueError, match=words):
        train(matrices(), "shard=2", "zero1", batches(1), optimizer=lambda given: elementwise(make(given)))
    with pytest.raises(ValueError, match="a new Counting cannot be built on other parameters"):
        train(net(), "shard=2", "ddp", batches(1), optimizer=partial(make, early=True))


def test_a_rate_of_zero_does_not_blind_the_probe() -> None:
    """A warm-up that starts at 0 moves nothing, so nothing would differ."""

    def warming(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = elementwise(Own(parameters, lr=0.05))
        LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        assert optimizer.param_groups[0]["lr"] == 0
        return optimizer

    class Own(torch.optim.Adafactor):
        """A subclass is another class."""

    with pytest.raises(ValueError, match="though it was declared element-wise"):
        train(matrices(), "shard=2", "zero3", batches(), optimizer=warming)


@pytest.mark.parametrize("row", ["zero1", "zero2", "zero3"])
def test_muon_on_matrices_beside_adamw_has_the_bits_of_whole_updates(row: str) -> None:
    """As the guide has it: the groups are built before the engine, by the number of dims."""

    def both(given: Iterable[nn.Parameter]) -> list[Optimizer]:
        parameters = list(given)
        matrices, others = ([p for p in parameters if (p.ndim == 2) is matrix] for matrix in (True, False))
        return [torch.optim.Muon(matrices, lr=0.05), AdamW(others, lr=0.05)]

    right, cut = (train(net(), "shard=3", name, batches(3), both, cut="tensor")[0].state for name in ("ddp", row))
    assert all(torch.equal(cut[name], value) for name, value in right.items())


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.parameters"):
        run(Mesh(), lambda comm: Engine(net(), comm, strategy="zero1", optimizer=AdamW(net().parameters())))


@pytest.mark.parametrize("kind", ["adamw", "sgd momentum", "rmsprop", "adagrad, state from the start"])
def test_an_optimizer_that_has_made_steps_is_refused(kind: str) -> None:
    """Its moments would be lost without a word."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    loss_sum(model, batches()[0]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="steps already"):
        run(Mesh(), lambda comm: Engine(model, comm, strategy="zero1", optimizer=optimizer))


def why(kind: Callable[..., Optimizer], shape: tuple[int, ...] = (8, 12), dtype: Any = torch.float32) -> str | None:
    """The reason against an optimizer of a parameter of which each of two ranks has a piece."""
    optimizer = kind([nn.Parameter(torch.ones(shape, dtype=dtype))])
    layout = lay([("w", shape)], dtype.itemsize, 2)
    runs = layout.runs(*layout.piece(2, 0)) + layout.runs(*layout.piece(2, 1))
    pieces = [(RunPlace(piece, None, 0), torch.ones(piece.numel, dtype=dtype)) for piece in runs]
    return probe_elementwise(optimizer, optimizer.param_groups[0], pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_the_table_of_torchs_classes_is_right(kind: Any, dtype: torch.dtype) -> None:
    names = inspect.signature(kind).parameters
    options: list[dict[str, Any]] = [{}, {"foreach": True}, {"weight_decay": 0.1}, {"maximize": True}]
    options += [{"fused": True}, {"amsgrad": True, "foreach": True}, {"momentum": 0.9, "centered": True}]
    options += [{"momentum": 0.9, "nesterov": True, "fused": True}, {"decoupled_weight_decay": True}]
    for given in options:
        if given.keys() <= names.keys():
            assert why(partial(kind, lr=0.01, **given), dtype=dtype) is None, given


class Starts(torch.optim.SGD):
    """A rule that begins at a size, or a number of dims, which ``rule`` is called with."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(self.rule(p.grad), alpha=0.01)

    def rule(self, g: Tensor) -> Tensor:
        return g.sign()


class Factored(Starts):
    """As timm's Adafactor: one number a row and a column where both are 16 or more."""

    def rule(self, g: Tensor) -> Tensor:
        if g.dim() < 2 or min(g.shape[-2:]) < 16:
            return g.sign()
        square = g.square() + 1e-9
        return g / (square.mean(-1, keepdim=True) * square.mean(-2, keepdim=True) / square.mean()).sqrt()


@pytest.mark.parametrize("shape", [(32, 48), (64, 72)])
def test_a_rule_that_starts_at_a_size_is_seen_on_the_real_shape(shape: tuple[int, ...]) -> None:
    assert why(Factored) is None
    assert f"shape {shape} and on this rank's piece of it differ" in (why(Factored, shape) or "")
    assert why(Starts, shape) is None


def test_what_a_probe_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIMIT", 1024)
    assert probe.shrunk((3, 5000, 7), 1024) == (3, 40, 7)
    assert "shape (32, 24)" in (why(Factored, (64, 48)) or "")
    assert why(Starts, (64, 48)) is None


@pytest.mark.parametrize("kind", [Starts, Factored])
def test_over_a_tensor_axis_the_pieces_of_a_matrix_are_tried(kind: Any) -> None:
    def body(comm: Comm, declare: bool = True) -> None:
        model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Linear(32, 24, bias=False))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model.tensor_plan = lambda: {"0": "column", "1": "row"}
        optimizer = kind(model.parameters())
        plait.Engine(model, comm, strategy="ddp", optimizer=plait.elementwise(optimizer) if declare else optimizer)

    run(Mesh(tensor=2), lambda comm: body(comm, declare=False), deadline=20)  # has the whole matrices
    if kind is Factored:
        with pytest.raises(ValueError, match=r"shape \(32, 24\) and on this rank's piece of it differ"):
            run(Mesh(tensor=2), body, deadline=20)
    else:
        run(Mesh(tensor=2), body, deadline=20)


# ---- values and gradients in unusual places -------------------------------------------------------------------------

KEEPING = (Remembering, RememberingBeside, Collecting, Accumulating)


def two_linears() -> nn.Module:
    return distinct(nn.Sequential(nn.Linear(cases.WIDTH, 7), nn.Tanh(), nn.Linear(7, 3)))


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (Rebinding, r"has replaced p\.data of its piece of '.*update in place"),
        *((kind, rf"{kind.__name__} keeps a gradient beyond its step.*p\.grad\.clone") for kind in KEEPING),
    ],
)
@pytest.mark.parametrize(("mesh", "row"), [("shard=1", "ddp"), ("shard=3", "zero1"), ("replica=2 shard=2", "zero3")])
def test_an_optimizer_that_leaves_the_engines_memory_is_refused(optimizer: Any, says: str, mesh: str, row: str) -> None:
    with pytest.raises(ValueError, match=says):
        train(two_linears(), mesh, row, batches(2), lambda given: elementwise(optimizer(given)))


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_state_of_another_tensor_class_trains_and_is_not_saved(row: str) -> None:
    def look(engine: Engine) -> None:
        with pytest.raises((ValueError, RuntimeError), match=r"'momentum' of '.*' is a Packed, a tensor subclass"):
            engine.optimizer_state_dict()

    ranks = train(two_linears(), "shard=2", row, batches(3), lambda given: elementwise(Packing(given)), look=look)
    agree(ranks, plain(two_linears(), batches(3), Packing), tolerance=1e-2)
