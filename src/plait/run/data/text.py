"""Text as bytes: a vocabulary of 256, and no tokenizer to download or to version.

Without a path the text is the source of Python's standard library, which every machine has: real, structured, a few
megabytes, nothing downloaded.  Ranks with different versions of Python would read different text, so a run over
different machines needs a path.

The same files are one text (``load_text``) or documents (``load_documents``):

    *.jsonl                 the "text" of each line is a document
    a folder                every other file in it is a document
    a file alone            paragraphs are documents, separated by blank lines
    the standard library    every module is a document
"""

import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from plait.checkpoint.files.reading import memory, read_file
from plait.run.data.tokens import Tokens

STANDARD_LIBRARY_BYTES = 3_000_000  # at most
HELD_OUT_PERCENT = 5
Text = TypeVar("Text", bytes, Tensor, Tokens)


def load_text(path: str | None = None) -> bytes:
    """The bytes of a file, of a folder's text files in sequence, or (None) of the standard library.

    A folder is read recursively in the order of its relative paths.  Files with a NUL byte count as binary and are
    skipped, and so are hidden files and folders.  Of ``.jsonl`` files only the texts count, joined by blank lines.
    ValueError if there is no text at ``path``, a single file is binary, or a line of a ``.jsonl`` file has no text.
    """
    files = _files(path)
    parts = [b"\n\n".join(_texts(name, content)) for name, content in files]
    ends = [b"\n\n" * name.endswith(".jsonl") for name, _ in files[:-1]]
    return b"".join(part + end for part, end in zip(parts, [*ends, b""], strict=True))


def load_documents(path: str | None = None) -> list[bytes]:
    """Loads the same text as documents, none of them empty, in the order of the text.  Raises like ``load_text``."""
    files = _files(path)
    if path is not None and os.path.isfile(path) and not path.endswith(".jsonl"):
        (_, text), *_ = files
        return [paragraph for paragraph in re.split(rb"(?:\r?\n[ \t]*){2,}", text) if paragraph.strip()]
    return [document for name, content in files for document in _texts(name, content) if document]


def split_text(text: Text, length: int) -> tuple[Text, Text]:
    """Splits bytes, each a token, or a row of tokens into (train, held out): the last 5 % are held out, at least one
    sample (``length`` + 1 tokens).  ValueError for fewer than a sample for each part."""
    sample = length + 1
    if len(text) < 2 * sample:
        unit, longest = "bytes" if isinstance(text, bytes) else "tokens", len(text) // 2 - 1
        fix = f", or a length of at most {longest}" if longest > 0 else ""
        raise ValueError(
            f"a text of {len(text)} {unit} is too short: one training and one held-out sample of length {length} "
            f"need {2 * sample} {unit}; give more text{fix}"
        )
    held_out = max(len(text) * HELD_OUT_PERCENT // 100, sample)
    return text[:-held_out], text[-held_out:]


def split_documents(documents: Sequence[Text]) -> tuple[Sequence[Text], Sequence[Text]]:
    """Splits into (train, held out): the last documents with 5 % of the tokens, at least one, are held out.  Raises
    ValueError for fewer than 2 documents."""
    usable = [document for document in documents if len(document) > 1]
    if len(usable) < 2:
        raise ValueError(
            f"{len(usable)} documents of 2 tokens or more: one to train on and one to hold out are needed; give more "
            f"text (a folder's files, blank lines in a file and lines of .jsonl divide it), or leave pack out"
        )
    wanted, held_out = sum(map(len, usable)) * HELD_OUT_PERCENT // 100, accumulate(map(len, reversed(usable)))
    first = max(1, len(usable) - next(count for count, size in enumerate(held_out, 1) if size >= wanted))
    return usable[:first], usable[first:]


def _files(path: str | None) -> list[tuple[str, bytes]]:
    """(name, content) of every text file at the path, in order."""
    if path is None:
        return standard_library()
    if os.path.isdir(path):
        return _folder(Path(path))
    size_of(path)
    text = read_file(path, "the data", memory())
    if not text:
        raise ValueError(f"{path!r} is empty (0 bytes): give a file with text")
    if b"\0" in text:
        raise ValueError(f"{path!r} has a NUL byte, so it looks binary: give plain text, for example in UTF-8")
    return [(path, text)]


def standard_library() -> list[tuple[str, bytes]]:
    """(name, source) of the top-level modules in Python's standard library, by name, up to a size.

    Names with a leading underscore are skipped, since some are generated for one machine, and so are subfolders (tests,
    site-packages, idlelib).
    """
    parts: list[tuple[str, bytes]] = []
    left = STANDARD_LIBRARY_BYTES
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py")):
        if left:
            parts.append((file.name, file.read_bytes()[:left]))
            left -= len(parts[-1][1])
    return parts


def size_of(path: str) -> int:
    """Bytes to read from the file, or from the files in the folder.  Raises ValueError if they cannot be read."""
    if os.path.isdir(path):
        return sum(size for _, size in _shown(path))
    if not os.path.isfile(path):
        what = "no plain file and no folder" if os.path.lexists(path) else "no file or folder"
        raise ValueError(f"{what} at data {path!r}: check the path, or leave it out for Python's own source")
    return os.path.getsize(path)


def _shown(path: str) -> Iterator[tuple[Path, int]]:
    """The plain files in a folder and its subfolders that are not hidden, with their sizes."""
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            file = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(file):
                yield Path(file), os.path.getsize(file)


def _folder(root: Path) -> list[tuple[str, bytes]]:
    shown = sorted(file for file, _ in _shown(str(root)))  # part by part of the path
    contents = ((str(file.relative_to(root)), read_file(file, "the data", memory())) for file in shown)
    parts = [(name, content) for name, content in contents if b"\0" not in content]
    if not any(content for _, content in parts):
        raise ValueError(
            f"the folder {str(root)!r} holds no text: {len(shown)} files, {len(shown) - len(parts)} of them binary, "
            f"0 bytes of text; give a folder with text files"
        )
    return parts


def _texts(name: str, content: bytes) -> list[bytes]:
    """The texts of a ``.jsonl`` file, which has a JSON object on each line, or the content of any other file."""
    if not name.endswith(".jsonl"):
        return [content]
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"].encode())
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            fix = "give a JSON object a line, with a string under 'text'"
            raise ValueError(f"{name}, line {number} has no text ({error!r:.200}): {fix}") from error
    if not any(texts):
        raise ValueError(f'{name} holds no text: give one object with a "text" per line')
    return texts
