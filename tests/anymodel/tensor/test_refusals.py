"""Plans that omit a style or have a wrong one are refused with a reason, or named by ``plait verify``."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

Between = Callable[[Tensor], Tensor]
PAIR = {"up": "column", "down": "row"}
PLAN = PAIR | {"scale": "summed"}
DOWN, WHOLE_BIAS = (
    "the output of 'down', on all 2 ranks",
    "ranks of the gradient of 'whole.bias', on all 2 ranks: 2 times",
)


def job(plan: dict[str, str], between: Between, closed: bool = True) -> plait.UserJob:
    class Model(nn.Module):
        """whole -> up -> something -> down."""

        tensor_plan = plan

        def __init__(self) -> None:
            super().__init__()
            self.whole, self.up = nn.Linear(6, 6), nn.Linear(6, 8)
            self.down = nn.Linear(8, 6) if closed else nn.Identity()
            self.scale = nn.Parameter(torch.full((), 0.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(between(self.up(self.whole(x))) * self.scale)

    x = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)
    return plait.UserJob(Model, lambda model, x: model(x).square().flatten().sum(), [x])


def tell(job: plait.UserJob, **settings: Any) -> str:
    """The message that refuses a job, or the first wrong tensor of its verdict."""
    try:
        verdict = plait.verify(job, "tensor=2", "ddp", dtype="fp64", steps=2, **settings)
    except ValueError as error:
        return str(error)
    if verdict.word != "different":
        return verdict.word
    return next(line for line in str(verdict).splitlines() if "first wrong" in line)


def heads(x: Tensor) -> Tensor:
    y = F.dropout(x, 0.5).reshape(len(x), -1, 2)
    return (y * y.softmax(-1)).flatten(1)


@pytest.mark.parametrize(
    ("plan", "between"),
    [
        (PLAN, torch.tanh),
        (PLAN | {"up": "column in 2", "down": "row in 2"}, torch.tanh),
        (PLAN | {"up": "column by 2", "down": "row by 2", "": "hidden"}, heads),
    ],
)
def test_a_right_plan_is_the_run_of_one_process(plan: dict[str, str], between: Between) -> None:
    assert tell(job(plan, between)) == "equal"


@pytest.mark.parametrize(
    ("plan", "between", "says"),
    [
        (PLAN, lambda x: F.softmin(x, -1), DOWN),
        (PLAN, lambda x: (x @ x.mT).tanh() @ x, DOWN),
        (PLAN, lambda x: F.glu(x).repeat(1, 2), DOWN),
        (PLAN, lambda x: x * torch.arange(x.size(-1)), DOWN),
        (PLAN | {"up": "column by 4"}, lambda x: x.reshape(7, 2, -1).mean(1).repeat(1, 2), DOWN),
        (PLAN | {"up": "column in 2"}, torch.tanh, DOWN),
        (PLAN | {"whole": "shared"}, torch.tanh, "comes back to the output of 'whole', on all 2 ranks.*: 2 times"),
        (PLAN | {"whole": "summed"}, torch.tanh, WHOLE_BIAS),
        (PLAN | {"whole.bias": "summed"}, torch.tanh, WHOLE_BIAS),
        (PAIR, torch.tanh, "'scale' differs between the tensor ranks"),
        (PLAN | {"up.weight": "summed"}, torch.tanh, r"shards 'up\.weight' twice"),
        (PLAN | {"up": "whole"}, torch.tanh, "reads 8 features where its weight on this rank has 4"),
        (PLAN | {"down": "whole"}, torch.tanh, "fails where each of 2 tensor ranks has pieces"),
    ],
)
def test_a_wrong_plan_is_found(plan: dict[str, str], between: Between, says: str) -> None:
    assert re.search(says, told := tell(job(plan, between))), told


def test_a_column_that_nothing_closes_gives_its_ranks_different_losses() -> None:
    assert "have different losses" in tell(job({"up": "column", "scale": "summed"}, torch.tanh, closed=False))


class Stream(nn.Module):
    """A stream that sequence parallelism cuts, and something that is done to it."""

    tensor_plan = PAIR | {"embed": "vocabulary", "head": "vocabulary", "norm": "sequence"}
    between: Between

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 9)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = type(self).between(self.embed(tokens))
        return self.head(self.down(torch.tanh(self.up(self.norm(x)))))


@pytest.mark.parametrize(
    "mixing",
    [lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], lambda x: x - x.mean(1, keepdim=True), lambda x: x.cumsum(1)],
)
def test_what_works_along_a_time_that_is_cut_is_found(mixing: Between) -> None:
    model = type("Mixing", (Stream,), {"between": staticmethod(mixing)})
    tokens = torch.arange(24).view(4, 6) % 9
    mixes = plait.UserJob(model, lambda m, x: plait.cross_entropy_sum(m(x), x.roll(1, 1)), [tokens])
    assert tell(mixes) == "equal"
    assert "the output of 'norm'" in tell(mixes, sequence_parallel=True)


def test_a_plan_of_transformers_that_is_known_to_be_wrong_is_refused() -> None:
    class Gemma3nTextMLP(nn.Module):
        activation_sparsity = 0.0

    model: Any = nn.Sequential(Gemma3nTextMLP())
    model.tp_plan, model.get_input_embeddings, model.get_output_embeddings = {"x": "colwise"}, nn.Module, nn.Module
    assert plait.anymodel.plan_of(model) == {}
    model[0].activation_sparsity = 0.95
    with pytest.raises(ValueError, match="tensor plan is wrong for '0', a Gemma3nTextMLP, which takes the mean"):
        plait.anymodel.plan_of(model)
