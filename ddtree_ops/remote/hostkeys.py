"""Strict host keys: what a host must show is in the inventory, and nothing is ever added by itself."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys

from ..errors import Unreachable, UsageError
from .knownhosts import known_name
from .transport import Endpoint


def add_expected(host: Endpoint, keys: HostKeys) -> None:
    """Adds the keys that the inventory allows this host to show, if it names any. Raises UsageError."""
    if host.host_key:
        try:
            entry = HostKeyEntry.from_line(f"{known_name(host)} {host.host_key}")
        except Exception as error:
            raise UsageError(f"{host.name}: host_key is not an OpenSSH public key: {error}") from error
        if entry is None or entry.key is None:
            raise UsageError(f'{host.name}: host_key: expected "ssh-ed25519 AAAA...", got {host.host_key[:60]!r}')
        keys.add(known_name(host), entry.key.get_name(), entry.key)
    elif host.known_hosts:
        path = Path(host.known_hosts).expanduser()
        try:
            text = path.read_text()
        except OSError as error:
            raise UsageError(f"{host.name}: known_hosts {path}: {error.strerror}") from error
        marks = {line.split()[0] for line in text.splitlines() if line.lstrip().startswith("@")}
        if marks:
            # paramiko skips @revoked (a revoked key that another line allows would pass), and reads no other mark.
            named = " and ".join(sorted(marks))
            raise UsageError(f"{host.name}: {path} has {named} lines, which are not supported; use host_key instead")
        keys.load(str(path))


def fingerprint(key: paramiko.PKey) -> str:
    """As ``ssh-keygen -l`` prints it: ``SHA256:...``."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


def unknown(host: Endpoint, key: paramiko.PKey) -> Unreachable:
    """The refusal of a host whose key the inventory does not have."""
    return Unreachable(
        f"{host.name}: the host key of {known_name(host)} is not known; nothing was sent. It shows {fingerprint(key)}",
        hint=(
            "compare it with what `ssh-keygen -lf /etc/ssh/ssh_host_*.pub` prints on the host itself, then add\n"
            + (
                f"to {host.known_hosts}:\n    {known_name(host)} {key.get_name()} {key.get_base64()}"
                if host.known_hosts and not host.host_key
                else f'to inventories/{host.name}.yaml:\n    host_key: "{key.get_name()} {key.get_base64()}"'
            )
        ),
    )


def changed(host: Endpoint, got: paramiko.PKey, expected: paramiko.PKey) -> Unreachable:
    """The refusal of a host that shows another key than it should."""
    return Unreachable(
        f"{host.name}: THE HOST KEY OF {known_name(host)} HAS CHANGED. Nothing was sent: somebody may be in between.\n"
        f"    expected {expected.get_name()} {fingerprint(expected)}\n"
        f"    it shows {got.get_name()} {fingerprint(got)}",
        hint=(
            "ask whoever runs the host. If it was reinstalled and the fingerprint is right, replace\n"
            + (
                f"its line in {host.known_hosts} by:\n    {known_name(host)} {got.get_name()} {got.get_base64()}"
                if host.known_hosts and not host.host_key
                else f'in inventories/{host.name}.yaml:\n    host_key: "{got.get_name()} {got.get_base64()}"'
            )
        ),
    )


class RefuseUnknown(paramiko.MissingHostKeyPolicy):
    """Raises `unknown` before anything is sent."""

    def __init__(self, host: Endpoint) -> None:
        self._host = host

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise unknown(self._host, key)
