"""The rule that ssh(1) is held to is the one that Fabric is held to: what one lets pass, the other does."""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path

import pytest
from paramiko.hostkeys import HostKeys

from ddtree_ops.errors import UsageError
from ddtree_ops.remote.hostkeys import add_expected
from ddtree_ops.remote.knownhosts import allowed_keys, known_name

from .endpoint import Entry
from .test_hostkeys import ONE, TWO


def hashed(name: str) -> str:
    salt = bytes(range(20))
    told = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(told).decode()}"


def by_paramiko(entry: Entry) -> list[str] | None:
    keys = HostKeys()
    try:
        add_expected(entry, keys)
    except UsageError:
        return None
    found = keys.lookup(known_name(entry)) or {}
    return sorted(f"{kind} {key.get_base64()}" for kind, key in found.items())


@pytest.mark.parametrize(
    "text",
    [
        f"h {ONE}",
        f"h {ONE} a comment",
        f"other {TWO}\nh,10.0.0.1 {ONE}\n",
        f"[h]:2222 {ONE}",
        f"{hashed('h')} {ONE}\n{hashed('g')} {TWO}",
        f"* {ONE}\nh* {ONE}\n!h {ONE}",
        f"@cert-authority h {ONE}",
        f"@revoked h {ONE}\nh {ONE}",
        f"# h {ONE}\n\n   \nh {ONE}",
        "h ssh-ed25519",
        "h",
        "",
    ],
)
@pytest.mark.parametrize("port", [22, 2222])
def test_a_file_allows_what_it_allows_paramiko(tmp_path: Path, text: str, port: int) -> None:
    file = tmp_path / "known"
    file.write_text(text)
    entry = Entry(address="h", port=port, known_hosts=str(file))
    ours, theirs = allowed_keys(entry), by_paramiko(entry)
    assert (None if ours is None else sorted(ours)) == theirs


@pytest.mark.parametrize(
    "host_key",
    [ONE, f"{ONE} comment", f"{ONE}\nh {TWO}", "AAAAC3Nz", "ssh-ed25519 !!!!", "ssh-ed25519 AAAA", "ssh-ed25519"],
)
def test_a_pinned_key_is_one_key_or_none(host_key: str) -> None:
    ours = allowed_keys(Entry(address="h", host_key=host_key))
    assert ours == ([ONE] if host_key.startswith(ONE) else None)


def test_nothing_said_allows_nothing(tmp_path: Path) -> None:
    assert allowed_keys(Entry()) == []
    assert allowed_keys(Entry(known_hosts=str(tmp_path / "none"))) is None
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert allowed_keys(Entry(known_hosts=str(tmp_path / "binary"))) is None
