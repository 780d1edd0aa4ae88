"""Labels the numbers of a lesson: each is verified, given, or names its origin.

verified    an assert of the file checked this value while the lesson ran
given       a constant of the file: a size, a setting
reported    others measured it; the words around it name the source
derived     a formula gives it, and nothing of this size has run
measured    a time or a rate of this machine

The words "reported", "derived" and "measured" label the numbers of their paragraph or printed line.  Any other number
must be a value that an assert met, or a constant.  So a lesson runs with each expression of its asserts noted.
"""

import ast
import builtins
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import Tensor

from plait.run.job.user_code import AsWritten, load_file

WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
WORDS |= {"eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16}
DIGITS = r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+|\^\d+)?(?![\w.]*[A-Za-z_\d])"
NUMBER = re.compile(rf"{DIGITS}|\b(?i:{'|'.join(WORDS)})\b")
NAMES = r"(lesson|prediction|puzzle|rank|stage|layer|worker|unit|part)s?|zero"
REFERENCE = re.compile(rf"(?i)\b({NAMES})[ -]$")
"""Words before a number that is a name, as in "lesson 3"."""
ITEM = re.compile(r"^\s*(# )?\d\. |^ *(plait|torchrun) .*")
LABEL = re.compile(r"\b(reported|derived|measured)\b")
LABELS = ("measured", "derived", "reported", "verified", "given")
SCALES = (1, 1e3, 1e6, 1e9, 1e12, 1e-3, 1e-6, 1e-9, 1e-12, 100)
"""A value may be written in another unit, or in percent."""
MOST, MOST_IN_TENSOR = 64, 8
"""The largest numbers of elements that are noted: any number would be near one of many."""


@dataclass(frozen=True)
class Number:
    """A number in a text of a lesson, and its label, which may be empty."""

    line: int
    start: int
    text: str
    label: str


@dataclass
class Claims:
    """The texts that a lesson prints, and the values that its asserts meet."""

    source: str
    met: set[float] = field(default_factory=set)
    printed: list[tuple[int, str]] = field(default_factory=list)
    """The line of each ``print``, and its text."""

    def note(self, value: Any) -> Any:
        """Notes the numbers of a value in an assert, and returns the value."""
        self.met.update(numbers_in(value))
        return value

    def print(self, *words: object, **how: Any) -> None:
        """Prints, and notes the text with the line of the call."""
        text = io.StringIO()
        builtins.print(*words, **(how | {"file": text}))
        self.printed.append((sys._getframe(1).f_lineno, text.getvalue()))
        builtins.print(*words, **how)

    def check(self, name: str) -> None:
        """Raises ValueError for the first number without a label."""
        said = (one for line, text in self._lines() for one in self._labelled([(line, 0, text)]))
        bare = [one for one in (*self.prose(), *said) if not one.label]
        if bare:
            more = f", and {len(bare) - 1} more" * (len(bare) > 1)
            raise ValueError(
                f"{name}, line {bare[0].line}: {bare[0].text} is in no assert that ran and no constant of the file"
                f"{more}: assert it, or say that it is reported, derived or measured"
            )

    def lines(self) -> list[dict[str, str]]:
        """The printed lines, each with the weakest label of its numbers."""
        found = []
        for line, text in self._lines():
            labels = {one.label for one in self._labelled([(line, 0, text)])}
            found.append({"label": next(filter(labels.__contains__, LABELS), ""), "text": text})
        return found

    def prose(self) -> Iterator[Number]:
        for paragraph in paragraphs(self.source):
            yield from self._labelled(paragraph)

    def _lines(self) -> Iterator[tuple[int, str]]:
        """The printed lines, each with the line of the ``print`` that ends it."""
        text = ""
        for line, part in self.printed:
            for piece in part.splitlines(keepends=True):
                text += piece
                if text.endswith("\n"):
                    yield line, text
                    text = ""

    def _labelled(self, lines: "Paragraph") -> Iterator[Number]:
        named = LABEL.search(" ".join(text for _, _, text in lines))
        for line, column, text in lines:
            for start, number in written(text):
                yield Number(line, column + start, number, named[1] if named else self._label(number))

    def _label(self, text: str) -> str:
        for label, values in (("verified", self.met), ("given", constants(self.source))):
            if any(agrees(text, value * scale) for value in values for scale in SCALES):
                return label
        return ""


def numbers_in(value: Any) -> Iterator[float]:
    """The numbers in a value, also those in its texts."""
    if type(value) is Tensor:
        yield from value.tolist() if value.dim() and value.numel() <= MOST_IN_TENSOR else ()
        yield from [value.item()] if value.dim() == 0 else ()
    elif isinstance(value, str):
        yield from (read(number) for _, number in written(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, Mapping):
        yield from numbers_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | range) and len(value) <= MOST:
        for one in value:
            yield from () if isinstance(one, Mapping) else numbers_in(one)


def read(text: str) -> float:
    """The value of a number as it is written: 12,000 or 2^24 or twelve."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    base, _, power = text.replace(",", "").partition("^")
    return math.pow(float(base), int(power or 1))


def agrees(text: str, value: float) -> bool:
    """True if a value, rounded like the text, is the number in the text."""
    if text.isalpha() or not re.search(r"[.e]", text):
        return abs(value - read(text)) < 1e-9 * max(1.0, abs(value))
    mantissa, _, exponent = text.partition("e")
    digits = len(mantissa.partition(".")[2])
    return abs(value - read(text)) <= 0.51 * 10.0 ** (int(exponent or 0) - digits)


def written(text: str) -> Iterator[tuple[int, str]]:
    """The numbers of a text with their places; not those that are names, as in "lesson 3"."""
    item = ITEM.match(text)
    for match in NUMBER.finditer(text, item.end() if item else 0):
        if not REFERENCE.search(text[: match.start()]):
            yield match.start(), match[0].rstrip(",")


@cache
def constants(source: str) -> set[float]:
    """The numbers that are written in the code, and their negatives."""
    found = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {sign * value for value in found if isinstance(value, int | float) for sign in (1.0, -1.0)}


Paragraph = list[tuple[int, int, str]]


def paragraphs(source: str) -> Iterator[Paragraph]:
    """Docstrings and comments as paragraphs: lines with their numbers and columns."""
    current: Paragraph = []
    for line, column, text in (*_prose(source), (-1, 0, "")):
        if current and (line != current[-1][0] + 1 or not text.strip("# ")):
            yield current
            current = []
        if text.strip("# "):
            current.append((line, column, text))


def _prose(source: str) -> Iterator[tuple[int, int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield *token.start, token.string
        elif token.type == tokenize.STRING and token.string.startswith(('"""', "'''")):
            for i, text in enumerate(token.string.splitlines()):
                yield token.start[0] + i, 0 if i else token.start[1], text


class _Asserts(ast.NodeTransformer):
    """Passes each value in an assert to ``_note``, except values that the assert uses only in part."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        for inner in ast.walk(node.test):
            if isinstance(inner, ast.JoinedStr):
                continue
            for name, child in ast.iter_fields(inner):
                if name == "value" and isinstance(inner, ast.Subscript | ast.Attribute | ast.FormattedValue):
                    continue
                if isinstance(child, ast.expr):
                    setattr(inner, name, _noted(child))
                elif isinstance(child, list):
                    setattr(inner, name, [_noted(one) if isinstance(one, ast.expr) else one for one in child])
        node.test = _noted(node.test)
        return node


def _noted(node: ast.expr) -> ast.expr:
    silent = isinstance(node, ast.Starred | ast.Slice | ast.Lambda) or isinstance(getattr(node, "ctx", None), ast.Store)
    return node if silent else ast.copy_location(ast.Call(ast.Name("_note", ast.Load()), [node], []), node)


class _NotedFile(AsWritten):
    def __init__(self, claims: Claims, name: str, path: str) -> None:
        super().__init__(name, path)
        self._claims = claims

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.fix_missing_locations(_Asserts().visit(ast.parse(self.get_data(self.path))))
        return compile(tree, self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_note=self._claims.note, print=self._claims.print)
        super().exec_module(module)


def load_noted(path: Path) -> tuple[Any, Claims]:
    """Runs the file of a lesson, and returns its module and its claims."""
    claims = Claims(path.read_text(encoding="utf-8"))
    return load_file(str(path), "lesson", partial(_NotedFile, claims)), claims
