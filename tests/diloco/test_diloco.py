"""Islands that come together: against averaging by hand, torchft's recorded numbers, and the formula of the bytes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from each_rank import each_rank
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import plait
from plait.diloco import DiLoCo, Island

MESH = "replica=2 shard=2"
STEPS = 4


torch.manual_seed(0)
FIRST = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_model() -> nn.Sequential:
    """The same values on all ranks, which are threads and share torch's generator."""
    return copy.deepcopy(FIRST)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().sum()


def batch_of(step: int, comm: plait.Comm) -> Tensor:
    seed = 100 * step + comm.data_rank
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def make_engine(comm: plait.Comm, strategy: str, **more: Any) -> plait.Engine:
    model = make_model()
    inner = AdamW(model.parameters(), lr=1e-2)
    functions: dict[str, Any] = {"loss_fn": loss_of, "count_fn": len}
    return plait.Engine(model, Island(comm), strategy=strategy, optimizer=inner, **functions, **more)


class ByHand:
    """Averages whole weights in the order of the islands; the outer optimizer has a whole copy on every rank."""

    def __init__(self, comm: plait.Comm, engine: plait.Engine, outer: Callable[..., Optimizer] | None) -> None:
        self.comm, self.engine = comm, engine
        self.last = {name: nn.Parameter(p) for name, p in engine.full_state_dict().items()}
        self.outer = outer([*self.last.values()]) if outer else None

    def meet(self) -> None:
        state = self.engine.full_state_dict()
        for name, own in state.items():
            both = torch.empty(2, own.numel())
            self.comm.all_gather(both, own.reshape(1, -1), ("replica",)).wait()
            mean = ((both[0] + both[1]) / 2).view(own.shape)
            self.last[name].grad = self.last[name].detach() - mean
            state[name] = mean
        if self.outer is not None:
            self.outer.step()
            state = {name: p.detach() for name, p in self.last.items()}
        self.engine.load_full_state_dict(state)


def by_hand(comm: plait.Comm, strategy: str, every: int, outer: Any, **more: Any) -> dict[str, Tensor]:
    engine = make_engine(comm, strategy, **more)
    hand = ByHand(comm, engine, outer)
    for step in range(STEPS):
        engine.step([batch_of(step, comm)])
        if step % every == every - 1:
            hand.meet()
    return engine.full_state_dict()


def by_diloco(comm: plait.Comm, strategy: str, every: int, outer: Any, **more: Any) -> dict[str, Tensor]:
    engine = make_engine(comm, strategy, **more)
    diloco = DiLoCo(engine, outer, every=every)
    met = []
    for step in range(STEPS):
        before = len(comm.ledger)
        engine.step([batch_of(step, comm)])
        assert not [e for e in comm.ledger.since(before) if "replica" in e.axes], "a step stays inside its island"
        before = len(comm.ledger)
        met.append(diloco.step())
        sent = sum(entry.sent for entry in comm.ledger.since(before) if "replica" in entry.axes)
        assert sent == (diloco.bytes_sent() if met[-1] else 0)
        if met[-1]:  # as in a run that goes on
            diloco = DiLoCo(engine, outer, every=every, state=diloco.outer.state_dict())
    assert met == [step % every == every - 1 for step in range(STEPS)]
    return engine.full_state_dict()


def test_a_fragment_of_which_some_ranks_have_nothing() -> None:
    def body(comm: plait.Comm) -> dict[str, Tensor]:
        engine = make_engine(comm, "zero3")
        diloco = DiLoCo(engine, partial(SGD, lr=1.0), every=1, names=("2.bias",))
        engine.step([batch_of(0, comm)])
        diloco.step()
        return engine.full_state_dict()

    islands = plait.run_threads(MESH, body)[::2]
    equal = {name: torch.equal(value, islands[1][name]) for name, value in islands[0].items()}
    assert equal == {"0.weight": False, "0.bias": False, "2.weight": False, "2.bias": True}


@each_rank(MESH)
def test_a_call_in_the_middle_of_a_step_is_refused_and_not_counted(comm: plait.Comm) -> None:
    model = make_model()
    inner = AdamW(model.parameters(), lr=1e-2)
    engine = plait.Engine(model, Island(comm), strategy="zero3", optimizer=inner)
    diloco = DiLoCo(engine, partial(SGD, lr=1.0), every=2)
    for met in (False, True, False, True):
        engine.backward(loss_of(model, batch_of(engine.steps, comm)), 4, "sum")
        with pytest.raises(ValueError, match=r"diloco\.step\(\) in the middle of a step"):
            diloco.step()
        inner.step()
        assert diloco.step() is met


ROWS = [("ddp", MESH), ("zero2", MESH), ("zero3", MESH), ("zero3", "replica=2"), ("zero3", "pipe=2 replica=2")]


@pytest.mark.parametrize(("strategy", "mesh"), ROWS)
def test_each_step_at_rate_1_is_averaging_to_the_bit(strategy: str, mesh: str) -> None:
    outer = partial(SGD, lr=1.0)
    wanted = plait.run_threads(mesh, lambda comm: by_hand(comm, strategy, 1, None))
    for rank, found in enumerate(plait.run_threads(mesh, lambda comm: by_diloco(comm, strategy, 1, outer))):
        assert all(torch.equal(found[name], wanted[0][name]) for name in found), rank
        assert len(found) == 4


@pytest.mark.parametrize(
    "outer", [partial(SGD, lr=0.7, momentum=0.9, nesterov=True), partial(AdamW, lr=0.1, weight_decay=0)]
)
def test_an_outer_optimizer_moves_the_weights_as_one_of_whole_copies_does(outer: Any) -> None:
    wanted = plait.run_threads(MESH, lambda comm: by_hand(comm, "zero3", 2, outer))[0]
    first = FIRST.state_dict()
    for found in plait.run_threads(MESH, lambda comm: by_diloco(comm, "zero3", 2, outer)):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
            assert (value - first[name]).abs().max() > 1e-3


@each_rank(MESH)
def test_the_bytes_are_those_of_one_sum_a_round(comm: plait.Comm) -> None:
    diloco = DiLoCo(make_engine(comm, "zero3"), partial(SGD, lr=1.0), every=8)
    elements = (54, 14)[comm.rank % 2]  # of 66 and padding, in each shard: half in the sum, half in the gather
    assert diloco.bytes_sent() == 4 * elements


GROWTH = 2.0
"""Each inner step of torchft's test takes this from a weight, by a gradient that is constant."""
RECORDED = {
    (0, 0.0): ([-1, -3, -11, -13, -15, -17, -19, -21, -35], [-1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47]),
    (0, 0.5): ([-1, -3, -8, -10, -12, -14, -16, -18, -24.5], [-1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32]),
    (0, 1.0): ([-1, -3, -5, -7, -9, -11, -13, -15, -17], [-1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23]),
    (1, 0.0): ([-1, -3, -7, -9, -11, -13, -15, -17, -27], [-1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39]),
    (1, 0.5): ([-1, -3, -6, -8, -10, -12, -14, -16, -21.5], [-1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29]),
    (1, 1.0): ([-1, -3, -5, -7, -9, -11, -13, -15, -17], [-1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23]),
}
"""torchft at 73dafea4, test_fixtures/...test_diloco_mocked_updates_0 to _5: two replicas, two layers of one weight that
begins with 1, inner rate 1, outer rate 2, six steps a round; layer 0 is three steps ahead.  By delay and kept share:
the weights of layer 0 after steps 1 to 9, and of layer 1 after steps 1 to 12."""


@pytest.mark.parametrize(("delay", "keep"), RECORDED)
def test_torchfts_recorded_numbers(delay: int, keep: float) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x + GROWTH * self.weight

    def body(comm: plait.Comm) -> tuple[list[float], ...]:
        model = nn.Sequential(Layer(), Layer())
        inner = SGD(model.parameters(), lr=1.0)
        engine = plait.Engine(
            model, Island(comm), strategy="ddp", optimizer=inner, loss_fn=lambda m, x: m(x).sum(), count_fn=len
        )
        more: dict[str, Any] = {"every": 6, "delay": delay, "keep": keep}
        parts = [DiLoCo(engine, partial(SGD, lr=2.0), names=("0",), first=3, **more)]
        parts.append(DiLoCo(engine, partial(SGD, lr=2.0), names=("1",), **more))
        found: tuple[list[float], ...] = ([], [])
        for _ in range(12):
            engine.step([torch.zeros(1, 1)])
            for part in parts:
                part.step()
            for weights, layer in zip(found, model, strict=True):
                weights.append(layer.get_parameter("weight").item())
        return found[0][:9], found[1]

    assert plait.run_threads("replica=2", body) == [RECORDED[delay, keep]] * 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"every": 0}, "every=0, first=0, delay=0, keep=0.0: give 0 <= delay < first <= every"),
        ({"every": 4, "delay": 4}, "give 0 <= delay < first <= every"),
        ({"every": 4, "names": ("9",)}, "no parameter of .'9',."),
        ({"every": 4, "made": 8}, "the engine has made steps: give state"),
        ({"every": 4, "outer": partial(AdamW, lr=0.1)}, "sees differences, not weights: give weight_decay=0"),
    ],
)
@each_rank("replica=2")
def test_a_mistake_is_one_error(comm: plait.Comm, more: dict[str, Any], says: str) -> None:
    engine = make_engine(comm, "zero3")
    given = {"outer": partial(SGD, lr=1.0), **more}
    engine.steps = given.pop("made", 0)
    with pytest.raises(ValueError, match=says):
        DiLoCo(engine, **given)


@each_rank(MESH)
def test_islands_begin_with_equal_weights_and_the_engine_is_on_one(comm: plait.Comm) -> None:
    model = make_model()
    with torch.no_grad():
        model.get_parameter("0.bias").add_(comm.mesh.coordinates(comm.rank)["replica"])
    engine = plait.Engine(model, Island(comm), strategy="zero3", optimizer=SGD(model.parameters(), lr=0.1))
    with pytest.raises(Exception, match="the islands' weights differ: build the model from one seed"):
        DiLoCo(engine, partial(SGD, lr=1.0), every=2)
    model = make_model()
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"build the engine on plait\.diloco\.Island"):
        DiLoCo(engine, partial(SGD, lr=1.0), every=2)
