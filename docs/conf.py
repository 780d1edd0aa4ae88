"""The site that `make docs` builds: the README, these pages, and a reference of the calls, taken from their docstrings."""

import os
import re
from pathlib import Path

from sphinx.ext.napoleon import GoogleDocstring

import plait

HERE = Path(__file__).parent.resolve()

project = "plait"
html_title = "plait"
html_theme = "furo"
html_copy_source = False
html_search_scorer = str(HERE / "search_order.js")  # the guide before the decisions
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3

default_role = "code"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]+)?\)")


def write_links(app: object, docname: str, source: list[str]) -> None:
    """The site begins with the README; a link to a file of the repository outside of these pages becomes its path."""
    page, root = HERE / docname, HERE.parent

    def written(link: re.Match[str], folder: Path) -> str:
        text, path, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
        if path.is_relative_to(HERE):
            return f"[{text}]({os.path.relpath(path, page.parent)}{anchor})"
        name = str(path.relative_to(root))
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    source[0] = LINK.sub(lambda link: written(link, page.parent), source[0])
    if docname == "index":
        readme = (root / "README.md").read_text(encoding="utf-8")
        source[0] = LINK.sub(lambda link: written(link, root), readme) + source[0]
    if docname == "decisions/README":  # below their list, so that the sidebar has one line for all of them
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n"


def read_google(app: object, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Sections as Google writes them; in an attribute's only line a colon is no end of a type, so it stays as it is."""
    if what not in ("attribute", "property") or "Raises:" in lines:
        lines[:] = GoogleDocstring(lines, what=what, name=name).lines()


def setup(app) -> None:
    app.connect("source-read", write_links)
    app.connect("autodoc-process-docstring", read_google)
