"""The page that steps through a file: its record of each rank, their alignment, and no text of it runs."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.run.commands.main import main
from plait.run.course.lessons import Lesson, numbered
from plait.run.course.markers import markers
from plait.run.course.memory import HeldBytes
from plait.run.course.merge import align
from plait.run.course.page import lesson_page, predictions
from plait.run.course.tracer import trace
from plait.run.course.values import show
from plait.run.job.user_code import load_name
from plait.table.mesh import Mesh

PROGRAM = """
import torch

def body(comm):
    x = torch.full((3,), float(comm.rank))
    hostile = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
    if comm.rank:
        x = x + 10
    comm.all_reduce(x, ("shard",)).wait()
    total = helper(x)
    return total

def helper(x):
    twice = 2 * x
    return twice.sum()

def line(comm):
    token = torch.zeros(1)
    if comm.rank:
        comm.recv(token, comm.rank - 1).wait()
    token += 1
    if comm.rank + 1 < comm.world_size:
        comm.send(token, comm.rank + 1)
    return token
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def data_of(page: str) -> Any:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def value(rank: Any, name: str, end: int) -> Any:
    """The last value of a variable up to a step."""
    return next(step["changed"][name] for step in reversed(rank["steps"][: end + 1]) if name in step["changed"])


def test_ranks_differ_before_the_sum_and_agree_after_it(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["trace", f"{program}:body", "--mesh", "shard=3", "--out", str(out)]) == 0
    data = data_of(out.read_text())
    before = next(i for i, frame in enumerate(data["frames"]) if data["ranks"][0]["steps"][frame[0]]["line"] == 9)
    meeting = [
        max(k for k, step in enumerate(rank["steps"]) if not step["operations"] and "x" in step["changed"])
        for rank in data["ranks"]
    ]
    starts = [value(rank, "x", at)["rows"][0] for rank, at in zip(data["ranks"], meeting, strict=True)]
    assert starts == [[0.0] * 3, [11.0] * 3, [12.0] * 3] and before > 0
    ends = [value(rank, "x", len(rank["steps"]) - 1)["rows"][0] for rank in data["ranks"]]
    assert ends == [[23.0] * 3] * 3
    for frame in data["frames"]:  # aligned: all ranks are on the same side of the collective
        assert len({rank["steps"][k]["operations"] for rank, k in zip(data["ranks"], frame, strict=True)}) == 1
    meant = {"kind": "all_reduce", "axes": ["shard"], "bytes": 12, "sent": 16, "ranks": [0, 1, 2], "root": None}
    assert data["ranks"][1]["operations"] == [meant] and data["ranks"][1]["name"] == "shard 1"
    assert {step["function"] for step in data["ranks"][0]["steps"]} == {"body", "helper"}


def test_messages_are_shown_in_the_order_in_which_they_went(program: Path) -> None:
    ranks = trace(str(program), load_name(f"{program}:line", "function"), Mesh(shard=3))
    frames = align(ranks)
    assert frames[-1] == [len(rank.steps) - 1 for rank in ranks]
    added = PROGRAM.splitlines().index("    token += 1") + 1
    received = [next(i for i, f in enumerate(frames) if ranks[r].steps[f[r]]["line"] == added) for r in (0, 1, 2)]
    assert received[0] < received[1] < received[2]


def test_only_changes_are_kept_and_a_body_that_raises_is_reported(program: Path) -> None:
    ranks = trace(str(program), load_name(f"{program}:body", "function"), Mesh(shard=2))
    assert sum("hostile" in step["changed"] for step in ranks[0].steps) == 1
    with pytest.raises(ZeroDivisionError):
        trace(str(program), lambda comm: 1 / 0, Mesh(shard=2))


def test_a_hostile_string_is_text_and_the_policy_names_our_script_alone(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    main(["trace", f"{program}:body", "--mesh", "shard=2", "--out", str(out)])
    page = out.read_text()
    assert page.count("</script>") == 2 and "<img" not in page and page.count("http:") == 1  # the name of SVG
    script, style = re.search(r"script-src '([^']+)'; style-src '([^']+)'", page).groups()
    for tag, named in (("script", script), ("style", style)):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        assert named == "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert "default-src 'none'" in page and "innerHTML" not in page and "eval" not in page


def test_a_tensor_without_values_and_odd_ones_are_shown() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    assert show(freed) == {"text": "float32 (4,), no values here"}
    assert show(torch.empty(2, device="meta"))["text"].endswith("no values here")
    assert show(torch.tensor(3))["rows"] == [[3.0]] and show(torch.empty(0))["text"] == "float32 (0,)"
    assert show(torch.tensor([1.0, -torch.inf, torch.nan]))["rows"] == [[1.0, "-inf", "nan"]]
    assert show(torch.tensor(128.8437))["rows"] == [[128.844]], "a loss is shown with six digits"
    assert show(torch.ones(9, 9))["rows"] == [[1.0] * 8] * 4
    assert show([torch.ones(2), 1, print])["text"] == "list of 3: float32 (2,); 1; builtin_function_or_method"


def test_a_file_of_this_folder_is_traced(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    assert main(["trace", f"./{program.name}:body", "--mesh", "shard=2", "--out", "page.html"]) == 0
    assert all(rank["steps"] for rank in data_of(Path("page.html").read_text())["ranks"])


MARKED = """
import torch

LIMIT = 3

def body(comm):
    log = []  # @hide log
    x = torch.ones(1000)  # @inspect x.sum(), LIMIT, x[missing], open("f")
    print(f"rank {comm.rank} speaks")
    y = helper(x)  # @over
    del x
    z = 1  # @hide
    comm.barrier(("shard",))
    return y

def helper(x):
    return 2 * x.repeat(4)
"""


def test_markers_say_what_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "marked.py"
    file.write_text(MARKED)
    ranks = trace(str(file), load_name(f"{file}:body", "function"), Mesh(shard=2))
    steps = ranks[1].steps
    named = {name for step in steps for name in step["changed"]}
    assert named == {"comm", "x", "y", "z", "@ x.sum()", "@ LIMIT", "@ x[missing]", "@ open('f')"}
    lines = MARKED.splitlines()
    assert not any("# @hide" in lines[step["line"] - 1] for step in steps if "log" not in lines[step["line"] - 1])
    assert {step["function"] for step in steps} == {"body"}
    first = next(step for step in steps if "@ x[missing]" in step["changed"])
    assert first["changed"]["@ x.sum()"]["rows"] == [[1000.0]] and first["line"] == 9
    assert first["changed"]["@ x[missing]"]["text"] == "KeyError: 'missing'"
    assert "only names, x.y, x[0]" in first["changed"]["@ open('f')"]["text"]
    assert "".join(step.get("said", "") for step in steps) == "rank 1 speaks\n" and capfd.readouterr().out == ""
    held = [step["held"] for step in steps]
    assert (held[0], held[-1], max(held)) == (0, 16_000, 20_000) and ranks[1].peak == 4_000 + 2 * 16_000


@pytest.mark.parametrize("line", ["# @inspect x +", "# @inspect y; x"])
def test_a_wrong_marker_is_named_with_its_line(line: str) -> None:
    with pytest.raises(ValueError, match=r"f.py, line 2: .*give expressions"):
        markers(f"\n{line}\n", "f.py")


def test_words_of_other_programs_are_no_markers() -> None:
    assert markers("x = 1  # @param x") == markers("x = 1")


def test_memory_counts_what_is_alive_and_what_autograd_keeps() -> None:
    outside = torch.ones(100, requires_grad=True)
    with HeldBytes() as held:
        outside.detach().add_(1)
        view = outside.view(10, 10)
        assert held.bytes() == 0
        kept = (view.exp() * 2).sum()  # exp keeps its result
        assert held.bytes() == 404
        kept.backward()
        assert held.bytes() == 404 and held.peak >= 804
        outside.grad.untyped_storage().resize_(0)
        assert held.bytes() == 4


def test_predictions_come_with_their_outcomes() -> None:
    found = predictions(numbered()[11].path.read_text())
    assert len(found) == 3 and found[0]["question"].startswith("How many units are whole at once")
    assert found[0]["outcome"] == "two, and one. Not four."
    assert all(one["question"] and one["outcome"] for one in found) and predictions("x = 1") == []


def test_a_lesson_is_opened(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lesson.html"
    assert main(["lesson", "open", "5", "--out", str(out), "--no-browser"]) == 0
    assert out.stat().st_size < 2_000_000 and len(data_of(out.read_text())["ranks"]) == 4
    capfd.readouterr()
    assert main(["lesson", "open", "1", "--out", str(out), "--no-browser"]) == 0
    data = data_of(out.read_text())
    assert len(data["ranks"]) == 1 and "main" in {step["function"] for step in data["ranks"][0]["steps"]}


def test_a_claim_that_does_not_hold_makes_no_page(tmp_path: Path) -> None:
    file = tmp_path / "05_broken.py"
    file.write_text(
        f'"""Lesson 5: broken."""\n{PROGRAM}\ndef main():\n    print("sum", 23)\n    assert 23 == 24, "no"\n'
    )
    with pytest.raises(AssertionError, match="no"):
        lesson_page(Lesson(5, file))


def test_every_lesson_with_ranks_can_be_opened() -> None:
    with_ranks = [lesson.number for lesson in numbered() if "\ndef body(" in lesson.path.read_text()]
    assert with_ranks == [n for n in range(3, 21) if n not in (8, 18)]


def test_processes_write_a_file_each_and_are_one_page(program: Path, tmp_path: Path) -> None:
    found = []
    for world in ("thread", "process"):
        out = tmp_path / f"{world}.html"
        words = ["trace", f"{program}:body", "--mesh", "shard=2", "--out", str(out), "--world", world]
        if world == "thread":
            assert main(words) == 0
        else:
            subprocess.run([sys.executable, "-m", "plait", *words], check=True)
        data = data_of(out.read_text())
        for rank in data["ranks"]:
            for step in rank["steps"]:
                del step["time"], step["held"]  # a process's collectives have buffers of their own
            del rank["peak"]
        found.append(data)
    assert found[0] == found[1] and len(found[0]["frames"]) > 10
    assert {file.name for file in tmp_path.iterdir()} == {"program.py", "thread.html", "process.html"}
