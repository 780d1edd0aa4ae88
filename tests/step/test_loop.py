"""A program's own loop: ways to make a step, masks, the weights of means, leftovers."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from each_rank import each_world
from engine_cases import Made, adamw, batches, count, distinct, loss_sum
from programs import World, assert_same, net, on_ranks, refused, step
from test_together import critic
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, empty_parameters

ROWS = ["ddp", "zero1", "zero3"]


def stepped(way: str, world: World) -> Any:
    """Three steps; the update is made in one of the ways that there are."""
    engine = world.engine(net(), adamw if way in ("hooked", "reduced before") else None, clip=1e9)
    optimizer = engine.optimizer or adamw(engine.model.parameters() if way == "given later" else engine.parameters())
    if way in ("given later", "on pieces"):
        engine.use(optimizer)
    for batch in batches(3):
        for part in world.parts(batch, 2):
            engine.backward(loss_sum(engine.model, part), count(part))
        if way in ("by hand", "reduced before"):
            engine.reduce(clip=1e9)
        optimizer.step()
        if way == "by hand":
            engine.publish()
    assert engine.steps == 3
    return engine.full_state_dict(), None if way == "by hand" else engine.optimizer_state_dict()


@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("way", ["on pieces", "given later", "by hand", "reduced before"])
def test_every_way_to_make_a_step_has_the_same_bits(way: str, where: str) -> None:
    for found, wanted in zip(*(on_ranks(partial(stepped, one), where) for one in (way, "hooked")), strict=True):
        assert_same(found[0], wanted[0])
        if found[1]:
            assert_same(found[1], wanted[1])


def test_parameters_from_meta_are_the_same_objects_with_values() -> None:
    def body(comm: Comm, built: str) -> Any:
        with empty_parameters():
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
        calls: list[Tensor] = []
        model[0].weight.register_hook(calls.append)
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizer if built == "given" else None)
        if built != "given":
            engine.use(optimizer := optimizer if built == "before" else adamw(model.parameters()))
        engine.backward(model(torch.ones(2, 5)).sum(), 2)
        optimizer.step()
        assert len(calls) == 1
        return engine.full_state_dict()

    given, *used = (run("shard=2", partial(body, built=built)) for built in ("given", "before", "after"))
    assert_same(used, [given, given])


@pytest.mark.parametrize("where", ROWS)
@each_world()
def test_parameters_without_an_optimizer_stay_for_as_many_steps_as_there_are(world: World) -> None:
    """Sanitizers work in the first steps only, and leave no trace."""
    engine = world.engine(net(), lambda parameters: adamw(parameters[-2:]))
    for batch in batches(6):
        step(engine, world.part(batch))
    state = engine.full_state_dict()
    stay = [name for name, value in net().state_dict().items() if torch.equal(state[name], value)]
    assert stay == [name for name in state if not name.startswith("head")]


class Checkpointed(nn.Sequential):
    def forward(self, x_BC: Tensor) -> Any:
        return checkpoint(self[1], self[0](x_BC), use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("where", ["ddp", "zero3"])
def test_a_checkpoint_that_drops_has_one_forward_before_its_backward(where: str) -> None:
    def program(world: World, losses: int) -> None:
        engine = world.engine(distinct(Checkpointed(nn.Linear(5, 3).double(), nn.Dropout(0.3))))
        part = world.part(batches(1)[0])
        step(engine, part, part)
        if losses:
            engine.backward(sum([loss_sum(engine.model, part) for _ in range(2)][:losses]), count(part))

    on_ranks(partial(program, losses=0), where)
    for losses in (1, 2):
        refused("or in several forwards: .* Call engine.backward after", partial(program, losses=losses), where)


@pytest.mark.parametrize("where", ["ddp", "zero3"])
def test_zero_grad_between_a_forward_and_its_backward_changes_nothing(where: str) -> None:
    """Where most loops have it; the masks of the microbatches that follow are not those of the first."""
    template = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).double()

    def program(world: World, zero_grad: bool) -> Any:
        engine, outputs = world.engine(template), []
        for number in range(4):
            outputs.append(engine.model(torch.ones(2, 5, dtype=torch.float64)))
            if zero_grad and number % 2 == 0:
                engine.optimizers[0].zero_grad()
            engine.backward(outputs[-1].square().sum(), 2)
            if number % 2:
                engine.optimizers[0].step()
        assert not torch.equal(outputs[0], outputs[1])
        return [output.detach() for output in outputs], engine.full_state_dict()

    assert_same(*(on_ranks(partial(program, zero_grad=zeroed), where) for zeroed in (True, False)))


@pytest.mark.parametrize("where", ["ddp", "zero3"])
def test_a_model_that_is_called_without_a_tensor(where: str) -> None:
    """It has no samples to number: its masks belong to the microbatch, each rank's and each forward's its own."""
    log = nn.Parameter(torch.ones(6, dtype=torch.float64))
    temperature = Made(lambda m: F.dropout(m.log.exp(), 0.5), log=log)

    def program(world: World) -> Any:
        engine = world.engine(temperature, bucket=0)
        outputs = [engine.model() for _ in range(2)]
        for output in outputs:
            engine.backward(output.sum(), count=1)
        engine.optimizers[0].step()
        return [output.detach() for output in outputs], engine.full_state_dict()

    ranks, again = on_ranks(program, where), on_ranks(program, where)
    masks = {tuple((output != 0).tolist()) for outputs, _ in ranks for output in outputs}
    assert len(masks) == 2 * len(ranks) and not (ranks[0][1]["log"] == 1).all()
    assert_same(ranks, again)


@each_world("zero3")
def test_hooks_on_what_stays_do_not_pile_up(world: World) -> None:
    """An input of every step; no backward of a frozen model ends, so nothing tells that its forward is over."""
    engine, x = world.engine(critic().requires_grad_(False), None), torch.ones(2, 5).double().requires_grad_()
    for _ in range(50):
        engine.model(x).sum().backward()
    assert not x._backward_hooks


LABELS = torch.tensor([[[0, 1, -100, 2], [1, 0, 2, 2]], [[1, -100, -100, 0], [2, 1, 0, 1]]])
"""Sorted by microbatch, then by rank."""
LONG = torch.zeros(2, 1, 515, dtype=torch.int64)
LONG[0, 0, :1] = LONG[1, 0, :3] = -100
CLASSES = {"weight": torch.tensor([0.1, 2.0, 0.5])}


def kept(labels: Tensor) -> int:
    return int((labels != -100).sum())


@pytest.mark.parametrize(
    ("counted", "labels", "settings", "words"),
    [
        (kept, LABELS, {}, ""),
        (len, LABELS, {}, r"of 4 targets are ignored.*Count the targets that the loss counts"),
        (len, LABELS, CLASSES, r'classes have weights.*take reduction="sum"'),
        (len, LABELS[:1, :1], CLASSES, r"its weight is \S+, and its count 4"),
        (lambda labels: 1, LABELS, {}, ""),  # averages means
        (kept, LONG, {"dtype": torch.bfloat16}, ""),
        (len, LABELS, {"packed": True}, ""),  # in a checkpoint, it would be made anew for each look
    ],
)
def test_the_weight_of_a_mean_is_its_count(counted: Any, labels: Tensor, settings: dict[str, Any], words: str) -> None:
    """Two steps of some microbatches, dealt to as many ranks as there are labels for."""
    how = dict(settings)
    packed, dtype = how.pop("packed", False), how.pop("dtype", None)

    def loss_of(model: nn.Module, y: Tensor) -> Tensor:
        return F.cross_entropy(model(torch.ones(len(y), 4, dtype=dtype)), y, **how)

    template = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1)).to(dtype)

    def program(world: World) -> None:
        engine = world.engine(template)
        for _ in range(2):
            for y in labels[:, world.rank % labels.shape[1]]:
                model = engine.model
                loss = checkpoint(loss_of, model, y, use_reentrant=False) if packed else loss_of(model, y)
                engine.backward(loss, counted(y), "mean")
            engine.optimizers[0].step()

    where = "none" if labels.shape[1] == 1 else "ddp"
    refused(words, program, where) if words else on_ranks(program, where)
