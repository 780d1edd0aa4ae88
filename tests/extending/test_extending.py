"""Additions from outside, as in the guide's page on extending: rows, orders, worlds, rules, families, optimizers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comm_checks
import engine_cases as cases
import pytest
import torch
from board import Board, BoardComm
from each_rank import each_rank
from engine_cases import Made
from guide import code_of, run_section
from torch import Tensor, nn

import plait
from plait.comm import Comm, run
from plait.predict.tensor import predict_tensor
from plait.run.commands.main import main
from plait.run.config.file import from_toml
from plait.run.config.settings import TrainConfig
from plait.schedule.actions import format_schedule
from plait.schedule.check import check
from plait.schedule.orders import describe_orders, write_order
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, simulate
from plait.sharded.rules import RULES
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh


def test_a_row_as_text_is_bitwise_the_run_of_one_process() -> None:
    mine = run_section("A strategy")["mine"]
    assert mine.name not in TABLE
    mesh = ["--mesh", "replica=2 shard=2", "--microbatches", "3", "--steps", "2"]
    assert main(["verify", "--strategy", str(mine), "--model", "mlp", "--layers", "4", *mesh]) == 0


@pytest.fixture
def eager() -> str:
    return run_section("An order")["eager"].__name__


def test_an_order_is_what_it_says(eager: str) -> None:
    assert format_schedule(write_order(eager, 3, 4)).splitlines() == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_an_order_is_proved_for_any_sizes_with_all_that_passes_add(eager: str, stages: int, microbatches: int) -> None:
    order = write_order(eager, stages, microbatches)
    assert check(order, in_order=True).owner == tuple(range(stages))
    check(add_messages(add_step(add_sharding(order, TABLE["zero3"]))))


def test_slow_messages_cost_an_order_less_than_1f1b(eager: str) -> None:
    costs = Costs(forward=1.0, input=1.0, weight=1.0, latency=0.5)
    spans = {name: simulate(write_order(name, 4, 16), costs).makespan for name in (eager, "1f1b")}
    assert spans[eager] < spans["1f1b"]


def test_help_texts_and_the_command_know_an_order(eager: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "eager: 1f1b that runs further ahead" in describe_orders()
    assert main(["schedule", "show", eager, "--stages", "3", "--microbatches", "4"]) == 0
    assert "rank 0 | F0 F1 F2 F3" in capsys.readouterr().out


def test_the_command_line_trains_by_an_order(eager: str) -> None:
    order = ["--schedule", eager, "--mesh", "pipe=3", "--microbatches", "4"]
    assert main(["verify", *order, "--model", "mlp", "--layers", "6", "--steps", "2"]) == 0


def on_board(mesh: str, body: Callable[[Comm], Any]) -> list[Any]:
    """One thread per rank; each has a comm of the board."""
    board = Board(Mesh.parse(mesh))
    return run(board.mesh, lambda comm: body(BoardComm(board, comm.rank)), deadline=20)


@pytest.mark.parametrize("mesh", ["shard=3", "shard=2 replica=2"])
@pytest.mark.parametrize("check", comm_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_a_world_does_what_every_world_does(mesh: str, check: Callable[[Comm], None]) -> None:
    on_board(mesh, check)


@pytest.mark.parametrize("row", ["zero3", "hsdp"])
def test_a_step_of_the_engine_has_the_bits_of_the_thread_world(row: str) -> None:
    batch = cases.batches(steps=1)[0]

    def trained(comm: Comm) -> dict[str, torch.Tensor]:
        model = cases.net()
        optimizer = cases.adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=cases.loss_sum, count_fn=cases.count)
        engine.step(cases.deal(batch, comm.mesh, comm.rank, 2))
        return engine.full_state_dict()

    mesh = "replica=2 shard=2"
    for mine, theirs in zip(on_board(mesh, trained), run(Mesh.parse(mesh), trained), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


WHOLE = torch.arange(15.0).view(5, 3)


@each_rank("tensor=2")
def test_before_a_rule_the_operator_is_refused(comm: Comm) -> None:
    assert torch.histc not in RULES
    x = plait.ShardedTensor.from_full(WHOLE, "rows/tensor cols", comm)
    with pytest.raises(plait.LayoutError, match=r"histc has no rule"):
        torch.histc(x, 4, 0, 14)


@pytest.fixture
def rule() -> None:
    run_section("A rule of an operator")


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("layout", ["rows cols", "rows/tensor cols", "rows cols/tensor"])
@each_rank("tensor=2")
def test_the_shares_of_a_rule_add_up_to_the_counts_of_the_whole(comm: Comm, layout: str) -> None:
    y = torch.histc(plait.ShardedTensor.from_full(WHOLE, layout, comm), 4, 0, 14)
    assert not comm.ledger.entries
    assert torch.equal(y.full(), torch.histc(WHOLE, 4, 0, 14))


@pytest.mark.usefixtures("rule")
@each_rank("tensor=2")
def test_a_rule_of_a_pending_sum_is_refused_with_the_way_out(comm: Comm) -> None:
    x = plait.ShardedTensor.from_full(WHOLE, "rows cols, pending(tensor)", comm)
    with pytest.raises(plait.LayoutError, match="only a linear operator may act on a sum"):
        torch.histc(x, 4, 0, 14)
    with plait.auto_redistribute():
        assert torch.equal(torch.histc(x, 4, 0, 14).full(), torch.histc(WHOLE, 4, 0, 14))


PLAN = {"up": "column", "mid": "mixed", "down": "row"}


def net() -> nn.Module:
    run = lambda m, x_BC: m.down(torch.tanh(m.mid(torch.tanh(m.up(m.first(x_BC))))))  # noqa: E731
    last = {"mid": nn.Linear(8, 12, bias=False), "down": nn.Linear(12, 6)}
    return Made(run, first=nn.Linear(6, 6), up=nn.Linear(6, 8), **last)


def train(comm: Comm, row: str, plan: dict[str, str] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of three steps in fp64; the messages of the first are those that are predicted."""
    with plait.empty_parameters():
        model = net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plait.Engine(model, comm, strategy=row, optimizer=optimizer, tensor_plan=plan)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    losses, mark = [], len(comm.ledger)
    for step in range(3):
        engine.backward((model(x) - x).square().sum(), count=4)
        optimizer.step()
        losses.append(engine.last.loss)
        if not step and comm.mesh.tensor > 1:
            sent = [e for e in comm.ledger.since(mark) if e.note.unit == "mid" and e.axes == ("tensor",)]
            sites = [site for site in next(iter(engine.placed.stages.values())).parallel.sites if site.name == "mid"]
            predicted = predict_tensor(sites, [(4,)], comm.mesh, 8, sequence=False)
            shown = [sorted((e.kind, e.bytes, e.note.phase) for e in entries) for entries in (sent, predicted)]
            assert shown[0] == shown[1] and len(sent) == 2
    return losses, engine.full_state_dict()


@pytest.mark.parametrize(("mesh", "row"), [("tensor=2", "ddp"), ("shard=2 tensor=2", "zero3"), ("tensor=4", "ddp")])
def test_training_with_a_style_is_that_of_one_process(mesh: str, row: str) -> None:
    run_section("A style of tensor parallelism")
    truth, whole = plait.run_threads("shard=1", lambda comm: train(comm, "ddp", None))[0]
    for losses, state in plait.run_threads(mesh, lambda comm: train(comm, row, PLAN)):
        assert losses == pytest.approx(truth, rel=1e-12) and truth[2] < truth[0]
        for name, tensor in whole.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-14)


def test_before_a_style_is_added_it_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown style 'mixed'"):
        plait.run_threads("tensor=2", lambda comm: train(comm, "ddp", PLAN))


LAYOUTS = {
    "data": ["--mesh", "replica=2 shard=2", "--strategy", "hsdp", "--microbatches", "2"],
    "pipe": ["--mesh", "pipe=2 shard=2", "--strategy", "zero3", "--schedule", "zb_h1", "--microbatches", "3"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_family_is_bitwise_the_run_of_one_process(layout: str) -> None:
    run_section("A model family")
    sizes = ["--model", "bigram", "--width", "16", "--layers", "2", "--steps", "2"]
    assert main(["verify", *sizes, *LAYOUTS[layout]]) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_is_bitwise_the_run_of_one_process(layout: str) -> None:
    run_section("An optimizer")
    assert main(["verify", "--optimizer", "rmsprop", "--model", "mlp", "--layers", "4", *LAYOUTS[layout]]) == 0


def test_a_family_trains_and_its_run_can_be_repeated(tmp_path: Path) -> None:
    run_section("A model family")
    run_section("An optimizer")
    rows = ["--model", "bigram", "--optimizer", "rmsprop", "--width", "16", "--steps", "2", "--length", "16"]
    first, second = tmp_path / "first", tmp_path / "second"
    machine = ["--mesh", "shard=2", "--world", "thread"]
    assert main(["train", *rows, *machine, "--verify", "--out", str(first)]) == 0
    assert main(["train", "--config", str(first / "config.toml"), "--out", str(second)]) == 0
    assert (first / "metrics.jsonl").exists() and (second / "metrics.jsonl").exists()


ROWS = ["--model", "bigram", "--optimizer", "rmsprop", "--width", "16", "--steps", "1", "--mesh", "shard=2"]


def plugin_of(folder: Path, *last: str) -> str:
    """A file with the rows of the guide and these last lines."""
    file = folder / "my_rows.py"
    file.write_text("\n".join([code_of("A model family"), code_of("An optimizer"), *last]))
    return str(file)


def test_a_plugin_has_the_rows_in_every_command_and_in_the_file_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, out = plugin_of(tmp_path), tmp_path / "out"
    with pytest.raises(SystemExit):
        main(["--plugin", mine, "verify", "--help"])
    assert "bigram" in capsys.readouterr().out
    assert main(["train", f"--plugin={mine}", *ROWS, "--world", "thread", "--length", "16", "--out", str(out)]) == 0
    assert from_toml(TrainConfig, str(out / "config.toml")).files.plugin == (mine,)


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("OPTIMIZERS['x'] = nothing", "line 2: NameError: name 'nothing' is not defined"),
        ("def (", "line 2: SyntaxError"),
        ("raise SystemExit(3)", "line 2: SystemExit: 3"),
        ("import sys; sys.exit()", "ended the program"),
        ("import plait; plait.parse_strategy('a: full')", "line 2: ValueError: "),
        (None, "give a file of Python, as in --plugin my_rows.py"),
    ],
)
def test_a_wrong_plugin_is_one_line(
    last: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.py"
    if last is not None:
        file.write_text(f"from plait.run.job.optimizer import OPTIMIZERS\n{last}\n")
    assert main(["--plugin", str(file), "train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("plait: error: plugin ") and says in said and said.count("\n") == 1


def test_processes_run_a_plugin_and_a_script_cannot_lose_its_exit_code(tmp_path: Path, start) -> None:
    mine = plugin_of(tmp_path, "if __name__ == '__main__':", "    from plait.run.commands.main import main; main()")
    for words, code, says in (
        (["-m", "plait", "--plugin", mine, "verify", *ROWS, "--world", "process"], 0, "verdict: bitwise"),
        ([mine, "verify", *ROWS, "--batch", "1"], 2, "plait: error: a batch of 1 samples"),
    ):
        process = start(sys.executable, *words)
        out, err = process.communicate(timeout=100)
        assert process.returncode == code and says in out + err, out + err
