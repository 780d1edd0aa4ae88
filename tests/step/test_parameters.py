"""Parameters and gradients that a program reads or writes: whole, kept, or refused by name; never NaN in silence."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from each_rank import each_world
from engine_cases import batches, count, loss_sum
from programs import COPIES, EVERY, SPLIT, WHOLE, World, assert_same, net, on_ranks, refused, step, update
from test_equal import Clamped, with_class, write
from torch import Tensor, nn

refuses = partial(pytest.raises, ValueError)

READS: list[Any] = [
    lambda m: sum(p.square().sum() for p in m.parameters()),
    lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
    lambda m: torch._foreach_norm(list(m.parameters())),
    lambda m: m.head.weight.data.norm(),
    lambda m: f"{m.scale:.3f}",
    lambda m: m.head.weight.tolist(),
    lambda m: m.head.weight.numpy(force=True),
    lambda m: m.head.weight.half(),
    lambda m: m.float(),
    lambda m: m.state_dict(),
    lambda m: torch.save(m, io.BytesIO()),
    lambda m: copy.deepcopy(m),
    lambda m: copy.deepcopy(m.head),
    lambda m: nn.init.zeros_(m.head.weight),
    lambda m: m.head.weight.data.fill_(1),
    lambda m: setattr(m.head.weight, "data", torch.zeros(3, 5).double()),
    lambda m: torch.nn.utils.vector_to_parameters(torch.zeros(1000).double(), m.parameters()),
    lambda m: m.load_state_dict(net().state_dict()),
]


@pytest.mark.parametrize("where", SPLIT)
@each_world()
def test_at_rest_nothing_is_read_or_written_in_silence(world: World) -> None:
    engine = world.engine(net())
    for _ in range(2):
        before = engine.full_state_dict()
        for read in READS:
            words = r"parameter '.*' is used by .* at rest(.|\n)*gathered"
            with pytest.raises((ValueError, RuntimeError), match=words):
                read(engine.model)
        assert_same(engine.full_state_dict(), before)
        step(engine, world.part(batches(1)[0]))


@each_world("zero3")
def test_at_rest_metadata_is_answered(world: World) -> None:
    engine = world.engine(net())
    weight = engine.model.head.weight
    assert isinstance(weight, nn.Parameter) and weight.shape == (3, 5) and weight.dtype == torch.float64
    assert weight.numel() == 15 and weight.device.type == "cpu" and weight.requires_grad and weight.is_leaf
    assert weight.grad is None and len(weight) == 3 and weight.type() == "torch.DoubleTensor"
    assert torch.zeros_like(weight).sum() == 0 and "head.weight" in repr(weight)
    assert sum(p.numel() for p in engine.model.parameters()) == engine.placed.num_parameters


@pytest.mark.parametrize("where", EVERY)
@each_world()
def test_a_state_dict_taken_inside_of_gathered_outlives_the_block(world: World) -> None:
    engine = world.engine(net())
    step(engine, world.part(batches(1)[0]))
    whole = engine.full_state_dict()
    with engine.gathered():
        state = engine.model.state_dict()
        norm = engine.model.head.weight.norm()
    assert_same(state, {name: value.to(state[name].dtype) for name, value in whole.items()})
    assert norm == state["head.weight"].norm()
    held = {name: value.clone() for name, value in state.items()}
    step(engine, world.part(batches(1)[0]))
    if world.where in SPLIT:  # they were left this memory
        assert_same(state, held)


@pytest.mark.parametrize("where", ["ddp", "zero3", "hpz"])
@each_world()
def test_what_gathered_refuses(world: World) -> None:
    engine = world.engine(net())
    head = engine.model.head
    with refuses(match=r"no parameter or module 'haed\.weight'; .*head\.weight"), engine.gathered("haed.weight"):
        pass
    with refuses(match=r"'head\.weight' was written to.*modify=True"), engine.gathered("head"), torch.no_grad():
        head.weight.mul_(2)
    with refuses(match=r"'head\.weight' was written to.*modify=True"), engine.gathered("head"):
        head.weight.data = torch.zeros(3, 5).double()
    engine.backward(loss_sum(engine.model, world.part(batches(1)[0])), 3)
    with refuses(match="in the middle of a step"), engine.gathered(modify=True):
        pass


def written_differently(world: World) -> None:
    engine = world.engine(net())
    with engine.gathered("head", modify=True):
        engine.model.head.bias.data += world.rank


@pytest.mark.parametrize("where", ["ddp", "zero3", "zero3@cpu"])
def test_ranks_that_write_different_values_are_refused(where: str) -> None:
    refused(r"written different values to 1 parameters \(head\.bias\)", written_differently, where)


@pytest.mark.parametrize("value", [torch.full((1,), 3.0).double(), torch.zeros(3).float()], ids=["shape", "dtype"])
@pytest.mark.parametrize("where", ["ddp", "zero3"])
@each_world()
def test_values_of_another_form_are_refused(world: World, value: Tensor) -> None:
    engine = world.engine(net())
    with refuses(match=r"p\.data of parameter 'head\.bias' was replaced by float"), engine.gathered(modify=True):
        engine.model.head.bias.data = value


@pytest.mark.parametrize("where", COPIES)
@each_world()
def test_the_optimizers_copy_of_what_nobody_wrote_keeps_its_bits(world: World) -> None:
    engine = world.engine(net())
    step(engine, world.part(batches(1)[0]))
    before = engine.full_state_dict()
    with engine.gathered(modify=True), torch.no_grad():
        engine.model.head.bias[0] = 2
    before["head.bias"][0] = 2
    assert_same(engine.full_state_dict(), before)


@pytest.mark.parametrize("where", WHOLE)
@each_world()
def test_a_driven_model_is_not_copied(world: World) -> None:
    engine = world.engine(net())
    for copied in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for one in (engine.model, engine):
            with refuses(match=r"cannot be copied or pickled.*full_state_dict"):
                copied(one)


@pytest.mark.parametrize("where", ["ddp", "zero3"])
def test_a_pretrained_model_is_saved_whole(where: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    template = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))

    def program(world: World) -> dict[str, Tensor]:
        engine = world.engine(template)
        state: dict[str, Tensor] = engine.full_state_dict()
        if where == "zero3":
            with refuses(match=r"at rest.*engine\.full_state_dict"):
                engine.model.save_pretrained(tmp_path / f"refused{world.rank}")
        with engine.gathered():
            engine.model.save_pretrained(tmp_path / f"gathered{world.rank}")
        engine.model.save_pretrained(tmp_path / f"given{world.rank}", state_dict=dict(state))
        return state

    for rank, state in enumerate(on_ranks(program, where)):
        for how in ("gathered", "given"):
            assert_same(load_file(tmp_path / f"{how}{rank}" / "model.safetensors"), state)


def written_between_steps(how: str, world: World) -> None:
    engine = world.engine(net())
    for batch in map(world.part, batches(2)):
        step(engine, batch)
        if how == "strides":
            engine.model.first.weight.data = engine.model.first.weight.data.t()
        elif how == "half":
            engine.model.half()
        elif how == "piece":
            engine.optimizers[0].param_groups[0]["params"][0].detach().mul_(2)
        else:
            write(engine.model, how)


@pytest.mark.parametrize("where", WHOLE)
@pytest.mark.parametrize("how", ["in place", "p.data replaced", "as one vector", "strides", "half", "loaded", "piece"])
def test_whole_parameters_that_are_replaced_or_copied(how: str, where: str) -> None:
    if where in COPIES or how not in ("in place", "loaded", "piece" if where in ("none", "ddp") else ""):
        words = r"(was written to (between two steps|after its step).*modify=True|was replaced: forwards)"
        refused(words, partial(written_between_steps, how), where)


def written_in_a_forward(how: str, world: World) -> None:
    engine = world.engine(with_class(type("Clamped", (Clamped,), {"how": how})))
    step(engine, world.part(batches(1)[0]))


@pytest.mark.parametrize("where", EVERY)
@pytest.mark.parametrize("how", ["in place", "p.data in place", "p.data replaced"])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_parameter_that_its_forward_writes(how: str, where: str, recompute: str | None) -> None:
    program = partial(written_in_a_forward, how)
    words = r"(up\.\w+' was written to|p\.data is replaced).*modify=True|was replaced: forwards"
    if where in SPLIT + COPIES or how == "p.data replaced":
        refused(words, program, where, recompute=recompute)


GRADIENTS: list[Any] = [
    lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
    lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0),
    lambda parameters: torch.nn.utils.get_total_norm([p.grad for p in parameters]),
    lambda parameters: [p.grad.norm() for p in parameters],
    lambda parameters: [p.grad.mul_(0.5) for p in parameters if p.grad is not None],
    lambda parameters: nn.ParameterList(parameters).zero_grad(set_to_none=False),
]


@pytest.mark.parametrize("where", EVERY)
@each_world()
def test_gradients_that_are_read_between_backward_and_step_are_refused(world: World) -> None:
    """The model's, and those of the pieces that the optimizer has; after a step these have theirs."""
    engine = world.engine(net())
    pieces = [p for group in engine.optimizers[0].param_groups for p in group["params"]]
    for batch in map(world.part, batches(2)):
        for _ in range(2):
            engine.backward(loss_sum(engine.model, batch), count(batch))
            for parameters in (list(engine.model.parameters()), pieces):
                for read in GRADIENTS:
                    with refuses(match=r"reads p\.grad.*engine\.reduce"):
                        read(parameters)
        update(engine)
        assert all(p.grad is None for p in engine.model.parameters())
        for read in GRADIENTS:
            read(pieces)


@pytest.mark.parametrize("where", EVERY)
@pytest.mark.parametrize("then", ["backward", "clip", "step"])
@pytest.mark.parametrize("how", ["cleared", "replaced", "cleared in a piece"])
def test_gradients_that_are_taken_away_are_refused(where: str, then: str, how: str) -> None:
    """``model.zero_grad()`` would not discard the engine's sums, nor would another gradient be used."""

    def program(world: World, taken: bool) -> Any:
        engine = world.engine(net())
        first, second = map(world.part, batches(2))
        if taken:
            engine.backward(loss_sum(engine.model, first), count(first))
            if how == "cleared":
                engine.model.zero_grad()
            elif how == "cleared in a piece":
                engine.optimizers[0].param_groups[0]["params"][0].grad = None
            else:
                engine.model.head.weight.grad = torch.zeros_like(engine.model.head.weight)
            with refuses(match=r"was cleared or replaced.*optimizer\.zero_grad"):
                if then == "backward":
                    engine.backward(loss_sum(engine.model, second), count(second))
                elif then == "clip":
                    engine.reduce(clip=1.0)
                else:
                    update(engine)
            engine.optimizers[0].zero_grad()
        step(engine, second)
        return engine.full_state_dict()

    assert_same(on_ranks(partial(program, taken=True), where), on_ranks(partial(program, taken=False), where))
