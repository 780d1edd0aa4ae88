"""README, guide and lesson are true: their code runs, their links resolve, their tables are the code's.

A command of the README that takes minutes (the demo, the whole grid, the benchmark) is not run here.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from browser import needs_browser, opened

import plait
from plait.predict.cost import predict_step
from plait.predict.memory import formula
from plait.run.commands.main import main
from plait.sharded.layout import Layout, region
from plait.table.cells import TABLE, Cell
from plait.table.flat import UnitLayout, lay
from plait.table.mesh import Mesh

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIMS, COSTS_PAGE = (
    (ROOT / "docs" / "guide" / name).read_text(encoding="utf-8") for name in ("claims.md", "prediction.md")
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL = re.compile(r"(?<!\\)\|")
"""The bar at which a table's line is cut; an escaped bar belongs to its cell."""


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def table(page: str, heading: str) -> list[list[str]]:
    """The lines of the page's table whose headings begin so; backticks off."""
    start = page.index(f"| {heading}")
    lines = page[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in CELL.split(line)[1:-1]] for line in lines]


def numbers(expression: str, **values: float) -> float:
    """A formula of a page; what does not parse is a fault of the page."""
    return float(eval(expression.strip("`"), {"__builtins__": {}}, values))


def start(*words: str) -> str:
    """Run a program as a user would, and give what it prints."""
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- tables -------------------------------------------------------------------------------------------------------


def test_the_table_of_rows_is_the_table() -> None:
    written = {row[0].strip("`"): tuple(map(Cell.parse, row[1:])) for row in table(README, "row | params at rest")}
    assert written == {s.name: (s.params, s.kept, s.grads, s.optim) for s in TABLE.values()}


def test_the_picture_shows_what_each_rank_keeps() -> None:
    lines = re.findall(r"^(\w+)( 2 x 2)? +([█·]{4}.*)$", README, re.MULTILINE)
    assert len(lines) == 5
    for name, two_axes, bars in lines:
        mesh, row = Mesh.parse("replica=2 shard=2" if two_axes else "shard=4"), TABLE[name]
        kept = [
            region(Layout((cell.split,)), (4,), mesh, rank)[0]
            for cell in (row.params, row.grads, row.optim)
            for rank in range(4)
        ]
        assert bars.split() == ["·" * start + "█" * (stop - start) + "·" * (4 - stop) for start, stop in kept]


COSTS = {row[0].strip("`"): row[1:] for row in table(COSTS_PAGE, "row | sent per rank and step")}


@pytest.mark.parametrize("mesh", ["shard=2", "replica=2", "replica=2 shard=4", "replica=3 shard=2"], ids=str)
@pytest.mark.parametrize("row", TABLE)
def test_the_costs_are_those_of_the_planner(row: str, mesh: str) -> None:
    ranks = Mesh.parse(mesh)
    n, p, r = ranks.data_size, ranks.shard, ranks.replica
    units = [UnitLayout(u, (lay([(u, (n, 64))], 4, n),), (True,)) for u in ("a", "b")]
    volume = 2 * n * 64 * 4
    one, many, held = COSTS[row]
    for microbatches, text in ((1, one), (1, many), (3, many)):
        messages = predict_step(units, ranks, TABLE[row], microbatches, rank=0)
        sent = sum(m.sent for m in messages if m.note.phase not in ("count", "report"))
        written = numbers(text, M=microbatches, a=(n - 1) / n, s=(p - 1) / p, r=(r - 1) / n)
        assert sent == pytest.approx(written * volume)
    assert formula(10**6, ranks, TABLE[row]).total == pytest.approx(numbers(held, N=n, p=p) * 10**6, abs=2)


# ---- code ---------------------------------------------------------------------------------------------------------


def test_the_script_of_the_readme_is_the_example() -> None:
    (script,) = blocks(README, "python")
    assert script == (ROOT / "examples" / "train.py").read_text(encoding="utf-8")


def test_the_script_runs_alone_and_under_torchrun_with_one_result() -> None:
    losses = set()
    for words in (
        ["examples/train.py"],
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train.py", "zero3"],
    ):
        found = re.findall(r"loss (\d\.\d+)", start(*words))
        assert len(found) == (2 if "zero3" in words else 1)
        losses.update(found)
    assert len(losses) == 1


GUIDE = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES[1:]
    for number, code in enumerate(blocks(page.read_text(encoding="utf-8"), "python"))
]


@pytest.mark.usefixtures("tables_as_they_were")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own checkpoints by one process
@pytest.mark.parametrize("code", GUIDE)
def test_the_code_of_the_guide_runs(code: str) -> None:
    if "from transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, "<guide>", "exec"), {"__name__": "__guide__"})


VERIFY = sorted(
    {
        words.replace("\\|", "|")
        for words in re.findall(r"`(plait verify [^`]+)`", README + CLAIMS)
        + [line for block in blocks(README, "") for line in block.splitlines() if line.startswith("plait verify")]
        if "--matrix" not in words
    }
)
"""Without the matrix, which tests/verify/test_matrix.py runs."""


@pytest.mark.parametrize("command", VERIFY)
def test_the_commands_of_readme_and_claims_give_a_verdict(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    assert main([*words, "--steps", "1", "--batch", "12"]) == 0


def test_there_are_commands_to_run() -> None:
    assert len(VERIFY) >= 4


def test_the_reference_has_every_public_name_once() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    remote = ["DiLoCo", "Island", "Remote", "RemoteCall", "RemoteError", "connect"]
    named = re.findall(r"^\.\. \S+:: plait\.(?:referee\.verify\.\w+\.|remote\.|diloco\.)?(\w+)", page, re.MULTILINE)
    assert sorted(named) == sorted([*plait.__all__, "ResumeReport", "Verdict", *remote])


def test_the_messages_of_the_guide_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "guide" / "running.md").read_text(encoding="utf-8")
    rows = page.split("| message | what to do |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    texts = [
        node.value
        for file in (ROOT / "src" / "plait").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
    ]
    assert len(rows) > 9
    for message in (row.split("`")[1] for row in rows):
        for part in filter(None, map(str.strip, re.split(r"\.\.\.|\d+", message))):
            assert any(part in text for text in texts), f"{message}: {part}"


# ---- links --------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        end = (page.parent / path).resolve() if path else page
        assert end.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(end), f"{page.name} links to {target}"


HISTORY = {*(ROOT / "docs" / "decisions").glob("[0-9]*.md"), ROOT / "docs" / "log.md"}
"""Pages that name files as they were."""
LIVING = [page for page in PAGES if page not in HISTORY]


@pytest.mark.parametrize("page", LIVING, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"(?:^|[\s`=])((?:tests|lessons|examples|benchmarks|docs)/[\w/.-]*\w)", page.read_text(encoding="utf-8")
    )
    named += [
        f"src/plait/{name}"
        for name in re.findall(
            r"`((?:table|schedule|comm|zero|step|pipeline|tensor|forward|run|referee)/[\w/]+\.py)`",
            page.read_text(encoding="utf-8"),
        )
    ]
    for name in named:
        if "NNN" not in name:
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in folder.glob("[0-9]*.md"):
        lines = page.read_text(encoding="utf-8").splitlines()
        assert f"({page.name})" in index and lines[0][2:] in index and len(lines) < 40


SITE = Path(__file__).parents[2] / "build" / "docs"
needs_site = pytest.mark.skipif(not (SITE / "lessons").is_dir(), reason="the site is not built: make docs")


@needs_browser
@needs_site
def test_the_landing_page_says_what_it_is_with_one_picture(tmp_path: Path) -> None:
    with opened(SITE / "index.html") as tab:
        assert tab.locator("article svg[role=img]").count() == 1
        title = tab.locator("article svg title").text_content()
        assert title == "ddp, zero1, zero2, zero3: what each of four ranks keeps of each kind of state"
        assert "on many ranks" in tab.locator("article p").first.inner_text()
        assert tab.locator("article svg").bounding_box()["y"] < 300
        aside = tab.locator(".sidebar-tree a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert len(aside) > 20 and not [link for link in aside if "decisions" in link or "log" in link]
        tab.screenshot(path=str(tmp_path / "landing.png"))
        tab.click("article a >> text=data parallel")
        assert tab.title() == "Lesson 9: data parallel" and tab.locator("#ranks section").count() == 4


@needs_browser
@needs_site
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_collectives_and_rows_are_drawn_by_day_and_by_night(scheme: str, tmp_path: Path) -> None:
    with opened(SITE / "guide" / "pictures.html", scheme=scheme) as tab:
        for number, name in enumerate(("reduce_scatter: ", "zero3: what")):
            figure = tab.locator(f"svg:has(title:text('{name}'))").first
            figure.screenshot(path=str(tmp_path / f"{scheme}-{number}.png"))
            ink, paper = figure.locator("text").first.evaluate(
                "e => [getComputedStyle(e).fill, getComputedStyle(document.body).backgroundColor]"
            )
            assert ink != paper
        assert tab.locator("svg[role=img]").count() >= 26


@needs_browser
@needs_site
def test_every_lesson_has_its_page_with_what_it_printed() -> None:
    with opened(SITE / "guide" / "course.html") as tab:
        links = tab.locator("td a[href*='lessons/']").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert links == [f"../lessons/{n:02}.html" for n in range(1, 21)]
        assert all((SITE / "guide" / link).resolve().stat().st_size < 2_000_000 for link in links)
    with opened(SITE / "lessons" / "12.html") as tab:
        tab.click("#run > summary")
        assert "3 (n - 1) / n" in tab.locator("#run pre").inner_text()


@needs_browser
@needs_site
@pytest.mark.parametrize("width", [1400, 1000, 500])
def test_code_is_not_cut_off(width: int) -> None:
    with opened(SITE / "overview.html", width=width) as tab:
        cut = tab.locator("pre").evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length")
        assert tab.locator("pre").count() > 0 and cut == 0


@needs_browser
@needs_site
def test_the_keyboard_reaches_the_content_and_the_search_leaves_the_log_aside() -> None:
    with opened(SITE / "overview.html") as tab:
        tab.keyboard.press("Tab")
        assert "Skip to content" in tab.evaluate("document.activeElement.textContent")
        assert tab.evaluate("document.documentElement.lang")
    with opened(SITE / "search.html") as tab:
        tab.goto((SITE / "search.html").as_uri() + "?q=gather")
        tab.wait_for_selector("ul.search li a")
        found = tab.locator("ul.search li a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert found and not [link for link in found if link.startswith(("decisions", "log"))]
