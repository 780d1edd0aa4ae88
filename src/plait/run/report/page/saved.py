"""Writes reports, and reads their data back, so that two fit on one page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from plait.checkpoint.files.reading import read_text
from plait.run.report.page.document import document

REPORT = "report.html"
"""Name of the file in the folder of a run or a plan."""
LARGEST = 1 << 26
STYLES = ("vendor/uplot-1.6.32.css", "app.css")
SCRIPTS = ("vendor/htm-preact-3.1.1.js", "vendor/uplot-1.6.32.js", "draw.js", "app.js")


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """One HTML file with some reports side by side."""
    styles, scripts = (
        [(files(__package__) / name).read_text(encoding="utf-8") for name in names] for names in (STYLES, SCRIPTS)
    )
    title = " and ".join(str(one["name"]) for one in reports)
    return document(title, '<main id="app"></main>', styles, scripts, reports)


def saved_reports(place: str) -> list[Mapping[str, Any]]:
    """Reads the data of a report: a file, or a folder that has one.  Raises ValueError for another file."""
    path = Path(place) / REPORT if Path(place).is_dir() else Path(place)
    text = read_text(path, "the report", LARGEST)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    reports, needed = None, {"kind", "name", "numbers", "notes"}
    with suppress(ValueError, RecursionError):
        reports = json.loads(found[1]) if found else None
    if not isinstance(reports, list) or not all(isinstance(one, dict) and needed <= one.keys() for one in reports):
        raise ValueError(f"{str(path)!r} is not a report of plait train or plait plan: give a folder that has {REPORT}")
    return reports
