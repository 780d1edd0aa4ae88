"""By the clock, every order is the whole model to the bit; the table is the picture, its shares the formulas."""

from __future__ import annotations

import copy

import pytest
import torch
from naive_cases import COUNT, LOSS, draw_masks, mlp, pairs, same, taken
from plait_lessons.naive.clock import Table, draw, idle_share, run, tabulate
from plait_lessons.naive.hand_off import cut
from plait_lessons.naive.microbatcher import accumulate, split
from torch import nn

from plait.schedule.actions import Action, Kind, Schedule, parse_schedule
from plait.schedule.check import check
from plait.schedule.orders import ORDERS, gpipe, interleaved, naive, one_f_one_b, one_stage, write_order, zb_h1
from plait.schedule.passes import add_messages, add_step, split_backward

SIZES = [(1, 1), (1, 3), (2, 1), (2, 8), (3, 2), (4, 5), (5, 3), (5, 8)]


# ---- the table --------------------------------------------------------------------------------------------


def test_the_picture_of_gpipe() -> None:
    assert draw(tabulate(gpipe(3, 4))).splitlines() == [
        "rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        "rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        "rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .",
    ]


def test_ranks_with_several_stages_name_them() -> None:
    assert draw(tabulate(interleaved(4, 2))).splitlines() == [
        "rank 0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1",
        "rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .",
    ]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_line_is_kept_and_every_need_is_met_in_an_earlier_tick(order: str, p: int, m: int) -> None:
    schedule = write_order(order, p, m)
    table = tabulate(schedule)
    columns = tuple(tuple(a for a in column if a is not None) for column in zip(*table, strict=True))
    assert columns == schedule
    tick = {(a.kind, a.stage, a.microbatch): t for t, row in enumerate(table) for a in row if a is not None}
    for (kind, s, k), t in tick.items():
        before = {
            Kind.FORWARD: [(Kind.FORWARD, s - 1, k)],
            Kind.WEIGHT: [(Kind.INPUT, s, k), (Kind.BACKWARD, s, k)],
        }.get(kind, [(Kind.FORWARD, s, k), (Kind.INPUT, s + 1, k), (Kind.BACKWARD, s + 1, k)])
        assert all(tick[b] < t for b in before if b in tick)
        line = columns[next(r for r, a in enumerate(table[t]) if a == Action(kind, s, k))]
        place = line.index(Action(kind, s, k))
        own = [tick[line[place - 1].kind, line[place - 1].stage, line[place - 1].microbatch]] if place else []
        assert t == max([*own, *(tick[b] for b in before if b in tick)], default=-1) + 1, "no tick earlier is possible"


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_idle_shares_are_the_formulas(p: int, m: int) -> None:
    for order in (gpipe, one_f_one_b):
        assert idle_share(tabulate(order(p, m))) == pytest.approx((p - 1) / (m + p - 1))
    assert idle_share(tabulate(naive(p, m))) == pytest.approx(1 - 1 / p)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (one_stage(2), "'0REDUCE' is no pass"),
        (add_step(gpipe(2, 1)), "'0REDUCE' is no pass"),
        (add_messages(gpipe(2, 1)), "'0RECV_B0' is no pass"),
        (parse_schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), "deadlock"),
        (parse_schedule("0F0 0B0\n1F0"), "1B0 is missing"),
    ],
)
def test_what_the_clock_cannot_place_is_refused(schedule: Schedule, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tabulate(schedule)


# ---- carried out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_the_whole_model_to_the_bit(order: str, p: int, m: int) -> None:
    model = mlp(5)
    microbatches = pairs(model, m)
    losses = accumulate(model, microbatches, LOSS, COUNT)
    expected = taken(model)
    schedule = write_order(order, p, m)
    result = run(tabulate(schedule), cut(model, p), microbatches, LOSS, COUNT)
    assert all(map(torch.equal, result.losses, losses)) and len(result.losses) == m
    assert same(taken(model), expected)
    assert result.peaks == check(schedule).peaks


@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zb_h2", "zbv"])
def test_with_dropout_too(order: str) -> None:
    template = mlp(5, dropout=0.4)
    microbatches = pairs(template, 4)
    whole, still = copy.deepcopy(template), mlp(5)
    draw_masks(whole, microbatches)
    losses = accumulate(whole, microbatches, LOSS, COUNT)
    assert not any(map(torch.equal, losses, accumulate(still, microbatches, LOSS, COUNT))), "something is dropped"
    parts = cut(template, 3)
    for part in parts:
        draw_masks(part, microbatches)
    result = run(tabulate(write_order(order, 3, 4)), parts, microbatches, LOSS, COUNT)
    assert all(map(torch.equal, result.losses, losses)) and same(taken(template), taken(whole))


def test_sixteen_stages_and_empty_microbatches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(16)))
    batch = (torch.randn(3, 3), {"y": torch.randn(3, 3), "mask": torch.ones(3)})
    microbatches = split(batch, 5)
    assert [len(x) for x, _ in microbatches] == [1, 1, 1, 0, 0]
    accumulate(model, microbatches, LOSS, COUNT)
    expected = taken(model)
    for schedule in (gpipe(16, 5), zb_h1(16, 5)):
        run(tabulate(schedule), cut(model, 16), microbatches, LOSS, COUNT)
        assert same(taken(model), expected)


def test_frozen_parts_and_parts_without_parameters() -> None:
    model = nn.Sequential(*mlp(3), nn.Tanh(), nn.Identity())
    model[0].requires_grad_(False)
    microbatches = pairs(mlp(3), 3)
    accumulate(model, microbatches, LOSS, COUNT)
    expected = taken(model)
    for schedule in (one_f_one_b(5, 3), split_backward(one_f_one_b(5, 3))):
        run(tabulate(schedule), cut(model, 5), microbatches, LOSS, COUNT)
        assert same(taken(model), expected)


def test_the_log_says_who_did_what_and_held_how_much() -> None:
    model = mlp(5)
    table = tabulate(gpipe(2, 3))
    log = run(table, cut(model, 2), pairs(model, 3), LOSS, COUNT).log
    assert tuple(tick.actions for tick in log) == table
    assert [tick.held for tick in log] == [(1, 0), (2, 1), (3, 2), (3, 3), (3, 3), (3, 2), (2, 1), (1, 0)]


def test_split_backwards_hold_the_activation_until_their_weight_part() -> None:
    model = mlp(5)
    schedule = parse_schedule("0F0 0F1 0I0 0I1 0W0 0W1")
    log = run(tabulate(schedule), [model], pairs(model, 2), LOSS, COUNT).log
    assert [tick.held for tick in log] == [(1,), (2,), (2,), (2,), (2,), (1,)]


def _table(text: str) -> Table:
    """A row of text per tick, a word per rank."""
    rows = (line.split() for line in text.splitlines())
    return tuple(tuple(None if w == "." else parse_schedule(w)[0][0] for w in row) for row in rows)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 1F0\n. 1B0\n0B0 .", "'1F0' in tick 0 comes too early: the activation of stage 0"),
        ("0F0 .\n. 1F0\n0B0 1B0", "'0B0' in tick 2 comes too early: the input's gradient of stage 1"),
        ("0F0 .\n. 1F0\n. 1B0", "0B0 is missing"),
        ("0F0\n0B0", "stage 1 of 2 is missing"),
        ("0F0 .\n0F1 1F0\n. 1F1\n. 1B0\n0B0 1B1\n0B1 .", "microbatch 1: there are 1"),
    ],
)
def test_a_table_by_hand_is_checked(text: str, words: str) -> None:
    model = mlp(2)
    with pytest.raises(ValueError, match=words):
        run(_table(text), cut(model, 2), pairs(model, 1), LOSS, COUNT)
    assert not taken(model)


def test_a_table_by_hand_that_waits_longer_is_as_right() -> None:
    model = mlp(2)
    accumulate(model, pairs(model, 1), LOSS, COUNT)
    expected = taken(model)
    run(_table("0F0 .\n. .\n. 1F0\n. 1B0\n. .\n0B0 ."), cut(model, 2), pairs(model, 1), LOSS, COUNT)
    assert same(taken(model), expected)
