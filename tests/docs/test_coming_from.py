"""Scripts of other engines and of plait: as short as the pages say, and with the same numbers."""

import difflib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.schedule.orders import ORDERS
from plait.table.cells import TABLE
from plait.table.parallelism import Parallelism

pytestmark = pytest.mark.timeout(520)  # programs of their own, which import more than ours do

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "examples" / "pairs"
PAGE = (ROOT / "docs" / "guide" / "coming-from.md").read_text(encoding="utf-8")


def start(*words: str, ranks: int = 0) -> None:
    """A script, as one process or under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *torchrun, *words], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr


def changed(name: str) -> list[str]:
    """The lines that are taken from a plain script, and those that are added."""
    plain, converted = ((PAIRS / f"{stem}.py").read_text().splitlines() for stem in (f"{name}_plain", name))
    lines = list(difflib.unified_diff(plain, converted, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@")]


RUNS = {"cnn": (3, "zero1"), "gpt": (2, "zero3"), "llama": (3, "zero3_keep")}
"""Ranks and row of each pair; parts of a batch are dealt evenly."""

CLOSE = {"cnn": 1e-12, "gpt": 1e-10, "llama": 1e-6}
"""Llama's loss is taken in fp32; AdamW makes steps of the rounding of a gradient that is nearly zero."""


@pytest.mark.parametrize("name", RUNS)
def test_a_converted_script_is_the_plain_one(name: str, tmp_path: Path) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    ranks, row = RUNS[name]
    start(str(PAIRS / f"{name}_plain.py"), str(tmp_path / "plain.pt"))
    start(str(PAIRS / f"{name}.py"), str(tmp_path / "converted.pt"), row, ranks=ranks)
    plain, converted = (torch.load(tmp_path / f"{which}.pt") for which in ("plain", "converted"))
    assert plain.keys() == converted.keys() and plain["model"].keys() == converted["model"].keys()
    assert plain.get("tokens") == converted.get("tokens")  # what Llama writes
    for numbers in plain.keys() & {"losses", "norms"}:
        assert converted[numbers] == pytest.approx(plain[numbers], rel=CLOSE[name])
        assert len(plain[numbers]) > 9 and plain[numbers][0] > 1.1 * plain[numbers][-1]
    for key, value in plain["model"].items():
        if "running" not in key and "num_batches" not in key:  # BatchNorm's are of the microbatches of one rank
            torch.testing.assert_close(converted["model"][key], value, rtol=0, atol=CLOSE[name])


@pytest.mark.parametrize("name", RUNS)
def test_few_lines_change(name: str) -> None:
    assert len(changed(name)) <= 24
    assert sum(line.startswith("+") for line in changed(name)) <= 15


def test_the_page_shows_the_lines_that_change() -> None:
    assert re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) == ["\n".join(changed("cnn")) + "\n"]


def test_the_loops_of_the_page_are_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    loops = re.findall(r"^```py(?:thon)?\n(.*?)^```", PAGE.partition("## What is called what")[0], re.M | re.S)
    assert len(loops) == 4
    for number, loop in enumerate(loops):  # each in processes of its own: a second group in one finds the first's keys
        save = f"\nif rank == 0:\n    torch.save(state, {str(tmp_path / f'{number}.pt')!r})\n"
        leave = "" if "import plait" in loop else "import os\nos._exit(0)\n"  # torch's threads may outlive its group
        script = tmp_path / f"{number}.py"
        script.write_text(loop + save + leave)
        start(str(script), ranks=2)
    first, *others = (torch.load(tmp_path / f"{number}.pt") for number in range(4))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-12)


def holds(cell: str) -> list[str]:
    """The names in a cell of the page's tables that do not exist."""
    homes: dict[str, Any] = {"plait": plait, "engine": plait.Engine, "comm": plait.Comm}
    values = {"strategy": TABLE, "schedule": ORDERS, "recompute": ("full", "selective"), "cut": ("element", "tensor")}
    keywords = inspect.signature(plait.Engine).parameters.keys() | vars(Parallelism()).keys()
    wrong = [
        f"{home}.{name}"
        for home, name in re.findall(r"\b(plait|engine|comm)\.(\w+)", cell)
        if not (hasattr(homes[home], name) or (home, name) in {("comm", "rank"), ("comm", "mesh"), ("engine", "last")})
    ]
    wrong += [f"{key}={value}" for key, value in re.findall(r'(\w+)="(\w+)"', cell) if value not in values.get(key, ())]
    given = re.findall(r"(?:Engine\(|`)(\w+)=(?!=)", cell)
    return wrong + [name for name in given if name not in keywords | plait.Mesh.__dataclass_fields__.keys()]


def test_the_tables_name_what_is_there() -> None:
    rows = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(rows) > 50
    assert [wrong for row in rows for wrong in holds(row.replace('reduction="mean"', ""))] == []
    assert holds('`engine.bakward(loss)` `strategy="zero4"` `prefech=2`') == [
        "engine.bakward",
        "strategy=zero4",
        "prefech",
    ]
