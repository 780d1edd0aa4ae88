"""Every number of every command has bounds; a number beyond them is refused before anything counts up to it."""

import math
from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch

from plait.checkpoint.files.reading import memory
from plait.run.commands.main import COMMANDS, kind_of
from plait.run.config.bounds import BOUNDS, LONGEST, check_values
from plait.run.config.check import validate
from plait.run.config.room import check_room
from plait.run.config.settings import TrainConfig, VerifyConfig
from plait.run.job.sections import flag_hints
from plait.schedule.actions import MOST_PASSES, parse_schedule
from plait.schedule.check import check


def numbers(kind: Any, seen: set[str]) -> set[str]:
    """The names of all settings that are numbers, those of subcommands among them."""
    for one in getattr(kind, "__args__", ()):
        numbers(one, seen)
    for name, hint in flag_hints(kind).items() if is_dataclass(kind) else ():
        seen |= {name} if {int, float} & {*getattr(hint, "__args__", (hint,))} else set()
    return seen


def test_every_number_has_bounds_and_every_bound_a_number() -> None:
    found: set[str] = set()
    for name in COMMANDS:
        numbers(kind_of(name), found)
    assert found == {*BOUNDS}


@pytest.mark.parametrize("name", sorted(set(BOUNDS) & {*flag_hints(TrainConfig)}))
def test_what_is_past_them_is_refused_with_the_number(name: str) -> None:
    least, most, above = BOUNDS[name]
    hint = str(flag_hints(TrainConfig)[name])
    past: list[Any] = [math.nan, -1e308, -math.inf] if "float" in hint else [-(2**63) - 1, 2**64, 10**400]
    past += [least] if above else []
    past += [math.inf, 1e308] if "float" in hint and most < 1e308 else []
    for value in past:
        with pytest.raises(ValueError, match=rf"{name} is .*: give a (whole )?number (from|above) ") as caught:
            validate(replace(TrainConfig(), **{name: value}))
        assert len(str(caught.value)) < 200
    check_values(replace(TrainConfig(), **{name: least if not above else 1.0}))


@pytest.mark.parametrize(
    "text", ["", "\x1b[31m", "a\nb", "a\tb", "a\u202eb", "\x9b", "x" * (LONGEST + 1), "a\0b", "\udcff"]
)
@pytest.mark.parametrize("name", ["mesh", "strategy", "model", "data", "out", "json", "resume", "split", "schedule"])
def test_texts_that_cannot_be_meant(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        validate(replace(TrainConfig(), **{name: text}))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_a_schedule_that_names_giant_numbers_is_not_counted_to() -> None:
    for text in (f"{10**15}F0 0B0", f"0F{10**15} 0B0"):
        with pytest.raises(ValueError, match=f"and a product of at most {MOST_PASSES:,}"):
            check(parse_schedule(text))


def test_as_many_threads_as_may_be_given_do_not_crash_torch() -> None:
    torch.set_num_threads(int(BOUNDS["threads"].most))
    assert float(torch.ones(300, 300).matmul(torch.ones(300, 300)).sum()) == 300.0**3  # the fixture takes them back


def test_numbers_within_are_taken() -> None:
    validate(VerifyConfig(deadline=1e6, seed=-5, clip=math.inf, threads=1024))


@pytest.mark.parametrize(
    "text", ["a\u00a0b", "\u3000", "Bildschirmfoto 14.02\u202fUhr", "\U0001f468\u200d\U0001f469", "ä b"]
)
def test_names_that_people_give_are_taken(text: str) -> None:
    check_values(TrainConfig(out=text))


def test_ranks_that_are_started_by_hand_are_not_all_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.run.config.room.memory", lambda processes=1: 600 << 20)
    config = TrainConfig(mesh="shard=64", strategy="ddp", batch=64, width=512, layers=8, heads=8)
    with pytest.raises(ValueError, match="64 ranks need at least"):
        check_room(config)
    monkeypatch.setenv("WORLD_SIZE", "64")
    check_room(config)


def test_a_limit_of_a_process_is_not_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1 << 20, 1 << 20))
    assert memory(3) - memory(1) == 2 << 20
