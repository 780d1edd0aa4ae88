"""Writes the records of all ranks as one HTML file that opens without a network."""

import ast
import io
import re
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.resources import files

from plait.checkpoint.files.writing import write_text
from plait.run.course.claims import Claims, load_noted
from plait.run.course.lessons import Lesson, find
from plait.run.course.merge import align
from plait.run.course.tracer import RankTrace, trace
from plait.run.report.page.document import document
from plait.table.mesh import Mesh

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
<details id="run"><summary>What the run prints, and how each number is known</summary>
<dl><dt>verified</dt><dd>an assert of this lesson met the value in this run</dd>
<dt>given</dt><dd>a constant of the file</dd><dt>derived</dt><dd>a formula gives it; nothing of that size ran</dd>
<dt>measured</dt><dd>a time or rate of the machine that ran this</dd>
<dt>reported</dt><dd>others measured it; the source is named</dd></dl><pre></pre></details>
<section id="messages" aria-label="messages of this step"></section>
<section id="ranks" tabindex="0" aria-label="ranks"></section></div></main>
<footer>Keys: &larr; &rarr; step, Home, End, n and p next and previous message. Each step has its address.</footer>"""


def lesson_page(lesson: Lesson) -> str:
    """The page of a lesson: its body on the lesson's own mesh, or its main program on one rank if it has no body.

    The main program runs too.  It asserts what the lesson claims, so its numbers can be labelled.  AssertionError for a
    claim that does not hold, ValueError for a number without a label.
    """
    module, claims = load_noted(lesson.path)
    mesh = Mesh.parse(getattr(module, "MESH", "shard=1"))
    ranks = trace(str(lesson.path), getattr(module, "body", lambda comm: module.main()), mesh)
    if hasattr(module, "body"):
        claims.printed.clear()
        with redirect_stdout(io.StringIO()):
            module.main()
    claims.check(lesson.path.name)
    return page(f"Lesson {lesson.number}: {lesson.title}", claims.source, ranks, claims)


def write_lesson(number: int, place: str) -> None:
    """Runs a lesson and writes its page, for the site."""
    write_text(place, lesson_page(find(number)))


def page(title: str, source: str, ranks: list[RankTrace], claims: Claims | None = None) -> str:
    """The page, with everything in it, also the program's output and the labels of its numbers if it ran."""
    css, js = ((files(__package__) / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    recorded = {
        "source": source.splitlines(),
        "ranks": [asdict(rank) for rank in ranks],
        "frames": align(ranks),
        "predictions": predictions(source),
        "printed": claims.lines() if claims else [],
        "numbers": [asdict(number) for number in claims.prose()] if claims else [],
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
