"""An order from outside: proved, simulated, listed, and trained with."""

import pytest
from guide import run_section

from plait.run.commands.main import main
from plait.schedule.actions import format_schedule
from plait.schedule.check import check
from plait.schedule.orders import describe_orders, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE


@pytest.fixture
def eager() -> str:
    return run_section("An order")["eager"].__name__


def test_it_is_what_it_says(eager: str) -> None:
    assert format_schedule(write_order(eager, 3, 4)).splitlines() == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_it_is_proved_for_any_sizes_with_all_that_passes_add(eager: str, stages: int, microbatches: int) -> None:
    order = write_order(eager, stages, microbatches)
    assert check(order, in_order=True).owner == tuple(range(stages))
    check(add_messages(add_step(add_sharding(order, TABLE["zero3"]))))


def test_slow_messages_cost_it_less_than_1f1b(eager: str) -> None:
    costs = Costs(forward=1.0, input=1.0, weight=1.0, latency=0.5)
    spans = {name: simulate(write_order(name, 4, 16), costs).makespan for name in (eager, "1f1b")}
    assert spans[eager] < spans["1f1b"]


def test_help_texts_and_the_command_know_it(eager: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "eager: 1f1b that runs further ahead" in describe_orders()
    assert main(["schedule", "show", eager, "--stages", "3", "--microbatches", "4"]) == 0
    assert "rank 0 | F0 F1 F2 F3" in capsys.readouterr().out


def test_the_command_line_trains_by_it(eager: str) -> None:
    order = ["--schedule", eager, "--mesh", "pipe=3", "--microbatches", "4"]
    assert main(["verify", *order, "--model", "mlp", "--layers", "6", "--steps", "2"]) == 0
