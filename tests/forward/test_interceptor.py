"""The interceptor: the handlers that see a function, their order, and when it is off."""

from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from engine_cases import batches, sgd
from pipeline_cases import engine_on
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.forward.context import CurrentForward
from plait.forward.interceptor import Function, Handler, Interceptor
from plait.forward.random_ops import all_silent, silent
from plait.forward.recompute import blocks_of
from plait.table.mesh import Mesh

summing = partial(engine_on, optimizer=sgd, loss_fn=lambda model, x: model(x).sum(), count_fn=len)


class Noting(Handler):
    """Notes what it sees, and adds its number to the first argument of what it passes on."""

    def __init__(self, number: int, seen: list[tuple[int, str]], functions: set[Any], parameters: set[int]) -> None:
        self.number, self.seen, self.functions, self.parameters = number, seen, functions, parameters

    def sees(self, func: Function) -> bool:
        return func in self.functions

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((self.number, func.__name__))
        changed = 10 * args[0] + self.number if isinstance(args[0], Tensor) else args[0]
        return call_next(changed, *args[1:], **kwargs)


def test_handlers_see_their_functions_and_those_that_read_their_parameters_in_order() -> None:
    x, weight, other = torch.ones(2, dtype=torch.float64), torch.full((2,), 0.5), torch.ones(2)
    seen: list[tuple[int, str]] = []
    first, second = Noting(1, seen, {torch.sin}, {id(weight)}), Noting(2, seen, {torch.sin, torch.add}, set())
    third = Noting(3, seen, set(), {id(weight), id(other)})
    with Interceptor(CurrentForward(), [first, second, third]):
        sine = torch.sin(x)
        assert seen == [(1, "sin"), (2, "sin")]
        seen.clear()
        total = torch.add(x, weight)
        assert seen == [(1, "add"), (2, "add"), (3, "add")]
        seen.clear()
        torch.cos(x), weight.shape, weight.size()
        assert not seen, "nobody's function, or one that reads no values"
        torch.add(x, other=other)
        assert seen == [(1, "add"), (2, "add"), (3, "add")], "a keyword is an argument too"
        seen.clear()
        torch.stack([other, x.float()])
        assert seen == [(1, "stack"), (3, "stack")], "and what is in a list"
    assert torch.equal(sine, torch.sin(10 * (10 * x + 1) + 2))
    assert torch.equal(total, torch.add(10 * (10 * (10 * x + 1) + 2) + 3, weight))
    torch.sin(x)
    assert len(seen) == 2, "off"


def test_what_a_handler_calls_is_seen_by_nobody() -> None:
    class Calling(Handler):
        calls = 0

        def sees(self, func: Function) -> bool:
            return True

        def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
            Calling.calls += 1
            return torch.cos(call_next(*args, **kwargs))

    x = torch.ones(2)
    with Interceptor(CurrentForward(), [Calling()]):
        y = torch.sin(x)
    assert torch.equal(y, x.sin().cos()) and Calling.calls == 1


# ---- a model in which nothing can draw ------------------------------------------------------------------------------


def stock() -> nn.Module:
    """Its values are drawn, but no generator is moved."""
    with torch.random.fork_rng(devices=[]):
        inner = nn.Sequential(nn.GELU(), nn.LayerNorm(4))
        return nn.Sequential(nn.Linear(cases.WIDTH, 4), inner, nn.Linear(4, 3)).double()


def functions_seen(
    loss_fn: Any, change: Any = lambda model: None, *, own_loop: bool = False, mesh: str = "shard=1"
) -> list[str]:
    """Functions that interceptors see in a step of a model whose hooks are changed after the engine was built."""
    seen: list[str] = []
    original = Interceptor.__torch_function__

    def noting(self: Interceptor, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(getattr(func, "__name__", ""))
        return original(self, func, types, args, kwargs)

    def body(comm: Comm) -> None:
        engine, x = summing(cases.distinct(stock()), comm, loss_fn=loss_fn), batches(1)[0]["x"]
        change(engine.model)
        if own_loop:
            engine.backward(loss_fn(engine.model, x), len(x))
        else:
            engine.step([x])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interceptor, "__torch_function__", noting)
        run(Mesh.parse(mesh), body, deadline=20)
    return seen


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.tanh()).square().sum()


def test_what_a_loss_draws_is_served_or_refused_beside_a_model_that_cannot_draw() -> None:
    before = torch.get_rng_state()
    functions_seen(lambda model, x: F.dropout(model(x), 0.5).sum())
    with pytest.raises(ValueError, match="the model calls the random operator 'randperm'"):
        functions_seen(lambda model, x: model(x)[torch.randperm(len(x))].sum())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("name", ["0", "1.0"])
@pytest.mark.parametrize("where", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_added_later_are_seen(where: str, name: str, own_loop: bool) -> None:
    def drawing(function: Any) -> Any:
        def change(model: nn.Module) -> None:
            getattr(model.get_submodule(name), where)(lambda module, *call: function(call[-1]))

        return change

    def noise(value: Any) -> Any:
        x = value if isinstance(value, Tensor) else value[0]
        return x[torch.randperm(len(x))]

    def dropped(value: Any) -> Any:
        return F.dropout(value if isinstance(value, Tensor) else value[0])

    before = torch.get_rng_state()
    assert "dropout" in functions_seen(squares, drawing(dropped), own_loop=own_loop)
    with pytest.raises(ValueError, match="random operator 'randperm'"):
        functions_seen(squares, drawing(noise), own_loop=own_loop)
    assert torch.equal(torch.get_rng_state(), before)


def test_which_models_draw_nothing_for_certain() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *call: None)
    assert all(map(silent, stock().modules()))
    for module in (nn.Dropout(), nn.RReLU(), nn.MultiheadAttention(2, 1), nn.LSTM(2, 2), Own(2, 2), hooked):
        assert not silent(module), type(module).__name__


# ---- recomputation in the middle of a forward ------------------------------------------------------------------------


def test_a_gradient_asked_for_inside_a_forward_draws_the_same_masks() -> None:
    """A block is recomputed while ``autograd.grad`` runs in the model: its first and second masks are the same."""

    kept: list[tuple[Tensor, Tensor]] = []

    def gradient(model: Any, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        y = model.blocks[0](leaf)
        (slope,) = torch.autograd.grad(y.sum(), leaf)
        kept.append((y.detach() != 0, slope != 0))
        return model.blocks[0].factor * (y.detach() + slope).sum()

    factor = nn.Parameter(torch.ones(1, dtype=torch.float64))
    dropping = cases.Made(lambda m, x: F.dropout(torch.exp(x) * 2, 0.5), factor=factor)

    def body(comm: Comm) -> None:
        model = cases.Made(gradient, blocks=nn.ModuleList([dropping]))
        summing(model, comm, recompute="full").step([batches(1)[0]["x"]])

    before = torch.get_rng_state()
    run(Mesh(), body, deadline=20)
    ((first, second),) = kept
    assert torch.equal(first, second) and not first.all() and first.any()
    assert torch.equal(torch.get_rng_state(), before)


# ---- what is around a call ------------------------------------------------------------------------------------------


@each_rank("shard=1")
def test_an_interrupted_step_leaves_no_mode_behind(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear

    def interrupted(*args: Any) -> Tensor:
        raise KeyboardInterrupt

    engine = summing(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), comm)
    monkeypatch.setattr(F, "linear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step([torch.ones(2, 4)])
    monkeypatch.setattr(F, "linear", linear)
    assert torch._C._len_torch_function_stack() == 0
    engine.model.eval()(torch.ones(2, 4))
    engine.model.train()
    engine.step([torch.ones(2, 4)])
    assert torch._C._len_torch_function_stack() == 0
    torch.rand(2)


def test_a_hook_on_all_modules_is_served_its_dropout() -> None:
    def losses(seed: int) -> float:
        def body(comm: Comm) -> float:
            torch.manual_seed(0)
            engine = summing(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), comm)
            torch.manual_seed(seed)
            return engine.step([torch.ones(2, 4)]).loss

        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: F.dropout(output, 0.5) if isinstance(module, nn.Linear) else None
        )
        try:
            (loss,) = run(Mesh(), body)
        finally:
            hook.remove()
        return loss

    assert losses(1) == losses(2)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("row", ["ddp", "zero3"])
@each_rank("shard=2")
def test_what_the_loop_draws_between_forwards_is_torchs_own(comm: Comm, row: str, own: bool) -> None:
    middle = nn.SyncBatchNorm(cases.WIDTH) if own else nn.Tanh()
    model = nn.Sequential(nn.Linear(cases.WIDTH, cases.WIDTH), middle, nn.Linear(cases.WIDTH, 3)).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    engine = engine_on(model, comm, strategy=row)
    for _ in range(4):
        engine.backward(model(torch.ones(4, cases.WIDTH, dtype=torch.float64)).sum(), 4)
        assert not torch._C._len_torch_function_stack()
        engine.optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, cases.WIDTH, dtype=torch.float64))
        assert not torch._C._len_torch_function_stack()


def test_a_class_that_exec_made_has_no_module_to_look_up() -> None:
    """Nor has its forward."""
    space: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n    __module__ = None\n    def forward(self, x): return x", space)
    model = nn.Sequential(nn.Linear(4, 4), space["Made"]())
    assert space["Made"].forward.__module__ is None
    assert not all_silent(model) and blocks_of(model, ["", "0", "1"]) == ["1"]
