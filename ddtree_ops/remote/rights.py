"""The command line that sshd is given, and the refusals of a host where root is not to be had."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..errors import Unreachable
from .process import host_argv
from .transport import Endpoint, Result


def may_root(host: Endpoint) -> bool:
    """Whether the inventory lets a command run as root there."""
    return host.sudo or host.user == "root"


def require_root(host: Endpoint) -> None:
    """Raises Unreachable where `may_root` says no."""
    if not may_root(host):
        raise Unreachable(
            f"{host.name}: needs root, and {host.user} is not root",
            hint="set sudo: true in its inventory (and allow sudo without a password there), or user: root",
        )


def require_sudo(host: Endpoint, result: Result, root: bool) -> None:
    """Raises Unreachable when a command ended because sudo would have asked for a password."""
    if root and result.code == 1 and b"sudo: a password is required" in result.stderr:
        raise Unreachable(
            f"{host.name}: sudo wants a password for {host.user}, or does not allow it at all",
            hint=f"allow it without one (sudoers: `{host.user} ALL=(ALL) NOPASSWD: ALL`), or use user: root",
        )


def remote_command(host: Endpoint, argv: Sequence[str], *, root: bool, timeout: float | None) -> str:
    """The command line that sshd is given for ``argv``."""
    words = host_argv(argv, sudo=root and host.user != "root", timeout=timeout)
    # The messages of sudo are matched, so they must not be translated.
    return f"exec env LC_ALL=C.UTF-8 {shlex.join(words)}"
