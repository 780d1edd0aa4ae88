"""Text from outside on its way out: terminal codes are shown escaped, and markup stays text."""

import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from plait.messages.escape import UnheardError, one_line, printable, say
from plait.run.report.screen import screen

HARM = [
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "a\rb",
    "\u202egnp.exe",
    "\u2066x\u2069",
    "\udc80",
    "\x00",
    "\x7f",
    "\u2028",
]


@pytest.mark.parametrize("text", HARM)
def test_what_a_terminal_obeys_is_escaped_and_stays_so(text: str) -> None:
    shown = printable(f"w{text}w")
    assert shown.isprintable() and shown.encode() and printable(shown) == shown


def test_harmless_text_is_left_as_it_is() -> None:
    for text in ("model.layers.0.weight", "größe 重量 ▁▂▃", "a\tb\nc", "[red]x[/red]"):
        assert printable(text) == text
    assert one_line("a\nb\tc") == "a\\nb\\tc" and printable("x" * 50, 3) == "xxx..."


@pytest.mark.parametrize("text", [*HARM, "[red]x[/red]", ":smile:", "[link=http://x]y[/link]"])
def test_a_screen_shows_names_and_obeys_none(text: str) -> None:
    out = io.StringIO()
    console = screen(file=out, force_terminal=True, color_system="truecolor", width=200)
    table = Table("name")
    table.add_row(text)
    console.print(f"tensor {text}", style="bold")
    console.print(table, Text(text, "red"))
    own = {"\x1b[1m", "\x1b[0m", "\x1b[31m"}
    shown = out.getvalue()
    for sequence in own:
        shown = shown.replace(sequence, "")
    assert all(c.isprintable() or c == "\n" for c in shown), repr(shown)
    if not any(c in text for c in "\x07\r"):  # rich leaves these two out altogether
        assert shown.count(printable(text)) == 3


def test_colours_and_moving_bars_stay() -> None:
    out = io.StringIO()
    console = screen(file=out, force_terminal=True, color_system="truecolor", width=60)
    with Progress(console=console) as bar:
        bar.add_task("steps of \x1b[3J", total=2)
        console.print("a line \x1b[2J")
    shown = out.getvalue()
    assert "\x1b[?25l" in shown and "a line \\x1b[2J" in shown and "steps of \\x1b[3J" in shown
    assert "\x1b[2J" not in shown and "\x1b[3J" not in shown


def test_what_is_said_is_escaped_even_where_the_encoding_is_poor() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    say("\x1b[31mgröße\udc80\n", stream)
    stream.flush()
    assert raw.getvalue() == b"\\x1b[31mgr\\xf6\\xdfe\\udc80\n"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "utf-8"])
def test_a_screen_shows_what_an_encoding_has_and_escapes_the_rest(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = screen(file=stream, width=80)
    console.print("loss ▁█▅ of 重量")
    stream.flush()
    shown = raw.getvalue().decode(encoding)
    assert shown == ("loss ▁█▅ of 重量\n" if encoding == "utf-8" else "loss \\u2581\\u2588\\u2585 of \\u91cd\\u91cf\n")


@pytest.fixture(params=[os.pipe, os.openpty])
def unread(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """A pipe, or a terminal, whose reader has gone."""
    reader, writer = request.param()
    os.close(reader)
    with open(writer, "w", buffering=1) as file:
        yield file


def test_a_screen_that_nobody_reads_is_an_error_in_one_line(unread: TextIO) -> None:
    with pytest.raises(UnheardError, match=r"^the reader of the standard output has gone"):
        screen(file=unread).print("a")
    os.dup2(os.open(os.devnull, os.O_WRONLY), unread.fileno())
    with open("/dev/full", "w") as full:
        with pytest.raises(UnheardError, match=r"^the standard output takes no more: No space left on device"):
            screen(file=full).print("a")
        os.dup2(unread.fileno(), full.fileno())


def test_who_outlives_its_readers_says_so_once(unread: TextIO, capsys: pytest.CaptureFixture[str]) -> None:
    console = screen(file=unread, outlived=True)
    for text in ("a", "b", "c"):
        console.print(text)
    unread.flush()
    assert capsys.readouterr().err == "plait: the reader of the standard output has gone: the run goes on without it\n"


def test_an_error_stream_that_nobody_reads_changes_nothing(unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", unread)
    say("a\n")
    say("b\n")
