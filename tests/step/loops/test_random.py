"""Random operators draw as the single process does, or are refused; a model without any needs no mode."""

import random
import threading
from collections.abc import Callable
from typing import Any

import engine_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_cases import adamw, batches, loss_sum
from programs import ALONE, STAGES
from streams import one_process, trained
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.forward.context import CurrentForward, RNGPosition
from plait.forward.dropout import DropoutRNG
from plait.forward.interceptor import Interceptor
from plait.referee.sanitize import process_state
from plait.step import Engine
from plait.table.mesh import Mesh
from plait.torch_private import len_torch_function_stack


def timm_drop_path(x: Tensor) -> Tensor:
    keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.7)
    return x * keep.div_(0.7)


def hf_drop_path(x: Tensor) -> Tensor:
    keep = 0.7 + torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
    return x.div(0.7) * keep.floor_()


def layerdrop(x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.5 else x * 3


RECIPES: dict[str, Callable[[Tensor], Tensor]] = {
    "timm drop_path": timm_drop_path,
    "hf drop_path": hf_drop_path,
    "layerdrop": layerdrop,
    "vae": lambda x: x + torch.randn_like(x) * 0.3,
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype) * 0.3,
    "rand sizes": lambda x: x + torch.rand(x.size(0), 1, dtype=x.dtype),
    "jitter": lambda x: x * torch.empty_like(x).uniform_(0.8, 1.2),
    "normal_": lambda x: x + torch.empty_like(x).normal_(1.0, 0.2),
    "masking": lambda x: x * (torch.rand_like(x) > 0.3),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)),
    "tensor bernoulli": lambda x: x * torch.full_like(x, 0.6).bernoulli(),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(2.0),
    "gumbel": lambda x: x * F.gumbel_softmax(x, tau=0.7),
    "router": lambda x: x * torch.rand(x.numel(), 3, dtype=x.dtype).mean(1).view_as(x),  # a draw for each token
    "dropout of tokens": lambda x: x + F.dropout(x.reshape(-1, 1).expand(-1, 3), 0.3).sum(1).view_as(x),
    "twice": lambda x: x + torch.rand_like(x) - torch.rand_like(x) + F.dropout(x, 0.2),
}


def recipe_of(draw: Callable[[Tensor], Tensor]) -> nn.Module:
    run = lambda m, x: x + (draw(m.linear(x)) if m.training else m.linear(x))  # noqa: E731
    return cases.Made(run, linear=nn.Linear(5, 5))


def model_of(draw: Callable[[Tensor], Tensor]) -> nn.Module:
    return cases.distinct(nn.Sequential(*(recipe_of(draw) for _ in range(4))))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("where", STAGES)
def test_every_recipe_is_the_single_process(where: str, recipe: str) -> None:
    template, data = model_of(RECIPES[recipe]), batches(3)
    wanted, state = one_process(template, data)
    for losses, found in trained(where, template, data):
        assert losses == pytest.approx(wanted, rel=1e-11)
        assert all(cases.close(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("recipe", ["vae", "jitter", "timm drop_path", "layerdrop"])
@pytest.mark.parametrize("where", ["ddp", "zero3"])
def test_what_is_recomputed_draws_the_same_again(where: str, recipe: str) -> None:
    template, data = model_of(RECIPES[recipe]), batches(3)
    wanted, _ = one_process(template, data)
    for losses, _ in trained(where, template, data, recompute="full"):
        assert losses == pytest.approx(wanted, rel=1e-11)


def dropping(m: Any, x: Tensor) -> Tensor:
    """Really leaves layers out, and with them the gathers of their units; the scale trains where no block runs."""
    for block in m.blocks:
        if torch.rand([]) > 0.5:
            x = block(x)
    return x * m.scale


@pytest.mark.parametrize("where", ALONE)
def test_all_ranks_leave_the_same_layers_out(where: str) -> None:
    parts = {"blocks": nn.ModuleList(cases.Block() for _ in range(4)), "scale": nn.Parameter(torch.ones(()))}
    template, data = cases.distinct(cases.Made(dropping, **parts)), batches(6)
    losses, state = one_process(template, data)
    for found, whole in trained(where, template, data):
        assert found == pytest.approx(losses, rel=1e-11)
        assert all(cases.close(whole[name], value) for name, value in state.items())


@pytest.mark.parametrize("recipe", ["vae", "jitter", "masking", "exponential", "normal_"])
def test_the_numbers_have_their_distribution(recipe: str) -> None:
    model, current = nn.Sequential(recipe_of(RECIPES[recipe])).double(), CurrentForward()
    with torch.no_grad():
        model[0].linear.weight.zero_()
        model[0].linear.bias.fill_(1.0)
    Interceptor(current, [DropoutRNG(0, current)]).follow(model)
    current.begin(RNGPosition(0, 0, 0, 20000))
    drawn = model(torch.zeros(20000, 5, dtype=torch.float64)).detach()
    mean, std = {
        "vae": (1.0, 0.3),
        "jitter": (1.0, 0.4 / 12**0.5),
        "masking": (0.7, (0.7 * 0.3) ** 0.5),
        "exponential": (0.5, 0.5),
        "normal_": (2.0, 0.2),
    }[recipe]
    assert drawn.mean().item() == pytest.approx(mean, abs=5 * std / 1e5**0.5)
    assert drawn.std().item() == pytest.approx(std, rel=0.02)
    assert abs(torch.corrcoef(drawn.T)[0, 1].item()) < 0.03 and drawn.unique().numel() > (
        1 if recipe == "masking" else 9e4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    seen: list[Tensor] = []
    model, current = nn.Sequential(recipe_of(lambda x: seen.append(torch.rand_like(x)) or x)), CurrentForward()
    Interceptor(current, [DropoutRNG(0, current)]).follow(model)
    current.begin(RNGPosition(0, 0, 0, 4000))
    model.to(dtype)(torch.zeros(4000, 5, dtype=dtype))
    assert seen[0].dtype == dtype and seen[0].min() >= 0 and seen[0].max() < 1


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "pairs": (lambda x: x + torch.rand(2 * x.numel(), dtype=x.dtype)[::2].view_as(x), r"draws rand of shape \(\d+,\)"),
    "batch": (lambda x: x * torch.rand(1, 1, dtype=x.dtype), r"of shape \(1, 1\), which belongs neither"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("where", ["ddp", "zero3", "pipe"])
def test_what_belongs_to_nothing_is_refused(where: str, kind: str) -> None:
    draw, text = REFUSED[kind]
    with pytest.raises(ValueError, match=text):
        trained(where, model_of(draw), batches(1))


def test_noise_on_a_parameter_is_refused() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight + torch.randn_like(self.weight))

    with pytest.raises(ValueError, match="randn_like of a parameter's shape"):
        trained("ddp", cases.distinct(Noisy(5, 3)), batches(1))


# ---- the generators of Python and numpy --------------------------------------------------------------------------


HOST: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda x: x * np.random.rand(),
    "random": lambda x: x * (1 + random.random()),
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides other threads: pytest's workers have some, and ranks may be threads."""
    monkeypatch.setattr(process_state, "_others", list)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("where", ["none", "zero3", "pipe"])
def test_the_process_generators_are_refused(where: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"the model draws from the generator of {name} in a training forward"):
        trained(where, model_of(HOST[name]), batches(1))


def in_own_loop(draw: Callable[[Tensor], Tensor], between: Callable[[], object] = float) -> None:
    def body(comm: Comm) -> None:
        model = model_of(draw)
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy="zero1", optimizer=optimizer)
        loss = loss_sum(model, batches(1)[0])
        between()
        engine.backward(loss, 3)
        optimizer.step()

    run(Mesh(shard=1), body)


@pytest.mark.usefixtures("alone")
def test_in_a_loop_of_ones_own_too() -> None:
    with pytest.raises(ValueError, match="the model draws from the generator of random"):
        in_own_loop(HOST["random"])


@pytest.mark.usefixtures("alone")
def test_it_is_noticed_when_it_begins_later() -> None:
    state = {"calls": 0}

    def late(x: Tensor) -> Tensor:
        state["calls"] += 1
        return x * random.random() if state["calls"] > 2 else x

    with pytest.raises(ValueError, match=r"from the generator of random"):
        trained("none", model_of(late), batches(12), microbatches=1)


@pytest.mark.usefixtures("alone")
def test_what_a_loop_draws_after_its_forward_is_nobody_elses_business() -> None:
    in_own_loop(RECIPES["vae"], between=lambda: (np.random.rand(3), random.random()))


def test_nothing_is_said_where_another_thread_may_have_drawn() -> None:
    stop = threading.Event()

    def loader() -> None:
        while not stop.is_set():
            np.random.rand(3), random.random()

    thread = threading.Thread(target=loader)
    thread.start()
    try:
        assert len(trained("none", model_of(RECIPES["vae"]), batches(3))) == 1
    finally:
        stop.set()
        thread.join()


def test_generators_are_left_as_they_were() -> None:
    random.seed(3)
    before = random.getstate(), np.random.get_state()[1].copy()
    trained("none", model_of(RECIPES["vae"]), batches(2))
    assert random.getstate() == before[0] and np.array_equal(np.random.get_state()[1], before[1])


class Masked(nn.Module):
    """Shows the masks that it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.masks = nn.Linear(4, 4), nn.Dropout(0.5), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.masks = self.dropout(torch.ones(len(x), 64)).bool()
        return self.linear(x)


@pytest.mark.parametrize("grad", [True, False])
def test_samples_have_masks_of_their_own_whatever_number_each_rank_brings(grad: bool) -> None:
    def masks(*sizes: int) -> Tensor:
        def body(comm: Comm) -> Tensor:
            model = Masked()
            cases.distinct(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            engine = Engine(model, comm, strategy="ddp", optimizer=optimizer)
            x = torch.ones(sizes[comm.rank], 4, dtype=torch.float64)
            with torch.set_grad_enabled(grad):
                loss = model(x).square().sum()
            if grad:
                engine.backward(loss, len(x))
                optimizer.step()
            return model.masks

        return torch.cat(run(Mesh(shard=len(sizes)), body, deadline=20))

    for sizes in ((12, 4), (6, 5, 5), (2, 1, 1, 1)):
        found = masks(*sizes)
        assert len({tuple(row.tolist()) for row in found}) == sum(sizes), sizes
    assert torch.equal(masks(5, 5, 5), masks(15)), "where all bring equally many, no cut changes a mask"


RECOMPUTED: tuple[str, dict[str, Any]] = "ddp", {"recompute": "full"}


class Late(nn.Module):
    """Drops once ``drop`` is above 0: in a layer whose p changes, in a function, or in one that is called only then."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.layer, self.kind, self.drop = nn.Linear(5, 5), nn.Dropout(0.0), kind, 0.0
        self.seen: set[int] = set()
        """The numbers of function modes that were on in the step's forwards."""
        if kind == "hooked":
            self.layer.register_forward_hook(lambda layer, args, out: F.dropout(out, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len_torch_function_stack())
        x = self.layer(self.linear(x))
        if self.kind == "function" or (self.kind == "sudden" and self.drop):
            x = F.dropout(x, self.drop)
        return x


def late(kind: str) -> nn.Module:
    return cases.distinct(nn.Sequential(*(Late(kind) for _ in range(4))))


def drops_from_4(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, Late):
            module.drop = 0.4 if step >= 4 else 0.0
            if module.kind == "layer":
                module.layer.p = module.drop


@pytest.mark.parametrize("kind", ["layer", "function"])
@pytest.mark.parametrize("where", [*STAGES, "recomputed"])
def test_dropout_that_begins_late_is_the_single_process(where: str, kind: str) -> None:
    template, data = late(kind), batches(6)
    wanted, state = one_process(template, data, drops_from_4)
    assert one_process(template, data)[0] != wanted, "it drops"
    row, settings = RECOMPUTED if where == "recomputed" else (where, {})
    for losses, found in trained(row, template, data, before=drops_from_4, **settings):
        assert losses == pytest.approx(wanted, rel=1e-11)
        assert all(cases.close(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("where", ["ddp", "pipe", "zero3", "recomputed"])
@pytest.mark.parametrize("kind", ["layer", "function", "hooked"])
def test_a_model_that_draws_nothing_runs_without_a_mode(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.forward.interceptor.EVERY", 5)
    steps: dict[int, list[tuple[set[int], bool]]] = {}
    enter, followed = Interceptor._enter_module, set[int]()

    def entered(self: Interceptor, name: str, **how: Any) -> None:
        followed.add(threading.get_ident())
        enter(self, name, **how)

    monkeypatch.setattr(Interceptor, "_enter_module", entered)

    def note(model: nn.Module, step: int) -> None:
        """Notes the modes of the step before, and whether it followed modules."""
        parts, thread = [module for module in model.modules() if isinstance(module, Late)], threading.get_ident()
        steps.setdefault(thread, []).append((set().union(*(part.seen for part in parts)), thread in followed))
        followed.discard(thread)
        for part in parts:
            part.seen.clear()

    row, settings = RECOMPUTED if where == "recomputed" else (where, {})
    trained(row, late(kind), batches(7), before=note, **settings)
    on = int(kind != "layer" or where == "zero3")  # where the mode looks at who reads parameters at rest
    assert len(steps) > 1
    for seen in steps.values():
        assert seen[1:] == [({mode}, mode > 0) for mode in (1, 1, 1, on, on, 1)]


def test_draws_that_begin_late_are_refused_when_plait_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.forward.interceptor.EVERY", 6)
    with pytest.raises(ValueError, match=r"module '0' draws random numbers now, and nothing did in the first 3 steps"):
        trained("ddp", late("sudden"), batches(8), before=drops_from_4)
