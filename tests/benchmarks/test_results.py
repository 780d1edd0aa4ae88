"""``make bench``: its files are checked, its page is made from them, a failing suite does not stop the others."""

import importlib.util
import json
import sys
import time
from dataclasses import asdict, replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness.rows import Row, ratio_row, value_row
from harness.turns import Spread
from summary import suites
from summary.drawn import digest, dots
from summary.machine import this_machine
from summary.page import PAGE, PICTURES, page
from summary.readme import with_table
from summary.records import Machine, Record, RecordError, Run, Versions, read, read_all, with_run, write
from summary.running import run_suite
from summary.verdicts import verdict

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
VERSIONS = Versions("0.1.0", "2.13.0", "3.11.2", "0123456789")
RUN = Run("tensor", "python benchmarks/tensor/main.py", "done", "", 12.5, 0.1, 1.9, VERSIONS)
ROWS = (
    value_row("tensor", "mlp16, 2 ranks", "plait/shm-tensor", [10.0, 11.0, 12.0], "ms"),
    ratio_row(
        "tensor",
        "mlp16, 2 ranks",
        ("plait/shm-tensor", [10.0, 10.0]),
        ("torch's fastest plan", [13.0, 16.0]),
        "ms",
        1.4,
    ),
)
RECORD = Record(1, "2026-11-23", Machine("Some CPU", 2, ("avx2",), "Linux 6"), (RUN,), ROWS)


# ---- what is committed --------------------------------------------------------------------------------------------


def test_the_page_and_the_readme_are_made_of_the_results() -> None:
    records = read_all(RESULTS)
    assert records
    again = "python benchmarks/main.py --page-only"
    assert (ROOT / "docs" / PAGE).read_text() == page(records), again
    readme = (ROOT / "README.md").read_text()
    assert readme == with_table(readme, records), again
    for name in PICTURES:
        assert f"numbers {digest(name, records)}" in (ROOT / "docs" / name).read_text(), f"{name} is stale: {again}"


# ---- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``benchmarks/main.py``."""
    spec = importlib.util.spec_from_file_location("every_benchmark", ROOT / "benchmarks" / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "every_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = write(tmp_path, RECORD)
    assert file.name == "some-cpu-2-cores-2026-11-23.json"
    assert read(file) == RECORD and read_all(tmp_path) == [RECORD]


def test_a_suite_that_runs_again_takes_the_place_of_its_earlier_run() -> None:
    again, row = replace(RUN, seconds=1.0), replace(ROWS[0], contestant="plait-tensor")
    other = with_run(RECORD, replace(RUN, suite="loading"), [replace(ROWS[0], suite="loading")])
    found = with_run(other, again, [row])
    assert {run.suite: run.seconds for run in found.runs} == {"loading": 12.5, "tensor": 1.0}
    assert [r.contestant for r in found.rows if r.suite == "tensor"] == ["plait-tensor"]
    assert with_run(found, replace(again, outcome="stopped", reason="late"), []) == found


def damaged(change: Any) -> str:
    data = json.loads(json.dumps(asdict(RECORD)))
    return json.dumps(change(data) or data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("\x00\xff", "Expecting value"),
        ('{"schema": 1', "Expecting"),
        ("[" * 100_000, ""),
        ("[]", "the file is [], not an object"),
        ("{}", "'date' is missing"),
        (damaged(lambda d: d.update(schema=2)), "its schema is 2"),
        (damaged(lambda d: d.update(date="yesterday")), "no YYYY-MM-DD"),
        (damaged(lambda d: d.update(extra=1)), "'extra' is unknown"),
        (damaged(lambda d: d["machine"].update(cores="two")), "machine.cores is 'two', not int"),
        (damaged(lambda d: d["machine"].update(cores=True)), "machine.cores is True, not int"),
        (damaged(lambda d: d["machine"].update(vector_units="avx2")), "machine.vector_units is 'avx2', not a list"),
        (damaged(lambda d: d["runs"][0].update(outcome="fine")), "runs[0].outcome is 'fine', not 'done' or 'failed'"),
        (damaged(lambda d: d["rows"][1].__delitem__("goal")), "rows[1]: 'goal' is missing"),
        (damaged(lambda d: d["rows"][1]["ratio"].update(median=nan)), "rows[1].ratio.median is nan, not a finite"),
        (damaged(lambda d: d["rows"][1]["ratio"].update(low=9.0)), "the median is not between low and high"),
        (damaged(lambda d: d["rows"][1].update(ratio=None)), "a peer without a ratio"),
        (damaged(lambda d: d["rows"][0].update(suite="pipeline")), "'pipeline', which did not run"),
        (damaged(lambda d: d["rows"].append(d["rows"][0])), "a row is there twice"),
        (damaged(lambda d: d["runs"].append(d["runs"][0])), "tensor ran twice"),
    ],
)
def test_a_damaged_file_is_refused_in_one_message(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="latin-1")
    with pytest.raises(RecordError) as caught:
        read_all(tmp_path)
    message = str(caught.value)
    assert "bad.json is no results file" in message and says in message and "\n" not in message
    assert len(message) < 400


def test_the_command_refuses_a_damaged_file_and_a_suite_that_is_not_there(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for asked, says in (
        ({"page_only": True}, "bad.json"),
        ({"only": ("speed",)}, "no suite is called speed; there are:"),
    ):
        assert command.main(command.Arguments(results=tmp_path, **asked)) == 2
        assert says in capsys.readouterr().err


# ---- suites -------------------------------------------------------------------------------------------------------


def suite_of(folder: Path, body: str) -> tuple[str]:
    script = folder / "suite.py"
    script.write_text(f"import sys, time, json, subprocess\nfile = sys.argv[sys.argv.index('--json') + 1]\n{body}\n")
    return (str(script),)


GIVE = f"open(file, 'w').write(json.dumps({{'rows': {[asdict(row) for row in ROWS]!r}}}))"


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("body", "outcome", "reason", "rows"),
    [
        (GIVE, "done", "", 2),
        (f"{GIVE}\nsys.exit(3)", "failed", "exit status 3", 2),
        ("import os; os.kill(os.getpid(), 9)", "failed", "died of SIGKILL", 0),
        ("pass", "failed", "wrote no rows", 0),
        ("open(file, 'w').write('{\"rows\": [1]}')", "failed", "rows[0] is 1, not an object", 0),
        (GIVE.replace("'tensor'", "'pipeline'"), "failed", "wrote rows of pipeline", 0),
    ],
)
def test_what_became_of_a_suite_is_said(tmp_path: Path, body: str, outcome: str, reason: str, rows: int) -> None:
    run, found = run_suite("tensor", suite_of(tmp_path, body), 30.0, tmp_path, VERSIONS)
    assert run.outcome == outcome and reason in run.reason and len(found) == rows, run


def test_a_suite_that_hangs_is_stopped_with_its_children_and_keeps_its_rows(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    child = f"subprocess.Popen([sys.executable, '-c', {deaf!r}])"
    body = f"{GIVE}\nchild = {child}\nopen(file + '.pid', 'w').write(str(child.pid))\ntime.sleep(60)"
    run, rows = run_suite("tensor", suite_of(tmp_path, body), 3.0, tmp_path, VERSIONS)
    assert (run.outcome, run.reason, len(rows)) == ("stopped", "not done in 3 s", 2)
    number = int((tmp_path / "tensor.json.pid").read_text())
    end = time.monotonic() + 20
    while is_running(number) and time.monotonic() < end:  # it is killed, and may take a moment to die
        time.sleep(0.05)
    assert not is_running(number)


def test_a_suite_that_fails_is_named_and_the_others_go_on(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, body in (("loading", "sys.exit(3)"), ("tensor", GIVE)):
        (tmp_path / name).mkdir()
        suite_of(tmp_path / name, body)
    listed = [
        suites.Suite(name, str(tmp_path / name / "suite.py"), (), (), 30.0, 30.0) for name in ("loading", "tensor")
    ]
    monkeypatch.setattr(command, "chosen", lambda only, python: (listed, []))
    results = tmp_path / "results"
    assert command.main(command.Arguments(results=results, page=False)) == 1
    assert "not done:\nloading: failed, exit status 3\n" in capsys.readouterr().out
    (record,) = read_all(results)
    assert [(run.suite, run.outcome) for run in record.runs] == [("loading", "failed"), ("tensor", "done")]
    assert record.rows == ROWS


def test_every_suite_has_a_script_and_a_deadline_and_deepspeed_needs_its_python() -> None:
    for suite in suites.EVERY:
        assert (ROOT / "benchmarks" / suite.script).exists() and 0 < suite.quick_deadline <= suite.deadline
    with pytest.raises(ValueError, match="deepspeed needs --deepspeed PYTHON"):
        suites.chosen(("deepspeed",), "")
    assert [suite.name for suite in suites.chosen(("deepspeed",), "python3")[0]] == ["deepspeed"]


# ---- pages --------------------------------------------------------------------------------------------------------


def ratio(median: float, low: float, high: float, goal: float | None) -> Row:
    return Row("tensor", "w", "c", "p", Spread(median, low, high), Spread(1, 1, 1), "ms", goal)


def test_a_goal_is_met_by_the_median_and_open_where_it_lies_in_the_range() -> None:
    assert verdict(ratio(1.5, 1.4, 1.6, None)) is None
    assert str(verdict(ratio(1.5, 1.4, 1.6, 1.4))) == "met"
    assert str(verdict(ratio(1.5, 1.3, 1.6, 1.4))) == "met, ranges overlap"
    assert str(verdict(ratio(1.3, 1.2, 1.6, 1.4))) == "missed, ranges overlap"
    assert str(verdict(ratio(1.3, 1.2, 1.35, 1.4))) == "missed"
    assert str(verdict(value_row("overhead", "w", "c", [40.0, 45.0], "us", 50.0))) == "met"
    assert str(verdict(value_row("overhead", "w", "c", [45.0, 52.0, 60.0], "us", 50.0))) == "missed, ranges overlap"


def test_this_machine_has_a_name_and_cores() -> None:
    machine = this_machine()
    assert machine.processor and machine.cores >= 1 and machine.kernel.startswith("Linux")


def test_the_same_records_give_the_same_picture() -> None:
    pytest.importorskip("matplotlib", reason="plait[bench] is not installed: the pictures' marks alone are compared")
    from summary.plots import draw

    assert len(dots(RECORD)) == 1
    for name in PICTURES:
        drawn = draw(name, [RECORD])
        assert drawn == draw(name, [RECORD]) and digest(name, [RECORD]) in drawn
