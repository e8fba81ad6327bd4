"""What an operator sees: steps and progress on stderr, results on stdout, one JSON document with ``--json``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ddtree_ops.cli.app import clean
from ddtree_ops.cli.table import blocks, draw
from ddtree_ops.errors import Failed, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PROGRESS_AFTER_S = 1.0
# ECMA-48 colours, the same that rich gives these names
STYLES = {"red": "31", "green": "32", "yellow": "33"}
_writing = threading.Lock()  # hosts are worked on in threads; a line stays whole


class _Stream:
    """stdout or stderr. Lines are written as they are; rich is imported for what is more than a line.

    A reader that went away (``| head``) or a log on a full disk takes nothing down: a deploy must not end in the
    middle because of it.
    """

    def __init__(self, *, stderr: bool) -> None:
        self._stderr = stderr
        self._console: Console | None = None

    @property
    def file(self) -> TextIO:
        return sys.stderr if self._stderr else sys.stdout

    @property
    def is_terminal(self) -> bool:
        return self.file.isatty()

    @property
    def draws_lines(self) -> bool:
        """Whether its encoding has the characters that tables are drawn with."""
        return self.file.encoding.lower().replace("-", "") == "utf8"

    @property
    def coloured(self) -> bool:
        wanted = self.is_terminal or bool(os.environ.get("FORCE_COLOR"))
        return wanted and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")

    @property
    def console(self) -> Console:
        """For tables and progress; what it prints goes through `show`."""
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=self._stderr, markup=False, highlight=False, emoji=False)
            self._console.on_broken_pipe = self.give_up  # type: ignore[method-assign]
        return self._console

    def line(self, text: str, style: str = "") -> None:
        """The text and a newline, in a colour of `STYLES` where the terminal has any."""
        if style and self.coloured:
            text = f"\x1b[{STYLES[style]}m{text}\x1b[0m"
        with self._forgiving(), _writing:
            self.file.write(f"{text}\n")
            self.file.flush()

    def show(self, table: Any) -> None:
        """What rich can print."""
        with self._forgiving():
            self.console.print(table)

    def give_up(self) -> None:
        """Nobody reads this any more, or it cannot be written: the rest goes nowhere."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.give_up()
            if not self._stderr and not isinstance(error, BrokenPipeError):
                with contextlib.suppress(OSError):
                    typer.echo(f"! stdout: {error.strerror}; what follows is not shown", err=True)


class Screen:
    """Implements ``deploy.run.Ui`` and the few ways results are shown. Values from hosts are never read as markup."""

    def __init__(self, *, json_: bool = False) -> None:
        self.json = json_
        self._out, self._err = _Stream(stderr=False), _Stream(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._label = ""
        self._since = 0.0
        self._prefix = ""

    def named(self, name: str) -> Screen:
        """The same screen for one of several hosts that are worked on at once: its lines begin with the name."""
        other = Screen(json_=self.json)
        other._prefix = f"{name}: "
        return other

    def step(self, text: str) -> None:
        """One line of what is being done."""
        self._end_progress()
        self._err.line(f"  {self._prefix}{clean(text)}")

    def warn(self, text: str) -> None:
        """One line an operator should not miss."""
        self._end_progress()
        self._err.line(f"! {self._prefix}{clean(text)}", "yellow")

    def progress(self, label: str, done: int, total: int) -> None:
        """A bar, once the work lasts more than a second and stderr is a terminal."""
        if not self._err.is_terminal or self._prefix:  # several bars at once would fight over the line
            return
        if label != self._label:
            self._end_progress()
            self._label, self._since = label, time.monotonic()
        if time.monotonic() - self._since < PROGRESS_AFTER_S:
            return
        if self._progress is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("  {task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._err.console, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(clean(label), total=max(total, 1))
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=max(total, 1))

    def say(self, text: str, style: str = "") -> None:
        """A line of the result; on stderr when stdout belongs to JSON."""
        self._end_progress()
        (self._err if self.json else self._out).line(clean(text), style)

    @property
    def console(self) -> Console:
        """stderr for what rich draws in place."""
        return self._err.console

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
        """A table of the result. Columns whose cells all look like numbers are right-aligned."""
        self._end_progress()
        stream = self._err if self.json else self._out
        # A column without rows is no column of numbers.
        right = [bool(rows) and all(row[index][:1].isdigit() for row in rows) for index in range(len(columns))]
        cells = [[clean(cell) for cell in row] for row in rows]
        if rows and (narrow := blocks(columns, cells)) is not None:
            stream.line("\n".join(part for part in (title, narrow, caption) if part))
            return
        if not title and not caption and stream.draws_lines:
            drawn = draw(columns, cells, right, bold=stream.coloured)
            if drawn is not None:
                stream.line(drawn)
                return
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(title) if title else None,
            caption=Text(caption) if caption else None,
            title_justify="left",
            caption_justify="left",
        )
        for column, numeric in zip(columns, right, strict=True):
            # Folded and not cut: on a narrow terminal an id must still be whole.
            table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        stream.show(table)

    def markdown(self, text: str) -> None:
        """A document of ours: laid out in a terminal, else as it is written."""
        self._end_progress()
        if not self._out.is_terminal:
            self._out.line(text.rstrip())
            return
        from rich.markdown import Markdown

        self._out.show(Markdown(text))

    def document(self, data: Any) -> None:
        """The one JSON document on stdout, in ASCII: a host's text may hold what steers a terminal, and what stdout
        cannot encode.
        """
        self._end_progress()
        try:
            typer.echo(json.dumps(data, indent=2, default=str).replace("\x7f", "\\u007f"))
        except BrokenPipeError:
            raise
        except OSError as error:  # without its document nobody may take this for done
            self._out.give_up()
            raise Failed(f"the result could not be written to stdout: {error.strerror}") from error

    def ask(self, question: str, *, yes: bool) -> bool:
        """Ask before a change; ``--yes`` answers yes. Without a terminal and without ``--yes``: UsageError (exit 2)."""
        self._end_progress()
        if yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("this would change a host and there is no terminal to ask at", hint="say --yes")
        try:
            return typer.confirm(question, err=True)
        except typer.Abort:  # Ctrl-C, or the end of the input
            raise KeyboardInterrupt from None

    def _end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._task, self._label = None, None, ""


def local_time(when: float | None) -> str:
    """Unix seconds as this machine's date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else ""
