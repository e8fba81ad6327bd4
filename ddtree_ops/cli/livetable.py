"""What an operator sees of a sweep that runs: on a terminal a table that stays in place, else a line a cell."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ddtree_ops.cli.app import clean
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.sweep.records import Journal, Measured
    from ddtree_ops.sweep.runner import Progress

SHOWN = 14


class LiveTable:
    """Implements ``deploy.run.Ui`` and the runner's watch. ``line``: one ended cell as text; ``told``: how many
    records were there before.
    """

    def __init__(
        self,
        screen: Screen,
        told: int,
        journal: Journal,
        line: Callable[[Measured], str],
        minutes: Callable[[float], str],
    ) -> None:
        self._screen, self._told, self._journal = screen, told, journal
        self._line, self._minutes = line, minutes
        self._console = screen.console
        drawn = self._console.is_terminal and os.environ.get("TERM") != "dumb"
        self._live = Live(console=self._console, refresh_per_second=4, transient=True) if drawn else None
        self._now, self._progress, self._cells = "", "", [""]

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, text: str) -> None:
        """What is being done: the table's last line, or a line of its own."""
        if self._live is None:
            self._screen.step(text)
        else:
            self._now, self._progress = text, ""
            self._draw()

    def warn(self, text: str) -> None:
        """A line that stays, above the table."""
        if self._live is None:
            self._screen.warn(text)
        else:
            self._console.print(Text(f"! {clean(text)}", style="yellow"))

    def progress(self, label: str, done: int, total: int) -> None:
        """How far the work at hand is."""
        if self._live is None:
            self._screen.progress(label, done, total)
        else:
            self._progress = f"{label} {done}/{total}"
            self._draw()

    def watch(self, progress: Progress) -> None:
        """A cell begins or has ended."""
        from ddtree_ops.sweep.records import Measured

        total = sum(len(start.cells) for start in progress.starts)
        left = "" if progress.left_s is None else f", about {self._minutes(progress.left_s)} left"
        for record in self._journal.records[self._told :]:
            if isinstance(record, Measured) and self._live is None:
                self._screen.step(f"{self._line(record)}   [{len(progress.done)} of {total}{left}]")
        self._told = len(self._journal.records)
        ended = [self._line(record) for record in progress.done.values()]
        self._cells = [f"{len(progress.done)} of {total} cells{left}", *ended[-SHOWN:]]
        if progress.running is not None:
            self._cells.append(f"{progress.running.name}: measuring")
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        table = Table(title=Text(clean(self._cells[0])), show_header=False, title_justify="left")
        for cell in self._cells[1:]:
            name, _, how = cell.partition(": ")
            table.add_row(Text(clean(name)), Text(clean(how)))
        self._live.update(Group(table, Text(f"  {clean(self._now)}"), Text(f"  {clean(self._progress)}", style="dim")))
