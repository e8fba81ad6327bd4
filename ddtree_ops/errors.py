"""Errors an operator can cause or mend. Each knows its exit code (README, "Exit codes").

The CLI prints ``message`` and ``hint`` and never a traceback for these; anything else is a bug.
"""

from __future__ import annotations

#: Of several exit codes the first that is among them (design.md, "Several hosts: the worst of").
WORST_FIRST = (9, 5, 4, 8, 1, 7, 6)


class DdtreeError(Exception):
    """Base of every expected failure: what happened, in what state things are, what to do next.

    ``hint`` is the next thing to do, one line or several, without trailing newline.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Failed(DdtreeError):
    """It did not work and the host is unchanged."""


class Bug(DdtreeError):
    """Something nobody expected; the code shows where it came up with ``--debug``."""


class UsageError(DdtreeError):
    """Wrong command line, inventory or profile; nothing was contacted."""

    exit_code = 2


class RolledBack(DdtreeError):
    """The deploy failed and the host is back on what ran before."""

    exit_code = 5


class Unreachable(DdtreeError):
    """No connection, an unknown or changed host key, or no rights there."""

    exit_code = 6


class Locked(DdtreeError):
    """Another deploy holds the host."""

    exit_code = 7


class Interrupted(DdtreeError):
    """Ctrl-C; the host is consistent, or will be by itself as the message says."""

    exit_code = 130


class NeedsHand(DdtreeError):
    """A restore failed; ``hint`` holds the commands to run."""

    exit_code = 9
