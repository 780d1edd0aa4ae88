"""Short programs on any mesh in any layout: the values and gradients of one process, or a refusal; never a message.

Refused programs are tried again under ``auto_redistribute``, where they must equal those of whole tensors.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cut_calls import Call, tried
from tensor_cases import MESHES, OPERATORS, Shapes, values
from torch import Tensor


def holds(shapes: Shapes, program: Callable[..., Any], seeds: range) -> None:
    """Tries the program in a layout for each seed, on the meshes in turn."""
    call, words = Call.of(program, [values(shape, k) for k, shape in enumerate(shapes)]), set()
    for seed in seeds:
        mesh = MESHES[seed % len(MESHES)]
        for auto in (False, True):
            cut, word, said = tried(call, mesh, seed, auto)
            assert word == "right" or (word == "refused" and not auto and " of [" in said), (
                f"{mesh}, seed {seed}: {said}"
            )
            words.add((word, cut))
    assert ("right", True) in words


@pytest.mark.parametrize("name", OPERATORS)
def test_a_program_in_many_layouts(name: str) -> None:
    holds(*OPERATORS[name], range(12))


STEPS: list[Callable[..., Tensor]] = [
    lambda x, w: x.relu(),
    lambda x, w: x + w,
    lambda x, w: x * w,
    lambda x, w: F.linear(x, w),
    lambda x, w: F.linear(x, w, w[0]),
    lambda x, w: x @ w.T + x,
    lambda x, w: F.layer_norm(x, (6,), w[1]),
    lambda x, w: x.softmax(-1) - w,
    lambda x, w: x.T.contiguous() * 0.5,
    lambda x, w: x - x.mean(0),
    lambda x, w: torch.cat([x[:, 3:], w[:, :3]], 1),
    lambda x, w: x.view(2, 3, 6).sum(1, keepdim=True).expand(2, 3, 6).flatten(0, 1),
]
"""x and w [6, 6] -> [6, 6]"""


@pytest.mark.parametrize("number", range(20))
def test_programs_of_several_operators(number: int) -> None:
    steps = random.Random(number).choices(STEPS, k=2 + number % 5)

    def program(x: Tensor, w: Tensor) -> Tensor:
        for step in steps:
            x = step(x, w)
        return x

    holds(((6, 6), (6, 6)), program, range(number, number + 6))
