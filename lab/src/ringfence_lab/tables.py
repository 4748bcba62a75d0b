"""Tables, paragraphs and progress of the lab's commands, laid out by rich in the width of the terminal."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

COLUMNS: Final = 80  # where the output is not a terminal


def width() -> int:
    """Return the width of the terminal, or 80 if standard output is not one. COLUMNS overrides both."""
    return shutil.get_terminal_size((COLUMNS, 24)).columns


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, indent: int = 0) -> str:
    """Return a table as text. The first `left` columns are aligned to the left, the others to the right.

    Where the table is wider than the terminal, texts in the left columns are wrapped.
    """
    rows = list(rows)
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for index, name in enumerate(header):
        if index < left:
            found.add_column(Text(name), overflow="fold", vertical="bottom")
        else:  # numbers are not wrapped; their header is, to their width
            longest = max(map(len, [*name.split(), *(row[index] for row in rows)]))
            found.add_column(Text(textwrap.fill(name, longest)), justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*map(Text, row))
    target = io.StringIO()
    Console(file=target, width=width() - indent, color_system=None, legacy_windows=False).print(found)
    return "\n".join(" " * indent + line.rstrip() for line in target.getvalue().splitlines())


def paragraph(text: str, indent: int = 0) -> str:
    """Return `text` wrapped to the width of the terminal; lines after the first are indented."""
    lines = textwrap.wrap(text, width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


class Progress:
    """A progress bar on standard error, until the end of a `with` statement. It is not shown if that is not a terminal.

    The bar is drawn only when a step ends: a thread that refreshes it would take time from what is measured.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._bar = Bar(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn(
                "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("", total=max(1, total))
        self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def say(self, what: str) -> None:
        """Show what is under way."""
        self._bar.update(self._task, description=what, refresh=True)

    def step(self, what: str = "") -> None:
        """Count a step as done, and show what is under way."""
        self._bar.update(self._task, advance=1, description=what, refresh=True)

    def end(self) -> None:
        """Remove the bar."""
        self._bar.stop()


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show what is under way in one line on standard error, until the block ends; nothing if that is not a terminal."""
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda what: live.update(Text(what, no_wrap=True, overflow="ellipsis"), refresh=True)
