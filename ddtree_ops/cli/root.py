"""The root of the command line: its help, its version, and what every command's end has in common."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from ddtree_ops import __version__
from ddtree_ops.cli.app import app, document_error, fail
from ddtree_ops.errors import Bug, UsageError

DEBUG = "DDTREE_DEBUG"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddtree {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG, help="Show where in the code an error that is a bug came up.")
    ] = False,
) -> None:
    """Put DDTree speculative decoding on GPU hosts, prove that it is exact, and keep the evidence.

    Exit codes: 0 done, 1 failed and unchanged, 2 wrong usage, 3 changes pending (plan), 4 not exact, 5 rolled back,
    6 unreachable, 7 locked, 8 no verdict, 9 needs a hand, 130 interrupted.
    """


def run() -> None:
    """Run the command that the process was given. Raises SystemExit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is no reason to end
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="ddtree")
    except SystemExit as stop:
        # Typer ends with the exception for wrong options as context; with --json that too is one document.
        say = getattr(stop.__context__, "format_message", None)
        if say is not None and "--json" in sys.argv:
            document_error(UsageError(say()))
        raise
    except Exception as error:
        if os.environ.get(DEBUG) or "--debug" in sys.argv:
            raise
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = "please report it with what `ddtree --debug ...` shows\n"
        hint += "a host that was being changed finishes or goes back by itself: ddtree status"
        sys.exit(fail(Bug(f"this is a bug in ddtree {__version__}: {told}", hint=hint), json_="--json" in sys.argv))
