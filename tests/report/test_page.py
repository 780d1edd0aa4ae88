"""A report as one page: its numbers, its policy, that no text in it runs, and a browser's view of it."""

import base64
import hashlib
import io
import json
import os
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, opened
from rich.console import Console
from simulated import as_log

from plait.predict.cluster import preset
from plait.predict.duration import duration
from plait.predict.model import Transformer
from plait.predict.plan import Plan
from plait.predict.search import Candidate
from plait.predict.sent import messages
from plait.run.commands.main import main
from plait.run.report.page.explorer import FIELDS, explorer
from plait.run.report.page.lanes import GATHER, measured_lanes, planned_lanes
from plait.run.report.page.layout import layout_facts
from plait.run.report.page.planned import plan_report
from plait.run.report.page.saved import page, saved_reports
from plait.run.report.training import ProgressView
from plait.schedule.orders import write_order
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE
from plait.table.mesh import Mesh


def line(step: int, **more: Any) -> dict[str, Any]:
    made = {"step": step, "loss": 5 / step, "tokens": 100 * step, "seconds": 2.0, "grad_norm": None}
    return made | {"peak_memory": 3 << 20} | more


def console_of(terminal: bool) -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, force_terminal=terminal, width=150, highlight=False, color_system=None)


def shown(terminal: bool, steps: int, **more: Any) -> str:
    file, console = console_of(terminal)
    with ProgressView(console, 1, steps, 3, "tokens") as view:
        for step in range(1, steps + 1):
            view.show(line(step, **(more if step == steps else {})))
            if view._bar is not None:
                view._bar.refresh()
    return file.getvalue()


def test_a_pipe_gets_the_first_the_last_and_every_third_line() -> None:
    text = shown(False, 8)
    assert [int(step) for step in re.findall(r"^step (\d)/8  loss", text, re.MULTILINE)] == [1, 3, 6, 8]
    assert "\x1b" not in text
    assert text.count("\n") == 4
    assert "loss   1.6667        150 tokens/s     10 s left" in text  # 300 tokens in 2 s, five steps to go


def test_an_evaluation_has_a_line_of_its_own() -> None:
    assert "step 2: held-out loss 1.2500 (1,234 tokens)\n" in shown(False, 2, eval_loss=1.25, eval_tokens=1234)


def test_a_terminal_sees_speed_memory_and_time_left() -> None:
    text = shown(True, 8)
    assert re.search(r"7/8 +loss 0\.7143 +350 tokens/s +3\.00 MiB +0:00:02 left", text)
    assert [int(step) for step in re.findall(r"step (\d)/8  loss", text)] == [1, 3, 6, 8]


def test_the_bar_is_at_the_step_of_the_line_above_it() -> None:
    file, console = console_of(terminal=True)
    with ProgressView(console, 1, 9, 1, "tokens") as view:
        for step in (1, 2, 3):
            view.show(line(step))
            after = file.getvalue().rpartition(f"step {step}/9  loss")[2]
            assert re.search(rf"\b{step}/9 ", after)


def test_a_run_that_goes_on_begins_with_its_own_first_step() -> None:
    file, console = console_of(terminal=False)
    with ProgressView(console, 5, 7, 100, "tokens") as view:
        for step in (5, 6, 7):
            view.show(line(step))
    assert re.findall(r"step (\d)/7", file.getvalue()) == ["5", "7"]


def test_the_terminal_is_given_back_when_a_step_raises() -> None:
    file, console = console_of(terminal=True)
    with pytest.raises(RuntimeError, match="in the step"), ProgressView(console, 1, 3, 1, "tokens"):
        raise RuntimeError("in the step")
    assert file.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again


SMALL = Transformer(layers=30, hidden=1024, ffn=4096, heads=16, kv_heads=16, vocab=32000)
ROW = TABLE["zero3"].mixed("bf16")
ROWS = [row.mixed("bf16") for row in TABLE.values()]
PICTURED = (
    "--layers 32 --width 4096 --ffn 14336 --heads 32 --kv-heads 8 --vocab 128256 --hosts 2 --gpus 8xa100-80 "
    "--batch 256 --length 8192 --mesh pipe=4,shard=4 --strategy zero1 --microbatches 32 --recompute full"
)
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
SIZES = "--layers 8 --width 512 --heads 8 --vocab 32000 --hosts 2 --gpus 4xh100 --batch 64 --length 1024"


def plan(mesh: str = "shard=8", microbatches: int = 4, **changed: Any) -> Plan:
    parsed = Mesh.parse(mesh)
    cluster = replace(preset("h100"), devices=parsed.size)
    batch = parsed.data_size * microbatches
    return Plan(SMALL, cluster, parsed, changed.pop("strategy", ROW), batch, 1024, microbatches, **changed)


def report(name: str = "a plan", of: Plan | None = None) -> dict[str, Any]:
    of = of or plan()
    return plan_report([Candidate.of(of)], ROWS, name) | {"explorer": explorer(of, ROWS)}


def test_the_command_writes_the_numbers_that_it_prints(tmp_path: Path) -> None:
    words = ["plan", *SIZES.split(), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "plan.json")]
    assert main(words) == 0
    best = json.loads((tmp_path / "plan.json").read_text())["layouts"][0]
    (one,) = saved_reports(str(tmp_path / "out"))
    numbers = {name: predicted for name, predicted, *_ in one["numbers"]}
    assert numbers["seconds a step"] == best["seconds"]["total"] and numbers["MFU"] == 100 * best["mfu"]
    assert numbers["bytes of the fullest rank"] == best["bytes"]["total"] and one["layout"]["row"] == best["strategy"]
    assert sum(line["predicted"] for line in one["messages"]) == sum(line["bytes"] for line in best["messages"])
    line = one["explorer"]["lines"][one["explorer"]["at"]]
    mesh = Mesh.parse(best["mesh"])
    assert line[:5] == [8, mesh.pipe, mesh.tensor, mesh.context, mesh.replica]
    assert line[6:8] == [best["strategy"], best["microbatches"]]
    took = line[len(FIELDS) + len(one["explorer"]["kinds"]) :]
    assert sum(took) == pytest.approx(best["seconds"]["total"], rel=1e-3)
    assert main([*words[:1], "--params", "10B", "--out", str(tmp_path / "no")]) == 2


def test_two_reports_stand_on_one_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.html").write_text(page([report(name)]))
    out = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b" / "report.html"), "--out", str(out)]) == 0
    assert [one["name"] for one in saved_reports(str(out))] == ["a", "b"]
    (tmp_path / "a" / "report.html").write_text("<p>another page</p>")
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 2
    assert "is not a report of plait train or plait plan" in capfd.readouterr().err


def test_each_rank_holds_its_part_by_the_row() -> None:
    facts = layout_facts(Mesh(replica=2, shard=2), TABLE["psdp"])
    assert [one["parts"]["parameters"] for one in facts["ranks"]] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [one["parts"]["optimizer"] for one in facts["ranks"]] == [(0, 4), (2, 4), (1, 4), (3, 4)]
    large = layout_facts(Mesh(pipe=4, shard=4096, tensor=8), TABLE["zero3"])
    assert len(large["ranks"]) == 64 and large["ranks"][-1]["at"]["pipe"] == 3, "all along each short axis"


@pytest.mark.parametrize("mesh", ["shard=8", "pipe=4 shard=2", "pipe=2 shard=2 tensor=2"])
def test_the_planned_step_takes_as_long_as_its_count(mesh: str) -> None:
    of = plan(mesh, 8)
    lanes = planned_lanes(of)
    assert lanes is not None and len(lanes) == of.mesh.pipe
    end = max(box[4] for one in lanes for box in one["compute"] + one["messages"])
    assert end == pytest.approx(duration(of).total - of.cluster.reached.fixed, rel=0.05)
    gathers = [box for box in lanes[0]["messages"] if box[0] == GATHER]
    assert len(gathers) == (8 if of.mesh.pipe == 1 else 1)
    took = sum(sent.seconds for sent in messages(of, of.shares[0]) if sent.phase == "forward" and "shard" in sent.axes)
    assert sum(box[4] - box[3] for box in gathers) == pytest.approx(took, rel=1e-3)


def test_the_policy_names_every_script_and_a_hostile_name_is_text() -> None:
    text = page([report(HOSTILE)])
    script, style = re.search(r"script-src (.*?); style-src (.*?);", text).groups()
    for tag, named in (("script", script), ("style", style)):
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in bodies]
        assert named == " ".join(f"'sha256-{one}'" for one in digests)
    assert "default-src 'none'" in text and "<img" not in text and text.count("</script>") == 5
    assert not re.search(r'(src|href)="', text)


def test_libraries_are_those_of_the_list() -> None:
    folder = files("plait.run.report.page") / "vendor"
    listed = dict(
        re.findall(r"^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$", (folder / "LICENSES.md").read_text(), re.MULTILINE)
    )
    found = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir() if "." in one.name}
    assert {name: digest for name, digest in found.items() if name != "LICENSES.md"} == listed


@needs_browser
def test_a_browser_shows_it_and_sliders_choose_another_layout(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    place.write_text(page([report(HOSTILE)]))
    with opened(place) as tab:
        assert tab.title() == HOSTILE and tab.locator("h1").inner_text() == HOSTILE and tab.locator("img").count() == 0
        before = tab.locator(".answer").inner_text()
        tab.locator(".sliders input").nth(FIELDS.index("microbatches")).focus()
        tab.keyboard.press("Home")
        assert tab.locator(".sliders output").nth(FIELDS.index("microbatches")).inner_text() == "1"
        assert tab.locator(".answer").inner_text() != before
        tab.locator("button").click()
        assert "Number 1 of" in tab.locator(".answer").inner_text()
        drawn = "document.querySelector('canvas').toDataURL()"
        whole = tab.evaluate(drawn)
        tab.locator("canvas").focus()
        tab.keyboard.press("+")
        closer = tab.evaluate(drawn)
        tab.keyboard.press("0")
        assert closer != whole and tab.evaluate(drawn) == whole


@needs_browser
def test_two_reports_in_a_browser(tmp_path: Path) -> None:
    curves = {"steps": [1, 2, 3], "values": {"loss": [3.0, 2.0, None]}}
    place = tmp_path / "both.html"
    place.write_text(
        page([report("a") | {"curves": curves}, report("b", plan("shard=4 tensor=2")) | {"curves": curves}])
    )
    with opened(place) as tab:
        assert tab.locator("article").count() == 2 and tab.locator(".u-over").count() == 1
        assert "%" in tab.locator("table").first.locator("tr").nth(1).inner_text()


@needs_browser
def test_the_picture_of_the_docs(tmp_path: Path) -> None:
    """PLAIT_PICTURES=FOLDER keeps it: docs/report.png is made here."""
    out = Path(os.environ.get("PLAIT_PICTURES", tmp_path))
    words = ["plan", *PICTURED.split(), "--out", str(tmp_path)]
    assert main(words) == 0
    with opened(tmp_path / "report.html", width=1200) as tab:
        tab.screenshot(path=out / "report.png", full_page=True)
    assert (out / "report.png").stat().st_size > 20_000


@needs_browser
def test_32_ranks_and_64_microbatches_are_one_canvas(tmp_path: Path) -> None:
    one = report("large", plan("pipe=32", 64))
    step = simulate(write_order("1f1b", 32, 64), Costs())
    one["timelines"]["measured"] = measured_lanes(as_log(step))
    place = tmp_path / "large.html"
    place.write_text(page([one]))
    with opened(place) as tab:
        tab.locator("canvas").wait_for()
        assert tab.evaluate("document.getElementsByTagName('*').length") < 2000
