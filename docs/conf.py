"""The site that `make docs` builds: the pages, a reference of the calls, figures, and every lesson, stepped through."""

import hashlib
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from shutil import copyfile

from docutils import nodes
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

from plait.run.course.lessons import numbered
from plait.run.course.page import write_lesson

sys.path.insert(0, str(Path(__file__).parent))

from figures import figures

HERE = Path(__file__).parent.resolve()

project = "plait"
html_title = "plait"
html_theme = "furo"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # which would fetch each page, and a page that is opened from a file cannot
html_search_scorer = str(HERE / "search_order.js")  # the guide first
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3

default_role = "code"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

STEPPED = tuple(lesson for lesson in numbered() if lesson.path.stem != "21_capstone")
"""Lessons with a page; the capstone takes minutes, and weights that are not here."""

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]+)?\)")
ASIDE = ("log", "decisions/")
"""Pages that are reached by links: they are in no sidebar, and the search leaves them out."""


def write_links(app: object, docname: str, source: list[str]) -> None:
    """The overview is the README; a link to a file of the repository outside of these pages becomes its path."""
    page, root = HERE / docname, HERE.parent

    def written(link: re.Match[str], folder: Path) -> str:
        text, path, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
        if path.is_relative_to(HERE):
            return f"[{text}]({os.path.relpath(path, page.parent)}{anchor})"
        name = str(path.relative_to(root))
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    source[0] = LINK.sub(lambda link: written(link, page.parent), source[0])
    if docname == "overview":
        readme = (root / "README.md").read_text(encoding="utf-8")
        source[0] = LINK.sub(lambda link: written(link, root), readme)
    if docname == "guide/course":
        for lesson in STEPPED:
            link = f'<a href="../lessons/{lesson.number:02}.html">{lesson.title}</a>'
            source[0] = source[0].replace(f"| {lesson.number} | {lesson.title} |", f"| {lesson.number} | {link} |")
    if docname == "decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n"
    if docname.startswith(ASIDE):
        source[0] = f"---\norphan: true\nnosearch: true\n---\n{source[0]}"


class Drawn(SphinxDirective):
    """A figure of ``figures.py``, by its name: ``{drawn} row zero3``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        drawn = figures()
        if self.arguments[0] not in drawn:
            raise self.error(f"there is no figure {self.arguments[0]!r}: they are {', '.join(drawn)}")
        return [nodes.raw("", f'<div class="drawn">{drawn[self.arguments[0]]()}</div>', format="html")]


def step_through(app) -> None:
    """Runs every lesson and writes its page.  A lesson that does not hold fails the build.

    Pages are kept in ``build/lessons`` by the hash of all code and of the lesson.
    """
    if app.builder.name != "html":
        return
    code = hashlib.sha256()
    for file in sorted((HERE.parent / "src").rglob("*.*")):
        if file.suffix in (".py", ".js", ".css"):
            code.update(file.read_bytes())
    kept, out = HERE.parent / "build" / "lessons", Path(app.outdir) / "lessons"
    for folder in (kept, out):
        folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for lesson in STEPPED:
        own = code.copy()
        own.update(lesson.path.read_bytes())
        places[lesson.number] = kept / f"{lesson.number:02}-{own.hexdigest()[:16]}.html"
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), get_context("spawn")) as pool:
        missing = {n: place for n, place in places.items() if not place.is_file()}
        for done in [pool.submit(write_lesson, n, str(place)) for n, place in missing.items()]:
            done.result()
    for number, place in places.items():
        copyfile(place, out / f"{number:02}.html")


def read_google(app: object, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Sections as Google writes them; in an attribute's only line a colon is no end of a type, so it stays as it is."""
    if what not in ("attribute", "property") or "Raises:" in lines:
        lines[:] = GoogleDocstring(lines, what=what, name=name).lines()


def setup(app) -> None:
    app.add_directive("drawn", Drawn)
    app.connect("builder-inited", step_through)
    app.connect("source-read", write_links)
    app.connect("autodoc-process-docstring", read_google)
