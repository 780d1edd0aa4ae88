"""A row written as text passes the checks of the built-in rows."""

from guide import run_section

from plait.run.commands.main import main
from plait.table.cells import TABLE


def test_a_row_as_text_is_bitwise_the_run_of_one_process() -> None:
    mine = run_section("A strategy")["mine"]
    assert mine.name not in TABLE
    mesh = ["--mesh", "replica=2 shard=2", "--microbatches", "3", "--steps", "2"]
    assert main(["verify", "--strategy", str(mine), "--model", "mlp", "--layers", "4", *mesh]) == 0
