"""The Typer application, the options every command shares, and how a command ends."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from ddtree_ops.cli import complete
from ddtree_ops.cli.commands import Group, registered
from ddtree_ops.errors import DdtreeError, Interrupted

P = ParamSpec("P")

app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

HostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME",
        help="Host of the inventory; several times, or 'all'.",
        autocompletion=complete.hosts,
    ),
]
ServiceOption = Annotated[str | None, typer.Option("--service", help="Which service, where a host has several.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Use this profile instead of the inventory's; the inventory stays as it is.",
        autocompletion=complete.profiles,
    ),
]
WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "--workspace", envvar="DDTREE_WORKSPACE", help="The directory that holds inventories/ (default: found upwards)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def command(name: str, group: typer.Typer | None = None) -> Callable[[Callable[P, int | None]], Callable[P, None]]:
    """Register a command of ``ddtree``, or of ``group``. Its function returns its exit code (None: 0).

    Expected failures (DdtreeError) become one message, a hint and the error's exit code; with ``--json`` also one
    document on stdout. Anything else is a bug: `root.run` tells it.
    """

    def register(function: Callable[P, int | None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                code = function(*args, **kwargs)
            except DdtreeError as error:
                code = fail(error, json_=bool(kwargs.get("json_")))
            except KeyboardInterrupt:
                code = fail(Interrupted("interrupted"), json_=bool(kwargs.get("json_")))
            except BrokenPipeError:  # the reader of a pipe went away: not our failure, and nothing more can be said
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = 1
            raise typer.Exit(code or 0)

        owner = group
        if owner is None:
            owner = registered[name] = typer.Typer(add_completion=False, rich_markup_mode=None)
        owner.command(name)(run)
        return run

    return register


def group(name: str, line: str) -> typer.Typer:
    """Register commands under one name, each added by ``@command(its name, group)``."""
    registered[name] = typer.Typer(
        name=name, help=line, no_args_is_help=True, rich_markup_mode=None, add_completion=False
    )
    return registered[name]


def fail(error: DdtreeError, *, json_: bool) -> int:
    """Show an expected failure on stderr, with ``--json`` also as the document on stdout; its exit code."""
    if json_:
        document_error(error)
    show_error(error)
    return error.exit_code


def document_error(error: DdtreeError) -> None:
    """The one JSON document of a command that failed."""
    typer.echo(json.dumps({"ok": False, "error": error_json(error)}, indent=2))


def error_json(error: DdtreeError) -> dict[str, Any]:
    """An expected failure for ``--json``."""
    return {
        "kind": type(error).__name__,
        "exit_code": error.exit_code,
        "message": error.message,
        "hint": error.hint,
    }


def show_error(error: DdtreeError) -> None:
    """The message and its hint on stderr, control characters made visible."""
    typer.echo(f"error: {clean(error.message)}", err=True)
    for line in error.hint.splitlines():
        typer.echo(f"  {clean(line)}", err=True)


def clean(text: str) -> str:
    """Text from a host or a server, safe to show: control characters (newline and tab apart) become ``\\xNN``."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
