"""A trace as one HTML file that opens offline: no network, no script but our own, which its hash names."""

import base64
import hashlib
import html
import json
from dataclasses import asdict
from importlib.resources import files

from plait.run.course.tracer import RankTrace, align

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '{script}'; style-src '{style}'">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>{css}</style></head>
<body><header><h1>{title}</h1><span id="count" aria-live="polite"></span>
<input id="slider" type="range" min="0" aria-label="step"><span>&larr; &rarr;</span></header>
<main><div id="source"></div><div id="ranks"></div></main>
<script type="application/json" id="data">{data}</script><script>{js}</script></body></html>
"""


def page(title: str, source: str, ranks: list[RankTrace]) -> str:
    """The page, with everything in it."""
    css, js = ((files(__package__) / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    recorded = {"source": source.splitlines(), "ranks": [asdict(rank) for rank in ranks], "frames": align(ranks)}
    data = json.dumps(recorded, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    return PAGE.format(title=html.escape(title), css=css, js=js, data=data, script=_hash(js), style=_hash(css))


def _hash(text: str) -> str:
    """The source of a policy that allows this text and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
