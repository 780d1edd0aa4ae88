"""The site that `make docs` has built, in a browser without a network: its pages, and the pages that it hides."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import needs_browser, opened

SITE = Path(__file__).parents[2] / "build" / "docs"
pytestmark = [
    needs_browser,
    pytest.mark.skipif(not (SITE / "lessons").is_dir(), reason="the site is not built: make docs"),
]


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


def test_every_lesson_has_its_page_with_what_it_printed() -> None:
    with opened(SITE / "guide" / "course.html") as tab:
        links = tab.locator("td a[href*='lessons/']").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert links == [f"../lessons/{n:02}.html" for n in range(1, 21)]
        assert all((SITE / "guide" / link).resolve().stat().st_size < 2_000_000 for link in links)
    with opened(SITE / "lessons" / "12.html") as tab:
        tab.click("#run > summary")
        assert "3 (n - 1) / n" in tab.locator("#run pre").inner_text()


@pytest.mark.parametrize("width", [1400, 1000, 500])
def test_code_is_not_cut_off(width: int) -> None:
    with opened(SITE / "overview.html", width=width) as tab:
        cut = tab.locator("pre").evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length")
        assert tab.locator("pre").count() > 0 and cut == 0


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
