"""``ddtree status --watch``: what services do right now, a row each, until Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddtree_ops.cli.app import clean
from ddtree_ops.errors import UsageError

if TYPE_CHECKING:
    from ddtree_ops.cli.screen import Screen
    from ddtree_ops.model import Deployment


def watch(screen: Screen, deployments: Sequence[Deployment], interval_s: float, count: int | None) -> int:
    """Look ``count`` times (None: until Ctrl-C). At a terminal one table that changes, else a line each.

    The exit code: 1 when the last of ``count`` looks has a problem, so that a script may ask with ``--count 1``.
    """
    from ddtree_ops.doctor.live import watch as looks

    if screen.json and count is None:
        raise UsageError("--watch --json is one document, so it must end", hint="say --count N as well")
    streams = [looks(deployment, interval_s if len(deployments) == 1 else 0) for deployment in deployments]
    seen: list[dict[str, Any]] = []
    rows: list[dict[str, str]] = []
    with contextlib.suppress(KeyboardInterrupt), _shown(screen) as update:
        for turn in range(count or sys.maxsize):
            if turn and len(deployments) > 1:
                time.sleep(interval_s)
            rows = []
            for deployment, stream in zip(deployments, streams, strict=True):
                now = next(stream)
                name = {"host": deployment.host.name, "service": deployment.service_name}
                rows.append({**name, **now.row()})
                if screen.json:
                    seen.append({**name, "t": time.time(), **asdict(now)})
            update(rows)
    failed = count is not None and any(row["problem"] for row in rows)
    if screen.json:
        screen.document({"ok": not failed, "looks": seen})
    return int(failed)


@contextlib.contextmanager
def _shown(screen: Screen) -> Iterator[Callable[[list[dict[str, str]]], None]]:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    if screen.json:
        yield lambda rows: None
        return
    if not sys.stdout.isatty():

        def lines(rows: list[dict[str, str]]) -> None:
            for row in rows:
                cells = [f"{key} {value}" for key, value in row.items() if value and key not in ("host", "service")]
                screen.say(f"{time.strftime('%H:%M:%S')} {row['host']} {row['service']}: {', '.join(cells)}")

        yield lines
        return
    with Live(auto_refresh=False) as live:

        def table(rows: list[dict[str, str]]) -> None:
            made = Table(title=Text(time.strftime("%H:%M:%S")), title_justify="left")
            # What nobody tells takes no room: on a narrow terminal the rest must stay legible.
            columns = [column for column in rows[0] if any(row[column] for row in rows)]
            for column in columns:
                made.add_column(Text(column), overflow="fold")
            for row in rows:
                made.add_row(*(Text(clean(row[column])) for column in columns))
            live.update(made, refresh=True)

        yield table
