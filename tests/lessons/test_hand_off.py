"""Parts by hand are the whole model to the bit; each wrong way loses what its name says."""

from __future__ import annotations

import copy

import pytest
import torch
from naive_cases import LOSS, batch, mlp, same, taken
from plait_lessons.naive import hand_off
from torch import Tensor, nn

from plait.run.models.mlp import MLP


def whole(model: MLP) -> tuple[Tensor, dict[str, Tensor]]:
    x, target = batch(model)
    loss = LOSS(model(x), target)
    loss.backward()
    return loss.detach(), taken(model)


def halves(model: nn.Sequential) -> tuple[nn.Sequential, nn.Sequential]:
    part1, part2 = hand_off.cut(model, 2)
    return part1, part2


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_two_parts_are_the_whole_to_the_bit(at: int) -> None:
    model = mlp(5)
    loss, expected = whole(model)
    part1, part2 = nn.Sequential(*list(model)[:at]), nn.Sequential(*list(model)[at:])
    found = hand_off.two_parts(part1, part2, *batch(model), LOSS)
    assert torch.equal(found, loss) and same(taken(model), expected)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 5])
def test_any_number_of_parts_is_the_whole_to_the_bit(num_parts: int) -> None:
    model = mlp(5)
    loss, expected = whole(model)
    found = hand_off.many_parts(hand_off.cut(model, num_parts), *batch(model), LOSS)
    assert torch.equal(found, loss) and same(taken(model), expected)


def test_a_few_steps_of_training_are_those_of_the_whole() -> None:
    models = [mlp(5), mlp(5)]
    parts = hand_off.cut(models[1], 3)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for _ in range(3):
        x, target = batch(models[0])
        for optimizer in optimizers:
            optimizer.zero_grad()
        LOSS(models[0](x), target).backward()
        hand_off.many_parts(parts, x, target, LOSS)
        for optimizer in optimizers:
            optimizer.step()
    assert same(models[1].state_dict(), models[0].state_dict()) and not same(
        mlp(5).state_dict(), models[0].state_dict()
    )


def test_gradients_are_added_and_reach_the_input() -> None:
    model = mlp(3)
    x, target = batch(model)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for _ in range(2):
        LOSS(model(inputs[0]), target).backward()
    expected = taken(model)
    for _ in range(2):
        hand_off.two_parts(*halves(model), inputs[1], target, LOSS)
    assert same(taken(model), expected)
    assert inputs[0].grad is not None and inputs[1].grad is not None and torch.equal(inputs[0].grad, inputs[1].grad)


def test_a_frozen_first_part_has_nothing_to_hand_back_to() -> None:
    model = mlp(4)
    model[0].requires_grad_(False)
    _, expected = whole(model)
    hand_off.many_parts(hand_off.cut(model, 4), *batch(model), LOSS)
    assert same(taken(model), expected) and not any(name.startswith("0.") for name in expected)


def test_parts_keep_modules_and_names() -> None:
    model = mlp(5)
    parts = hand_off.cut(model, 2)
    assert [next(iter(part.state_dict())) for part in parts] == ["0.linear.weight", "3.linear.weight"]
    assert [module for part in parts for module in part] == list(model)
    with pytest.raises(ValueError, match=r"6 stages, .* 5 links"):
        hand_off.cut(model, 6)


# ---- wrong ------------------------------------------------------------------------------------------------


def test_without_the_way_back_part_1_has_no_gradient() -> None:
    model = mlp(5)
    loss, expected = whole(model)
    found = hand_off.without_the_way_back(*halves(model), *batch(model), LOSS)
    gradients = taken(model)
    assert torch.equal(found, loss) and gradients.keys() == {name for name in expected if name[0] in "34"}
    assert all(torch.equal(gradients[name], expected[name]) for name in gradients)


def test_without_requires_grad_there_is_nothing_to_hand_back() -> None:
    model = mlp(5)
    _, expected = whole(model)
    with pytest.raises(RuntimeError, match="implicitly created only for scalar"):
        hand_off.without_requires_grad(*halves(model), *batch(model), LOSS)
    assert taken(model).keys() == {name for name in expected if name[0] in "34"}


def test_without_the_gradient_part_1_learns_something_else() -> None:
    model = mlp(5)
    _, expected = whole(model)
    hand_off.without_the_gradient(*halves(model), *batch(model), LOSS)
    gradients = taken(model)
    assert gradients.keys() == expected.keys()
    assert {name for name in expected if torch.equal(gradients[name], expected[name])} == {
        name for name in expected if name[0] in "34"
    }
    part1 = copy.deepcopy(halves(model)[0])
    part1(batch(model)[0]).sum().backward()
    assert same({n: g for n, g in gradients.items() if n[0] in "012"}, taken(part1)), "the gradient of y's sum"


def test_a_module_that_comes_twice_is_cut_as_two() -> None:
    act, x = nn.Tanh(), torch.linspace(-1, 1, 12).view(4, 3)
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 2))
    first, second = hand_off.cut(model, 2)
    assert (len(first), len(second)) == (3, 2) and torch.equal(second(first(x)), model(x))
