"""The rows of a zoo as a page: a summary, and a table for each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

HEADINGS = {
    "causal": "Causal language models",
    "masked": "Encoders (masked language models)",
    "seq2seq": "Sequence to sequence",
    "image": "Vision",
    "audio": "Audio",
    "timm": "timm",
}
COLUMNS = {
    "ddp": "`ddp`, `shard=3`",
    "zero3": "`zero3`, `shard=3`",
    "pipe": "`zero3`, `pipe=2 shard=2`",
    "tensor": "`ddp`, `tensor=2`",
    "fsdp2": "torch FSDP2, 2 ranks",
}
RIGHT = ("bitwise", "equal")
LONGEST = 110

OPENING = """# Compatibility

Other people's models, trained by plait without changing a line, each compared with plain PyTorch on one process:
{versions}. `python benchmarks/zoo/main.py` makes this page ([how](../benchmarks/zoo/README.md)).

Each model is small (four layers, a few heads, random weights) and trains two steps of ragged batches in fp64.
*bitwise*: every parameter is the same number. *equal*: within 1e-10. *refused*: plait says why, before anything is
wrong. *crash*: an unplanned error. An asterisk: the messages sent differ from the prediction. An asterisk in brackets:
a unit runs more than once in a forward, or never, or a first step had to find its other readers, so its
gathers are not predicted; nor are messages over the tensor axis. All other messages are.
"""


def page(rows: Sequence[Row], versions: str) -> str:
    """The whole page."""
    made = [row for row in rows if "not built" not in row]
    columns = [name for name in COLUMNS if any(name in row for row in made)]
    text = [OPENING.format(versions=versions), "## Summary\n", _line(["", "models", *(COLUMNS[c] for c in columns)])]
    text.append(_line(["---"] * (len(columns) + 2)))
    kinds = [kind for kind in HEADINGS if any(row["kind"] == kind for row in made)]
    for kind in kinds:
        of_kind = [row for row in made if row["kind"] == kind]
        text.append(_line([HEADINGS[kind], str(len(of_kind)), *(_summary(of_kind, column) for column in columns)]))
    reasons = Counter(row[c]["why"] for row in made for c in columns if c in row and row[c]["word"] not in RIGHT)
    numbers = {reason: number for number, reason in enumerate(dict(reasons.most_common()), start=1)}
    for kind in kinds:
        text += ["", f"## {HEADINGS[kind]}\n", _line(["model", *(COLUMNS[c] for c in columns)])]
        text.append(_line(["---"] * (len(columns) + 1)))
        for row in (row for row in made if row["kind"] == kind):
            cells = [_cell(row[c], numbers) if c in row else "" for c in columns]
            text.append(_line([f"{row['name']}", *cells]))
    if numbers:
        text += ["", "## Why not\n"]
        text += [f"{number}. {_short(reason)}" for reason, number in numbers.items()]
    if left := [row for row in rows if "not built" in row]:
        text += [
            "",
            "## Not built\n",
            "These do not build, or do not run in fp64, on one process and without plait, once made small.\n",
        ]
        text += [f"- {row['kind']}/{row['name']}: {_short(row['not built'])}" for row in left]
    return "\n".join(text) + "\n"


def _summary(rows: Sequence[Row], column: str) -> str:
    results = [row[column] for row in rows if column in row]
    if not results:
        return ""
    words = Counter(result["word"] for result in results)
    right = sum(words[word] for word in RIGHT)
    others = [f"{number} {word}" for word, number in words.most_common() if word not in RIGHT]
    text = f"{right} of {len(results)} ({100 * right / len(results):.1f} %)"
    return ", ".join([text, *others])


def _cell(result: Mapping[str, Any], numbers: Mapping[str, int]) -> str:
    if result["word"] in RIGHT:
        star = "*" if result["ledger"] else "" if result["once"] else " (*)"
        return result["word"] + star
    return f"{result['word']} [{numbers[result['why']]}](#why-not)"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(reason: str) -> str:
    """Its beginning, as text that a table can have."""
    clean = reason.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return clean if len(clean) <= LONGEST else f"{clean[:LONGEST]}..."
