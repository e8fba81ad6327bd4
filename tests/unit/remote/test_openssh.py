"""What ssh(1) itself makes of the words that it is given: `ssh -G` prints what it would do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_ops.errors import Unreachable
from ddtree_ops.remote import openssh
from ddtree_ops.remote.openssh import ssh_words

from .endpoint import Entry
from .test_hostkeys import ONE


def entry(**changes: object) -> Entry:
    return Entry(transport="ssh", address="host.invalid", port=2222, user="ann", host_key=ONE, **changes)  # type: ignore[arg-type]


def resolved(words: list[str]) -> dict[str, list[str]]:
    said = subprocess.run([*words, "-G", "host.invalid"], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    for line in said.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def test_one_host_one_key_and_nothing_of_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host *\n  User eve\n  StrictHostKeyChecking no\n  ProxyCommand false\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    key = tmp_path / "id"
    key.write_text("key")
    with ssh_words(entry(identity_file=str(key))) as words:
        assert words is not None
        does = resolved(words)
        known = does["userknownhostsfile"][0]
        assert Path(known).read_text() == f"{openssh.ALIAS} {ONE}\n"
    assert not Path(known).exists()
    assert (does["user"], does["port"]) == (["ann"], ["2222"])
    assert does["stricthostkeychecking"] == ["true"] and does["globalknownhostsfile"] == ["/dev/null"]
    assert (
        does["identityfile"] == [str(key)] and does["identitiesonly"] == ["yes"] and does["identityagent"] == ["none"]
    )
    assert does["batchmode"] == ["yes"] and does["forwardagent"] == ["no"] and does["updatehostkeys"] == ["false"]
    assert "proxycommand" not in does and does["passwordauthentication"] and does["canonicalizehostname"] == ["false"]


def test_without_an_identity_it_is_the_agent_alone() -> None:
    with ssh_words(entry()) as words:
        assert words is not None
        does = resolved(words)
    assert does["identityfile"] == ["none"] and "identityagent" not in does


def test_the_key_exchange_is_ssh_s_own_but_that_aes_comes_first() -> None:
    plain = resolved(["ssh", "-F", "none"])
    with ssh_words(entry()) as words:
        assert words is not None
        ours = resolved(words)
    for what in ("kexalgorithms", "macs", "hostkeyalgorithms", "rekeylimit"):
        assert ours[what] == plain[what]
    first, *others = ours["ciphers"][0].split(",")
    assert first == "aes128-gcm@openssh.com"
    assert [first, *others] != plain["ciphers"][0].split(",") and {first, *others} == {*plain["ciphers"][0].split(",")}


@pytest.mark.parametrize("name", ["a b", "a%h", "${HOME}", 'a"b', "a\\b", "a'b"])
def test_a_path_that_ssh_would_read_otherwise_is_left_to_fabric(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("key")
    with ssh_words(entry(identity_file=str(tmp_path / name))) as words:
        assert words is None


@pytest.mark.parametrize(
    "changes",
    [{"host_key": None}, {"host_key": "nonsense"}, {"identity_file": "/nonexistent"}],
)
def test_what_cannot_be_held_to_the_rule_is_not_asked(changes: dict[str, str | None]) -> None:
    made = Entry(**{**vars(entry()), **changes})  # type: ignore[arg-type]
    with ssh_words(made) as words:
        assert words is None
    assert openssh.ask(made, ["true"], stdin=b"", timeout=5, root=False) is None


def test_without_ssh_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with ssh_words(entry()) as words:
        assert words is None


def test_root_that_is_not_to_be_had_is_refused_before_a_connection() -> None:
    with pytest.raises(Unreachable, match="needs root, and ann is not root"):
        openssh.ask(entry(), ["true"], stdin=b"", timeout=5, root=True)


@pytest.fixture
def dialled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A program in ssh's place that runs the command here; how often it was started."""
    log, program = tmp_path / "dialled", tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho dialled >>{log}\nfor command; do :; done\nexec sh -c "$command"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return lambda: len(log.read_text().split()) if log.exists() else 0


def asked(argv: tuple[str, ...], stdin: bytes) -> bytes:
    result = openssh.ask(entry(), argv, stdin=stdin, timeout=20, root=False)
    assert result is not None
    return result.stdout


def test_what_was_begun_answers_the_question_it_was_begun_for(dialled: Callable[[], int]) -> None:
    openssh.begin(entry(), ("cat",), timeout=20, root=False)
    assert asked(("tr", "a-z", "A-Z"), b"another question") == b"ANOTHER QUESTION"
    assert asked(("cat",), b"this one") == b"this one"
    assert dialled() == 2
    assert asked(("cat",), b"once more") == b"once more"
    assert dialled() == 3


def test_what_was_begun_for_root_is_refused_by_the_question(dialled: Callable[[], int]) -> None:
    openssh.begin(entry(), ("cat",), timeout=20, root=True)
    with pytest.raises(Unreachable, match="needs root"):
        openssh.ask(entry(), ("cat",), stdin=b"", timeout=20, root=True)
    assert dialled() == 0


@pytest.mark.usefixtures("dialled")
def test_what_was_begun_and_never_asked_ends_with_the_process(tmp_path: Path) -> None:
    command = f"echo $$ >{tmp_path}/pid; cat; echo >{tmp_path}/end"
    script = (
        "import pathlib, time\nfrom tests.unit.remote.test_openssh import entry, openssh\n"
        f"openssh.begin(entry(), ('sh', '-c', {command!r}), timeout=60, root=False)\n"
        f"told = pathlib.Path({str(tmp_path / 'pid')!r})\n"
        "while not told.exists() or not told.read_text(): time.sleep(0.01)\n"
    )
    before = set(Path(tempfile.gettempdir()).glob("ddtree-known-*"))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() and not (tmp_path / "end").exists()
    assert set(Path(tempfile.gettempdir()).glob("ddtree-known-*")) <= before
