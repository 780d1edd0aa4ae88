"""The records of all ranks as one HTML file that opens without a network."""

import ast
import re
from dataclasses import asdict
from importlib.resources import files

from plait.run.course.merge import align
from plait.run.course.tracer import RankTrace
from plait.run.report.page.document import document

QUESTION = re.compile(r"^ {2}(\d)\. (.+(?:\n {5}.+)*)", re.MULTILINE)
OUTCOME = re.compile(r"^ *# Prediction (\d): (.+(?:\n *# (?!Prediction).+)*)", re.MULTILINE)
BODY = """<header><h1 id="title"></h1>
<div role="group" aria-label="steps"><button id="first" title="Home">first</button>
<button id="back" title="left arrow">&larr; back</button><button id="next" title="right arrow">next &rarr;</button>
<button id="last" title="End">last</button>
<button id="message" title="n; p goes back">next message</button></div>
<input id="slider" type="range" min="0" aria-label="step"><span id="count" role="status"></span></header>
<main><section id="source" tabindex="0" aria-label="source"></section>
<div id="right"><details id="predictions"><summary>Predict first</summary></details>
<section id="messages" aria-label="messages of this step"></section>
<section id="ranks" tabindex="0" aria-label="ranks"></section></div></main>
<footer>Keys: &larr; &rarr; step, Home, End, n and p next and previous message. Each step has its address.</footer>"""


def page(title: str, source: str, ranks: list[RankTrace]) -> str:
    """The page, with everything in it."""
    css, js = ((files(__package__) / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    recorded = {
        "source": source.splitlines(),
        "ranks": [asdict(rank) for rank in ranks],
        "frames": align(ranks),
        "predictions": predictions(source),
    }
    return document(title, BODY, [css], [js], recorded)


def predictions(source: str) -> list[dict[str, str]]:
    """The numbered questions of a lesson's docstring, each with the comment of its file that begins "Prediction 2:"."""
    text = (ast.get_docstring(ast.parse(source)) or "").partition("Predict before you run it")[2]
    outcomes = {number: _joined(words.replace("#", " ")) for number, words in OUTCOME.findall(source)}
    return [
        {"question": _joined(words), "outcome": outcomes.get(number, "")} for number, words in QUESTION.findall(text)
    ]


def _joined(text: str) -> str:
    return " ".join(text.split())
