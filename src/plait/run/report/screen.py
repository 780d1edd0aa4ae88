"""The console for tables, lines and bars.  It escapes control characters in all text.

    name from a file ──► Table, Text, f"..." ──► rich lays it out ──► segments ──► escaped ──► terminal
                                                                      colours and cursor moves are rich's own

Text is not markup, so ``[red]`` in a name stays ``[red]``.  Colours come from ``style`` and ``rich.text.Text``.
"""

import errno
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from plait.messages.escape import encodable, heard, say, silence
from plait.messages.progress import shown_by


def screen(*, outlived: bool = False, **options: Any) -> Console:
    """Makes a rich console with these options.  If its reader has gone, one that is ``outlived`` reports that once and
    shows nothing more; otherwise it raises UnheardError."""
    kind = _OutlivedConsole if outlived else _EscapingConsole
    console = kind(highlight=False, markup=False, emoji=False, **options)
    Console.push_render_hook(console, _EscapingHook())
    return console


def empty_table(title: str, *columns: str, left: Collection[str] = (), **options: Any) -> Table:
    """Makes an empty table with rich's options.  Columns hold numbers, on the right, unless they are in ``left``."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, **options)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


@contextmanager
def working(here: bool = True) -> Iterator[None]:
    """Shows a bar for the items that ``messages.progress.counted`` counts inside, if the standard error is a terminal
    and this is the rank that shows it."""
    console = screen(stderr=True)
    if not here or not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("working", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=not done)

        with shown_by(show):
            yield


class _EscapingConsole(Console):
    def push_render_hook(self, hook: RenderHook) -> None:
        """Escapes the output of every hook, because bars are drawn by hooks."""
        super().push_render_hook(_EscapingHook(hook))

    def print(self, *objects: Any, **options: Any) -> None:
        with heard("error" if self.stderr else "output"):
            super().print(*objects, **options)

    def _write_buffer(self) -> None:
        """Handles EIO, the end of a terminal.  rich handles only the end of a pipe's reader."""
        try:
            super()._write_buffer()
        except OSError as error:
            if error.errno == errno.EIO:
                raise BrokenPipeError from error
            raise

    def on_broken_pipe(self) -> None:
        """Replaces rich's handler, which would end the program silently."""
        raise BrokenPipeError


class _OutlivedConsole(_EscapingConsole):
    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)
        say("plait: the reader of the standard output has gone: the run goes on without it\n")


class _EscapingHook(RenderHook):
    def __init__(self, hook: RenderHook | None = None) -> None:
        self._hook = hook

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        given = self._hook.process_renderables(renderables) if self._hook else renderables
        return [_Escaped(renderable) for renderable in given]


class _Escaped:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(encodable(segment.text, console.encoding), segment.style)
