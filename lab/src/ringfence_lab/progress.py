"""What is under way, on standard error: a bar, drawn by rich where that is a terminal."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column


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
