"""The pages in a real browser, without a network: keys, messages, predictions, and that nothing of a program runs."""

from pathlib import Path

import pytest
from browser import Tab, needs_browser, opened

from plait.run.commands.main import main

pytestmark = needs_browser

PROGRAM = """
import torch

def body(comm):
    "Predict before you run it: <b>bold</b>"
    wide = torch.linspace(-1234.5, 1, 8)
    x = torch.full((3,), float(comm.rank))
    hostile = "</script><script>document.title = 'taken'</script><img src=x onerror=\\"document.title='taken'\\">"
    print(hostile)
    comm.all_reduce(x, ("shard",)).wait()
    if comm.rank:
        comm.recv(x, comm.rank - 1).wait()
    if comm.rank + 1 < comm.world_size:
        comm.send(x, comm.rank + 1)
    x = x.to(torch.float64)
    return x
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "program.py").write_text(PROGRAM)
    out = folder / "page.html"
    assert main(["trace", f"{folder / 'program.py'}:body", "--mesh", "shard=3", "--out", str(out)]) == 0
    return out


def test_keys_and_buttons_step_and_each_step_has_an_address(place: Path) -> None:
    with opened(place) as tab:
        assert tab.locator("#ranks section").count() == 3
        tab.keyboard.press("ArrowRight")
        assert tab.url.endswith("#2") and "step 2 of" in tab.inner_text("#count")
        tab.click("#next")
        tab.keyboard.press("ArrowLeft")
        assert tab.url.endswith("#2")
        tab.keyboard.press("End")
        last = tab.inner_text("#count").split()[-1]
        assert tab.url.endswith(f"#{last}")
        tab.goto(place.as_uri() + "#3")
        assert "step 3 of" in tab.inner_text("#count")
        tab.keyboard.press("Alt+ArrowRight")  # the browser's own
        assert tab.url.endswith("#3")
        tab.keyboard.press("Home")
        assert tab.url.endswith("#1")


def test_a_number_is_whole_or_in_its_title(place: Path) -> None:
    with opened(place, width=500) as tab:
        tab.keyboard.press("End")
        cells = tab.locator(".row span").evaluate_all("all => all.map(c => [c.scrollWidth <= c.clientWidth, c.title])")
        assert cells and all(fits and title for fits, title in cells)


def test_messages_are_drawn_where_they_happen(place: Path) -> None:
    with opened(place) as tab:
        tab.keyboard.press("n")
        assert "all_reduce over shard of 12 bytes: ranks 0, 1, 2; sent together 48 bytes" in tab.inner_text("#messages")
        assert tab.locator("#messages .together").count() == 1 and tab.locator("#messages circle").count() == 3
        said = []
        while "step" in tab.inner_text("#count") and len(said) < 9:
            before = tab.url
            tab.keyboard.press("n")
            if tab.url == before:
                break
            said.append(tab.inner_text("#messages .said"))
        assert "rank 0 → rank 1: 12 bytes sent" in said and "rank 1 → rank 2: 12 bytes received" in said
        assert "sent 28 bytes in 2 operations" in tab.inner_text("#ranks section >> nth=0")
        tab.keyboard.press("p")
        assert tab.url != before


def test_what_changed_is_marked_and_text_stays_text(place: Path) -> None:
    with opened(place) as tab:
        tab.keyboard.press("End")
        column = tab.locator("#ranks section").last
        assert column.locator("pre").inner_text().startswith("</script><script>")
        assert "float64 (3,)" in column.inner_text() and "holds 56 bytes" in column.inner_text()
        assert tab.title().endswith("program.py:body") and tab.locator("img").count() == 0
        found = column.locator(".map").last.get_attribute("aria-label")
        assert found == "a corner of the values: 3, 3, 3; sum of all 9"
        tab.goto(place.as_uri() + "#2")
        assert tab.locator("dd.new").count() > 0 and "changed" in tab.locator("dd.new").first.text_content()


def test_everything_has_a_name_and_a_place_for_the_keyboard(place: Path) -> None:
    with opened(place) as tab:
        unnamed = tab.eval_on_selector_all(
            "button, input, textarea, meter, section",
            "all => all.filter(e => !e.textContent && !e.ariaLabel && !e.labels?.length).map(e => e.outerHTML)",
        )
        assert unnamed == []
        reached = set()
        for _ in range(9):
            tab.keyboard.press("Tab")
            reached.add(tab.evaluate("document.activeElement.id"))
        assert {"next", "slider", "source", "ranks"} <= reached
        assert tab.locator("#source [aria-current=step]").count() >= 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_by_day_and_by_night(place: Path, scheme: str) -> None:
    with opened(place, scheme=scheme) as tab:
        ink, paper = (_grey(tab, name) for name in ("color", "backgroundColor"))
        assert (ink < 100 and paper in (0, 255)) if scheme == "light" else ink > 200


def _grey(tab: Tab, name: str) -> float:
    text = tab.evaluate(f"getComputedStyle(document.body).{name}")
    parts = [float(part) for part in text[text.index("(") + 1 : -1].split(",")]
    return sum(parts[:3]) / 3


@pytest.mark.parametrize("number", [5, 9, 12])
def test_a_lesson_is_stepped_through(number: int, tmp_path: Path) -> None:
    out = tmp_path / "lesson.html"
    assert main(["lesson", "open", str(number), "--out", str(out), "--no-browser"]) == 0
    assert out.stat().st_size < 2_000_000
    with opened(out) as tab:
        assert tab.locator("#ranks section").count() == 4
        assert tab.locator(".prediction").count() == 3
        tab.click("#predictions > summary")
        tab.locator("textarea").first.fill("n and p are letters here")
        assert tab.url.endswith("html") or tab.url.endswith("#1")
        tab.locator(".prediction summary").first.click()
        assert tab.locator(".prediction details p").first.inner_text()
        tab.locator("#slider").focus()
        tab.keyboard.press("End")
        assert "returns" in tab.inner_text("#ranks")
        inspected = {9: "@ model[0][0].weight.grad", 12: "@ units[0].flat"}.get(number, "x")
        assert inspected in tab.inner_text("#ranks")
        assert tab.locator("#source .number.verified").count() > 5
        tab.click("#run > summary")
        assert "verified" in tab.inner_text("#run .label >> nth=0") or number == 5
        tab.screenshot(path=str(tmp_path / f"lesson-{number}.png"))
        assert (tmp_path / f"lesson-{number}.png").stat().st_size > 20_000
