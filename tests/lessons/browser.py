"""Opens a page in Debian's Chromium, through Playwright, without a network; a page that complains fails the test."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
MISSING = [
    name
    for name, there in (("playwright", importlib.util.find_spec("playwright")), ("chromium", CHROMIUM))
    if there is None
]
needs_browser = pytest.mark.skipif(
    bool(MISSING),
    reason=f"{' and '.join(MISSING)} not installed: pip install 'plait[browser]', apt-get install chromium",
)
Tab = Any
"""A page of Playwright."""


@contextmanager
def opened(place: Path, scheme: str = "light", width: int = 1400) -> Iterator[Tab]:
    """A tab with the page.

    Raises:
        AssertionError: the page asked for anything but files, or wrote to the console, or raised.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        sandbox = [] if os.getuid() else ["--no-sandbox"]
        browser = play.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
        tab, said = context.new_page(), []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        tab.goto(place.as_uri())
        yield tab
        browser.close()
        assert said == []
