"""The command line. One file a command: parse, call one function, show. Heavy imports live inside the commands."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import NoReturn


def main() -> None:
    """The entry point ``ddtree``."""
    # Almost all that a command makes, its modules first of all, lives as long as it does: looking for garbage among it
    # after every 700 objects is a twentieth of a short command.
    gc.set_threshold(100_000, 20, 20)
    try:
        from ddtree_ops.cli.root import run

        run()
    except KeyboardInterrupt:  # while modules were imported: later ones are told by the command itself
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as stop:
        if not isinstance(stop.code, (int, type(None))) or _still_at_work():
            raise
        _end(stop.code or 0)


def _still_at_work() -> bool:
    """Whether there are threads that the interpreter would wait for."""
    threading = sys.modules.get("threading")
    return threading is not None and any(
        not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()
    )


def _end(code: int) -> NoReturn:
    """Leaves with everything said and cleaned up, but without taking every module apart: as long as a small import."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the interpreter tells of a reader that is gone
        sys.exit(code)
    os._exit(code)
