"""Text as bytes: a vocabulary of 256, and no tokenizer to fetch or to version.

Without a path the text is the source of Python's own standard library, which every machine that runs this
has: real, structured, a few megabytes, nothing downloaded.  It is the same on every rank that runs the same
Python version; ranks with different versions would read different text, so a run over unlike machines wants
a path.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

STANDARD_LIBRARY_BYTES = 3_000_000
"""At most this many bytes of the standard library are read."""

HELD_OUT_PERCENT = 5


def load_text(path: str | None = None) -> bytes:
    """The bytes of a file, of a folder's text files one after the other, or (None) of the standard library.

    A folder is read recursively in the order of its relative paths.  Files with a NUL byte are taken for
    binary and passed over, and so are hidden files and folders.

    Raises:
        ValueError: nothing at ``path``, no text in it, or a single file that is binary; the message names
        the fix.
    """
    if path is None:
        return standard_library()
    root = Path(path)
    if root.is_dir():
        return _folder(root)
    if not root.is_file():
        raise ValueError(f"no file or folder at {path!r}: check the path, or leave it out for Python's own source")
    text = root.read_bytes()
    if not text:
        raise ValueError(f"{path!r} is empty (0 bytes): give a file with text")
    if b"\0" in text:
        raise ValueError(f"{path!r} holds a NUL byte, so it looks binary: give plain text, for example in UTF-8")
    return text


def standard_library(max_bytes: int = STANDARD_LIBRARY_BYTES) -> bytes:
    """The modules at the top of Python's standard library, by name, cut after ``max_bytes`` bytes.

    Names that begin with an underscore are passed over: some are generated for one machine.  Subfolders
    (tests, site-packages, idlelib) are too.

    Raises:
        ValueError: this Python carries no source files (some embedded builds keep them in an archive).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for file in sorted(folder.glob("[!_]*.py"), key=lambda file: file.name):
        if size >= max_bytes:
            break
        parts.append(file.read_bytes())
        size += len(parts[-1])
    if not size:
        raise ValueError(f"this Python has no source files in {str(folder)!r}: give a path to a text")
    return b"".join(parts)[:max_bytes]


def _folder(root: Path) -> bytes:
    parts: list[bytes] = []
    num_files = 0
    files = (file for file in root.rglob("*") if file.is_file())
    for file in sorted(files, key=lambda file: file.relative_to(root).parts):
        if any(part.startswith(".") for part in file.relative_to(root).parts):
            continue
        num_files += 1
        content = file.read_bytes()
        if b"\0" not in content:
            parts.append(content)
    text = b"".join(parts)
    if not text:
        raise ValueError(
            f"the folder {str(root)!r} holds no text: {num_files} files, {num_files - len(parts)} of them "
            f"binary, 0 bytes of text; give a folder with text files"
        )
    return text


def split_text(text: bytes, length: int) -> tuple[bytes, bytes]:
    """(train, held out): the last 5 % are held out, at least one sample (``length`` + 1 bytes).

    Raises:
        ValueError: fewer bytes than one sample for each part.
    """
    if length < 1:
        raise ValueError(f"length is {length}: a sample has at least 1 token")
    sample = length + 1
    if len(text) < 2 * sample:
        raise ValueError(
            f"a text of {len(text)} bytes is too short: one training and one held-out sample of length "
            f"{length} need {2 * sample} bytes; give more text, or a length of at most "
            f"{max(len(text) // 2 - 1, 0)}"
        )
    held_out = max(len(text) * HELD_OUT_PERCENT // 100, sample)
    return text[:-held_out], text[-held_out:]
