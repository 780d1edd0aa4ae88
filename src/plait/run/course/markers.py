"""Markers: comments in a file that control what the page shows.

piece = whole.chunk(4)[comm.rank]   # @inspect piece.sum(), whole.grad    from here on, in this call
helper(piece)                       # @over                               steps over the calls on this line
x = 3                               # @hide                               no step stops here
log = []                            # @hide log, units                    variables that the page leaves out
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MARKER = re.compile(r"#\s*@(\w+)\s*(.*)")
WORDS = ("inspect", "over", "hide")


@dataclass
class Markers:
    """The markers of one file, by line."""

    inspect: dict[int, dict[str, ast.expr]] = field(default_factory=dict)
    """Expressions to show once the line has run, by their text."""
    over: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    """Variables that are not shown."""


def markers(source: str, name: str = "the file") -> Markers:
    """Reads the markers of a file.  ValueError for one whose expression is no Python."""
    found = Markers()
    for line, text in _comments(source):
        match = MARKER.match(text)
        if match is None or match[1] not in WORDS:  # @param and others belong to other programs
            continue
        word, rest = match[1], match[2].strip()
        where = f"{name}, line {line}: {text.strip()!r}"
        if word == "over":
            found.over.add(line)
        elif word == "hide" and not rest:
            found.hidden.add(line)
        elif word == "hide":
            found.names.update(part.strip() for part in rest.split(","))
        else:
            found.inspect[line] = dict(_expressions(rest, where))
    return found


def _expressions(text: str, where: str) -> Iterator[tuple[str, ast.expr]]:
    try:
        elements = ast.parse(f"({text},)", mode="eval").body.elts  # type: ignore[attr-defined]
    except SyntaxError:
        raise ValueError(f"{where}: give expressions with commas between them, as in # @inspect x, x.grad") from None
    for element in elements:
        yield ast.unparse(element), element


def read(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a marker's expression, or any error in it: KeyError for a name that does not exist yet."""
    match node:
        case ast.Name():
            return names[node.id]
        case ast.Constant():
            return node.value
        case ast.Attribute():
            return getattr(read(node.value, names), node.attr)
        case ast.Subscript():
            return read(node.value, names)[read(node.slice, names)]
        case ast.Call(args=[], keywords=[]):
            return read(node.func, names)()
    raise TypeError("a marker reads only names, x.y, x[0] and x.sum()")


def _comments(source: str) -> Iterator[tuple[int, str]]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    except (tokenize.TokenError, SyntaxError):  # a file that Python cannot read is refused when it is imported
        return
