"""``plait report``: puts two reports of runs or plans on one page.

plait report runs/a runs/b --out compared.html
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from plait.checkpoint.files.writing import check_file, write_text
from plait.messages.escape import say
from plait.run.report.page.saved import page, saved_reports


@dataclass(frozen=True)
class ReportConfig:
    """Compare two reports that plait train --out or plait plan --out wrote.

    Numbers, curves and all else are side by side.
    """

    first: tyro.conf.Positional[str]
    """The first report: a folder with a report.html, or such a file."""
    second: tyro.conf.Positional[str]
    """The second report: another folder or file."""
    out: str = "compared.html"
    """The file to write."""


def run(config: ReportConfig, argv: Sequence[str] = ()) -> int:
    """Reads both reports and writes the page; ValueError for a file that is no report, or an out that is no page."""
    check_file("out", config.out)
    if not config.out.endswith(".html"):
        raise ValueError(f"out {config.out!r}: it is a page; give a name that ends in .html")
    places = [(one, place) for place in (config.first, config.second) for one in saved_reports(place)]
    same = len({one["name"] for one, _ in places}) < len(places)
    reports = [{**one, "name": f"{one['name']} ({place})"} if same else one for one, place in places]
    write_text(config.out, text := page(reports))
    say(f"written: {config.out} ({len(text.encode()):,} bytes)\n", sys.stdout)
    return 0
