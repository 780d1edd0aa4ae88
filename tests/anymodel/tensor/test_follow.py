"""Operators on activations of which a rank has a part: those that mix it are refused in every spelling."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.anymodel.tensor.follow import FollowCuts
from plait.anymodel.tensor.marks import STEPS, Cut, cut_of

Between = Callable[[Tensor], Tensor]


def after(between: Between, cut: Cut, dim: int = -1, where: str | None = "block") -> list[int]:
    """The dims that are cut in what ``between`` makes of [2, 5, 24]."""
    follow = FollowCuts(lambda: where)
    x = torch.rand(2, 5, 24).requires_grad_() * 1
    follow.mark(x, dim, cut)
    with follow:
        y = between(x)
    return [d for d, factors in enumerate(follow.dims(y)) if cut_of(factors) is not None]


PLAIN, HEADS = Cut("up", 48, (24,)), Cut("up", 48, (24,), grain=4)
PACKED, FUSED = Cut("up", 48, (12, 12)), Cut("up", 48, (16, 4, 4), grain=4)
TIME = Cut("embed", 10, (5,), unit=STEPS)


def heads(x: Tensor) -> Tensor:
    return x.view(2, 5, -1, 4).transpose(1, 2)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)


def written_out(x: Tensor) -> Tensor:
    scores = (heads(x) @ heads(x).mT / 2).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e9)
    y: Tensor = (scores.softmax(-1) @ heads(x)).transpose(1, 2).reshape(2, 5, -1)
    return y


MIXING: list[Between] = [
    lambda h: h / torch.linalg.vector_norm(h, dim=-1, keepdim=True),
    lambda h: h / torch.linalg.norm(h, dim=-1, keepdim=True),
    lambda h: h / h.norm(2, -1, True),
    lambda h: F.normalize(h, 2.0, -1),
    lambda h: F.group_norm(h.flatten(0, 1), 2),
    lambda h: F.instance_norm(h),
    lambda h: F.batch_norm(h, None, None, training=True),
    lambda h: F.rms_norm(h, (24,)),
    lambda h: F.softmin(h, -1),
    lambda h: torch.special.log_softmax(h, -1),
    lambda h: F.softmax(h[:, None], -1),
    lambda h: h - h.nansum(-1, True),
    lambda h: h - h.nanmean(-1, True),
    lambda h: h - torch.std_mean(h, -1, keepdim=True)[1],
    lambda h: h / torch.var_mean(h, -1, keepdim=True)[0],
    lambda h: h * h.prod(-1, keepdim=True),
    lambda h: h.cumprod(-1),
    lambda h: h.cumsum(-1),
    lambda h: h.cummax(-1).values,
    lambda h: h.sort(-1).values,
    lambda h: h.topk(2, -1).values,
    lambda h: h.median(-1).values,
    lambda h: h.quantile(0.5, dim=-1),
    lambda h: h.kthvalue(2).values,
    lambda h: h.argmax(-1),
    lambda h: h * (h > 0.5).any(-1, keepdim=True),
    lambda h: h - h.max(),
    lambda h: h - h.flatten().sum(),
    lambda h: h.flip(-1),
    lambda h: h.roll(1, -1),
    lambda h: h.diff(dim=-1),
    lambda h: F.pad(h, (1, 1)),
    lambda h: F.mse_loss(h, h * 2),
    lambda h: torch.einsum("btc,btc->bt", h, h),
    lambda h: h @ h.mT,
    lambda h: F.linear(h, torch.ones(3, 24)),
    lambda h: h.logsumexp(-1),
    lambda h: F.cosine_similarity(h, h * 2, -1),
    lambda h: torch.fft.rfft(h).real,
    lambda h: heads(h).mean(1),
    lambda h: heads(h).transpose(1, 2).softmax(2),
]


@pytest.mark.parametrize("number", range(len(MIXING)))
def test_what_mixes_features_is_refused(number: int) -> None:
    with pytest.raises(
        ValueError, match=r"in module 'block' .* of the (48 features|12 groups of 4 features) that 'up'"
    ):
        after(MIXING[number], HEADS)


@pytest.mark.parametrize(
    ("between", "left"),
    [
        (lambda h: torch.tanh(h) * h.sigmoid() + 1, [2]),
        (lambda h: F.gelu(h).mul_(2).clamp(min=0).to(torch.float64), [2]),
        (lambda h: torch.where(h > 0, h, 0.1 * h).masked_fill(h > 0.9, 0), [2]),
        (lambda h: h - h.mean(1, keepdim=True), [2]),
        (lambda h: h.cumsum(1).flip(1)[:, 1:], [2]),
        (lambda h: F.pad(h[:, :-1], (0, 0, 1, 0)), [2]),
        (lambda h: h.sum((0, 1)), [0]),
        (lambda h: F.layer_norm(heads(h), (4,)), [1]),
        (lambda h: heads(h).softmax(-1).sum(-1), [1]),
        (lambda h: torch.cat([-heads(h)[..., 2:], heads(h)[..., :2]], -1), [1]),
        (lambda h: heads(h)[:, :, None].expand(2, 6, 3, 5, 4).reshape(2, 18, 5, 4), [1]),
        (lambda h: torch.stack([h, h], 0).unbind(0)[1], [2]),
        (lambda h: h[None].squeeze(0).permute(2, 0, 1), [0]),
        (lambda h: torch.ones(3, 5) @ h, [2]),
        (lambda h: h.view(torch.int32).view(torch.float32), [2]),
        (lambda h: F.batch_norm(h.mT, torch.zeros(24), torch.ones(24)), [1]),
        (lambda h: F.batch_norm(h.mT, None, None, training=True), [1]),
        (lambda h: h * torch.arange(5)[:, None], [2]),
        (lambda h: F.scaled_dot_product_attention(heads(h), heads(h), heads(h), torch.zeros(5, 5)), [1]),
        (attention, [2]),
        (written_out, [2]),
    ],
)
def test_what_treats_features_or_heads_one_by_one_goes_on(between: Between, left: list[int]) -> None:
    assert after(between, HEADS) == left


def test_of_an_unknown_operator_nothing_is_known() -> None:
    assert after(lambda h: h[torch.tensor([1, 0])], PLAIN) == []
    assert after(lambda h: F.conv1d(h.mT, torch.ones(24, 1, 3), groups=24), PLAIN) == []


PARTS: list[Between] = [
    lambda h: h.chunk(2, -1)[0],
    lambda h: h.split(12, -1)[0],
    lambda h: F.glu(h),
    lambda h: h[..., :12],
    lambda h: h.view(2, 5, 2, -1).unbind(2)[0],
    lambda h: h.view(2, 5, 2, -1)[:, :, 0],
]


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_a_part_of_a_product_is_taken_only_if_the_plan_says_that_it_is_fused(number: int) -> None:
    assert after(PARTS[number], PACKED) == [2]
    with pytest.raises(ValueError, match="say 'column in 2'"):
        after(PARTS[number], PLAIN)


def test_a_part_that_is_no_part_of_a_fused_product_is_refused() -> None:
    for between in (lambda h: h[..., ::2], lambda h: h[..., :6], lambda h: h[..., 3]):
        with pytest.raises(ValueError, match="takes some of 24 of the 48 features"):
            after(between, PACKED)


def test_gradients_that_a_forward_takes_are_not_looked_at() -> None:
    def scaled(h: Tensor) -> Tensor:
        factor = torch.ones((), requires_grad=True)
        (share,) = torch.autograd.grad(h * factor, factor, torch.ones_like(h))
        return h * share

    assert after(scaled, PLAIN) == [2]


@pytest.mark.usefixtures("compiler_in_threads")
def test_operators_that_take_functions_run_as_ever() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants it compiled
        assert after(lambda h: flex_attention(heads(h).detach(), heads(h).detach(), heads(h).detach()), HEADS) == []


def test_fused_parts_of_several_sizes_are_taken_at_their_borders() -> None:
    assert after(lambda h: h.split([16, 4, 4], -1)[0].view(2, 5, -1, 4), FUSED) == [2]
    with pytest.raises(ValueError, match="'split_with_sizes' in module 'block' takes some of 24 of the 48"):
        after(lambda h: h.split([8, 8, 8], -1)[0], FUSED)


def test_a_size_that_would_swallow_the_cut_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"makes \[2, 5, 12, -1\] of 24 .* becomes 2, where heads of 4 .* \(..., -1, 4\)"
    ):
        after(lambda h: h.view(2, 5, 12, -1), HEADS)
    assert after(lambda h: h.view(2, 5, -1, 2), HEADS) == [2]  # pairs in each head
    assert after(lambda h: h.view(2, 5, h.size(-1) // 4, -1), HEADS) == [2]


def test_positions_that_a_rank_has_counted_from_0_do_not_meet_what_is_cut() -> None:
    slopes: Between = lambda h: 2.0 ** -torch.arange(1.0, heads(h).size(1) + 1)  # noqa: E731
    for between in (
        lambda h: h * torch.arange(24),
        lambda h: h + F.embedding(torch.arange(24), torch.ones(24, 1))[:, 0],
        lambda h: heads(h) * slopes(h)[:, None, None],
        lambda h: F.scaled_dot_product_attention(
            heads(h), heads(h), heads(h), slopes(h)[:, None, None] * torch.ones(5)
        ),
    ):
        with pytest.raises(ValueError, match="gives numbers to"):
            after(between, HEADS)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)),
        lambda x: F.pad(x, (0, 0, 1, 0)),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.cumsum(1),
        lambda x: x.flip(1),
        lambda x: x[:, -1],
        lambda x: x * (1 + torch.arange(x.size(1))[:, None]),
        lambda x: x - x.mean(),
        lambda x: x @ x.mT @ x,
    ],
)
def test_what_works_along_a_time_that_is_cut_is_refused(between: Between) -> None:
    with pytest.raises(ValueError, match=r"5 of the 10 steps of time .* say 'unsplit'"):
        after(between, TIME, dim=1)


def test_what_works_on_each_step_goes_on() -> None:
    def step_by_step(x: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (24,)), torch.ones(3, 24)).softmax(-1)

    assert after(step_by_step, TIME, dim=1) == [1]


def test_features_that_do_not_lie_alike_do_not_meet() -> None:
    follow, x, y = FollowCuts(lambda: "block"), torch.rand(2, 24), torch.rand(2, 24)
    follow.mark(x, -1, PLAIN)
    follow.mark(y, -1, PACKED)
    with pytest.raises(ValueError, match="brings together with others"), follow:
        x * y
    follow.check_meets(y, (12, 12), "down", "row in 2")
    with pytest.raises(ValueError, match=r"'down', 'row' in the tensor plan.* leave 12\|12, the weight has 24"):
        follow.check_meets(y, (24,), "down", "row")


def test_nothing_is_refused_where_the_plan_says_whole_nor_followed_in_plaits_own_code() -> None:
    after(lambda h: h.softmax(-1), PLAIN, where=None)
    follow, x = FollowCuts(lambda: "block"), torch.rand(2, 24)
    follow.mark(x, -1, PLAIN)
    with follow, follow.paused():
        y = x.softmax(-1)
    assert cut_of(follow.dims(y)[1]) is None
