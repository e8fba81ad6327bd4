"""The command line. One file a command: parse, call one function, show. Heavy imports live inside the commands."""

from __future__ import annotations


def main() -> None:
    """The entry point ``ddtree``."""
    try:
        from ddtree_ops.cli.root import run

        run()
    except KeyboardInterrupt:  # while modules were imported: later ones are told by the command itself
        import sys

        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
