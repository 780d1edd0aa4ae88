"""Plans that say too little or the wrong thing: refused in words, never a wrong number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.anymodel import ModelPlan

X = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)


class Between(nn.Module):
    """whole -> up -> something -> down."""

    def __init__(self, between: Callable[[Tensor], Tensor], closed: bool = True) -> None:
        super().__init__()
        self.whole, self.up = nn.Linear(6, 6), nn.Linear(6, 8)
        self.down = nn.Linear(8, 6) if closed else nn.Identity()
        self.scale = nn.Parameter(torch.full((), 0.7))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(self.whole(x))) * self.scale)


def norm(
    mesh: str,
    plan: dict[str, str],
    between: Callable[[Tensor], Tensor] = torch.tanh,
    closed: bool = True,
    loss: Callable[[Tensor], Tensor] = lambda y: y.square().sum(),
) -> float:
    """The gradient norm of two steps' last."""
    torch.manual_seed(0)
    template = Between(between, closed).double().state_dict()

    def body(comm: plait.Comm) -> float:
        model = Between(between, closed).double()
        model.load_state_dict(template)
        engine = plait.Engine(
            model,
            comm,
            strategy="ddp",
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=lambda model, x: loss(model(x)),
            count_fn=len,
            clip=float("inf"),
            tensor_plan=ModelPlan(plan),
        )
        for _ in range(2):
            engine.step([X])
        assert engine.last.grad_norm is not None
        return engine.last.grad_norm

    return plait.run_threads(mesh, body)[0]


PAIR = {"up": "column", "down": "row"}


@pytest.mark.parametrize(
    ("plan", "between", "says"),
    [
        (PAIR, lambda x: F.softmin(x, -1), "mixes 4 of the 8 features that 'up'"),
        (PAIR | {"": "hidden"}, lambda x: F.softmin(F.dropout(x, 0.5), -1), "mixes 4 of the 8 features that 'up'"),
        (PAIR, lambda x: (x @ x.mT).tanh() @ x, "adds up 4 of the 8 features that 'up'"),
        (PAIR, lambda x: F.glu(x).repeat(1, 2), "say 'column in 2' .* for 'up'"),
        ({"up": "column by 4", "down": "row"}, lambda x: x.reshape(7, 2, -1).flatten(1), r"makes \[7, 2, -1\] of 4"),
        ({"up": "column in 2", "down": "row"}, torch.tanh, r"leave 2\|2, the weight has 4"),
    ],
)
def test_the_first_forward_is_followed_under_every_spelling(
    plan: dict[str, str], between: Callable[[Tensor], Tensor], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        norm("tensor=2", plan, between)


def test_a_forward_is_followed_once_in_each_mode_and_no_longer_than_it_runs() -> None:
    template = Between(torch.tanh).double().state_dict()

    def body(comm: plait.Comm) -> list[int]:
        depths: list[int] = []

        def between(x: Tensor) -> Tensor:
            depths.append(torch._C._len_torch_dispatch_stack())
            return F.softmin(x, -1) if len(depths) == 1 else x

        model = Between(between).double()
        model.load_state_dict(template)
        plait.Engine(model, comm, strategy="ddp", tensor_plan=ModelPlan(PAIR | {"scale": "summed"}))
        with pytest.raises(ValueError, match="mixes"):
            model(X)
        depths.append(torch._C._len_torch_dispatch_stack())
        for training in (True, False, True, False):
            model.train(training)(X)
        return depths

    assert plait.run_threads("tensor=2", body) == [[1, 0, 0, 1, 0, 0]] * 2


def test_what_draws_or_works_on_each_head_goes_on() -> None:
    def between(x: Tensor) -> Tensor:
        heads = F.dropout(x, 0.5).reshape(len(x), -1, 2)
        return (heads * heads.softmax(-1)).flatten(1)

    plan = {"up": "column by 2", "down": "row by 2", "": "hidden", "scale": "summed"}
    assert norm("tensor=2", plan, between) == pytest.approx(norm("shard=1", {}, between), rel=1e-12)


class Stream(nn.Module):
    """A stream that sequence parallelism cuts, and something that is done to it ``before`` or after its block."""

    def __init__(self, between: Callable[[Tensor], Tensor], before: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 9)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.between, self.before = between, before

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.between(x) if self.before else x
        x = self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(x if self.before else self.between(x))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "between",
    [lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], lambda x: x - x.mean(1, keepdim=True), lambda x: x.cumsum(1)],
)
def test_what_works_along_time_is_refused_where_the_stream_is_cut_in_time(
    between: Callable[[Tensor], Tensor], before: bool
) -> None:
    plan = PAIR | {"embed": "vocabulary", "head": "vocabulary", "norm": "sequence"}

    def body(comm: plait.Comm, sequence: bool) -> None:
        with plait.empty_parameters():
            model = Stream(between, before)
        plait.Engine(model, comm, strategy="ddp", tensor_plan=ModelPlan(plan), sequence_parallel=sequence)
        for _ in range(2):
            model(torch.arange(8).view(2, 4))

    plait.run_threads("tensor=2", lambda comm: body(comm, sequence=False))
    with pytest.raises(ValueError, match=r"2 of the 4 steps of time that sequence .* say 'unsplit' for the module"):
        plait.run_threads("tensor=2", lambda comm: body(comm, sequence=True))


@pytest.mark.parametrize(("name", "style"), [("whole", "shared"), ("whole", "summed"), ("whole.bias", "summed")])
def test_a_sum_of_what_is_whole_already_is_refused(name: str, style: str) -> None:
    plan = PAIR | {"scale": "summed", name: style}
    with pytest.raises(
        ValueError, match=f"the gradient of '{name}.*' is the same on all 3 tensor ranks, and '{style}'"
    ):
        norm("tensor=3", plan)


def test_a_column_that_nothing_closes_gives_its_ranks_different_losses() -> None:
    with pytest.raises(ValueError, match="have different losses"):
        norm("tensor=2", {"up": "column", "scale": "summed"}, closed=False, loss=lambda y: y.square().flatten().sum())


def test_a_whole_linear_behind_a_column_is_told_to_be_a_row() -> None:
    with pytest.raises(ValueError, match="say 'row' for 'down'"):
        norm("tensor=2", {"up": "column"})


def test_a_row_without_its_column_says_what_it_wants() -> None:
    with pytest.raises(ValueError, match="reads 8 features where its weight on this rank has 4"):
        norm("tensor=2", {"down": "row"})


def test_a_parameter_may_be_summed_by_itself() -> None:
    """The pattern of a parameter means that parameter, not all that its module holds."""
    for mesh in ("tensor=2", "tensor=3"):
        assert norm(mesh, PAIR | {"scale": "summed"}) == pytest.approx(norm("shard=1", {}), rel=1e-12)


def test_a_parameter_that_should_be_summed_is_found() -> None:
    with pytest.raises(ValueError, match="'scale' differs between the tensor ranks"):
        norm("tensor=2", PAIR)


def test_cut_and_summed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shards 'up\.weight' twice"):
        norm("tensor=2", PAIR | {"up.weight": "summed"})


def test_a_second_backward_through_the_cut_loss_has_words_for_it() -> None:
    def body(comm: plait.Comm) -> None:
        logits = plait.ShardedTensor.from_full(X.clone().requires_grad_(), "rows classes/tensor", comm)
        loss = plait.cross_entropy_sum(logits, torch.zeros(7, dtype=torch.int64))
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(RuntimeError, match="a second time through cross_entropy_sum"):
        plait.run_threads("tensor=2", body)


def test_a_whole_tensor_of_the_same_shape_may_be_mixed() -> None:
    """Eight features of x, and eight of the sixteen that ``up`` left on each of two ranks: one shape, two meanings."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.norm(x) + self.down(torch.tanh(hidden))

    def body(comm: plait.Comm, plan: dict[str, str]) -> float:
        with plait.empty_parameters():
            model = Beside().double()
        engine = plait.Engine(
            model,
            comm,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            loss_fn=lambda m, x: m(x).square().sum(),
            count_fn=len,
            strategy="ddp",
            tensor_plan=ModelPlan(plan),
        )
        return engine.step([torch.linspace(0, 1, 24, dtype=torch.float64).view(3, 8)]).loss

    alone = plait.run_threads("shard=1", lambda comm: body(comm, {}))[0]
    for loss in plait.run_threads("tensor=2", lambda comm: body(comm, PAIR | {"norm": "whole"})):
        assert loss == pytest.approx(alone, rel=1e-12)
