"""A trace as one HTML file that opens without a network."""

from dataclasses import asdict
from importlib.resources import files

from plait.run.course.tracer import RankTrace, align
from plait.run.report.page.document import document

BODY = """<header><h1 id="title"></h1><span id="count" aria-live="polite"></span>
<input id="slider" type="range" min="0" aria-label="step"><span>&larr; &rarr;</span></header>
<main><div id="source"></div><div id="ranks"></div></main>"""


def page(title: str, source: str, ranks: list[RankTrace]) -> str:
    """The page, with everything in it."""
    css, js = ((files(__package__) / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    recorded = {"source": source.splitlines(), "ranks": [asdict(rank) for rank in ranks], "frames": align(ranks)}
    return document(title, BODY, [css], [js], recorded)
