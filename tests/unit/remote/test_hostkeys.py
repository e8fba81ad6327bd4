"""Which host keys pass, and what an operator reads when one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from paramiko import PKey
from paramiko.hostkeys import HostKeyEntry, HostKeys

from ddtree_ops.errors import UsageError
from ddtree_ops.remote.hostkeys import add_expected, changed, fingerprint, unknown

from .endpoint import Entry

ONE = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
TWO = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB8eHRwbGhkYFxYVFBMSERAPDg0MCwoJCAcGBQQDAgEA"


def key(text: str) -> PKey:
    entry = HostKeyEntry.from_line(f"name {text}")
    assert entry is not None and entry.key is not None
    return entry.key


def expected(entry: Entry) -> HostKeys:
    keys = HostKeys()
    add_expected(entry, keys)
    return keys


def test_a_pinned_key_is_expected_on_its_port() -> None:
    assert expected(Entry(address="h", host_key=ONE)).check("h", key(ONE))
    keys = expected(Entry(address="h", port=2222, host_key=ONE + " comment"))
    assert keys.check("[h]:2222", key(ONE))
    assert not keys.check("h", key(ONE))


def test_known_hosts_is_read_from_the_named_file_only(tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(f"# comment\nother {TWO}\nh,10.0.0.1 {ONE}\n")
    assert expected(Entry(address="h", known_hosts=str(file))).check("h", key(ONE))
    assert not expected(Entry(address="h", known_hosts=str(file))).check("h", key(TWO))


@pytest.mark.parametrize(
    "host_key", ["AAAAC3Nz", "ssh-ed25519 !!!!", "ssh-ed25519 AAAA", "ssh-what AAAAC3Nz", "ssh-ed25519"]
)
def test_what_is_no_key_is_refused(host_key: str) -> None:
    with pytest.raises(UsageError, match="host_key"):
        expected(Entry(host_key=host_key))


def test_revoked_lines_are_refused_and_a_missing_file_named(tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(f"@revoked h {ONE}\nh {ONE}\n")
    with pytest.raises(UsageError, match="@revoked"):
        expected(Entry(address="h", known_hosts=str(file)))
    with pytest.raises(UsageError, match=r"nowhere.*No such file"):
        expected(Entry(known_hosts=str(tmp_path / "nowhere")))


def test_fingerprint_is_the_one_of_ssh_keygen() -> None:
    # printf 'name ssh-ed25519 AAAA...' | ssh-keygen -lf -
    assert fingerprint(key(ONE)) == "SHA256:ZkAslGjFiUHdGf/WUL8rQvkib4PTvQatUV0OUQSncCA"


def test_unknown_names_the_exact_line() -> None:
    error = unknown(Entry(name="ct200", address="h"), key(ONE))
    assert error.exit_code == 6
    assert error.hint.splitlines()[-1].strip() == f'host_key: "{ONE}"'
    assert "inventories/ct200.yaml" in error.hint
    in_file = unknown(Entry(address="h", port=2222, known_hosts="/k"), key(ONE))
    assert in_file.hint.splitlines()[-1].strip() == f"[h]:2222 {ONE}"


def test_changed_shows_both_fingerprints_and_the_line() -> None:
    error = changed(Entry(name="ct200", address="h", host_key=ONE), key(TWO), key(ONE))
    assert fingerprint(key(ONE)) in error.message
    assert fingerprint(key(TWO)) in error.message
    assert "HAS CHANGED" in error.message
    assert error.hint.splitlines()[-1].strip() == f'host_key: "{TWO}"'
