"""Text from outside, made harmless where it leaves the program.

Names of tensors, paths, settings, messages from other ranks and from strangers can hold control sequences of a terminal
(``\\x1b[2J`` clears the screen, ``\\x1b]0;`` renames the window), a carriage return that hides the text before it, or
marks that turn the direction of writing.  Inside the program such text stays as it is, so that names stay equal; the
code that prints, logs or reports it calls ``printable``:

    printable("w\\x1b[31m")   'w\\\\x1b[31m'
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TextIO

TURNING = (
    frozenset("\u061c\u200e\u200f\u2028\u2029\ufeff\ufffe\uffff")
    | {*map(chr, range(0x202A, 0x202F))}
    | {*map(chr, range(0x2066, 0x206A))}
)
"""Characters that are no control characters, but hide text or turn its direction."""


def printable(text: str, longest: int | None = None) -> str:
    """Escapes every character of ``text`` that a terminal would obey; line ends and tabs stay.

    Args:
        longest: the number of characters after which the text is cut off.
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}..."
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str, longest: int | None = None) -> str:
    """Like ``printable``, but also escapes line ends and tabs: a name is one line."""
    return printable(text, longest).replace("\n", "\\n").replace("\t", "\\t")


def _harmless(c: str) -> bool:
    control = ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000
    return c in "\n\t" or not (control or c in TURNING)


def encodable(text: str, encoding: str) -> str:
    """Escapes the characters of ``printable`` text that an encoding lacks."""
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def say(text: str, stream: TextIO | None = None) -> None:
    """Writes ``printable`` text, to stderr by default; all of plait's output goes this way, except in
    ``report.screen``.  Characters that the stream's encoding lacks are escaped too.  A stderr that takes no more text
    changes no outcome."""
    stream = stream or sys.stderr
    if not stream:  # the program that started this one has closed it
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        with heard():
            stream.write(encodable(text, encoding))
    except UnheardError:
        if stream is not sys.stderr:
            raise
        silence(stream)


class UnheardError(RuntimeError):
    """Raised when output can no longer be written: its reader has gone, or its disk is full."""


@contextmanager
def heard(stream: str = "output") -> Iterator[None]:
    """Raises an UnheardError if output that is written inside does not reach the standard ``stream``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno == errno.EIO:  # errno of a pipe, a terminal
            raise UnheardError(f"the reader of the standard {stream} has gone: it takes no more") from error
        raise UnheardError(f"the standard {stream} takes no more: {error.strerror}") from error


def silence(stream: IO[str]) -> None:
    """Redirects a stream to nowhere, with the text that it still holds."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
