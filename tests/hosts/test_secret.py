"""A seeded secret: through every command, on a real host, with an engine that tells it to everybody who asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.longer import longer

from .harness import TestHost
from .matrix.world import HOME, SERVICE, World

# As a key reads, and as no pattern would know it: what hides it must know the value.
SECRETS = ("Zq7-correct horse battery", "k9Xw2LmNq8RtYv4BsDf6Gh1JkPzC3aEo")
KEY = "/etc/ddtree/key"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("secret", [SECRETS[0], *map(longer, SECRETS[1:])])
def test_a_seeded_secret_appears_nowhere(ct200: TestHost, tmp_path: Path, secret: str) -> None:
    """Given a key in a root-only file: not in a plan, JSON, journal, snapshot, evidence, process list or systemctl."""
    world = World(ct200, tmp_path / "ws")
    ct200.reset()
    ct200.put(KEY, secret.encode(), 0o600)
    world.workspace.profile("keyed", extends="b8k4", api_key={"file": KEY})
    world.workspace.profile("leaking", extends="keyed", extra_args=["--script", "wrong"])
    world.install(ct200.name)
    file = tmp_path / "plan.json"
    said = []
    for words, code in (
        (["plan", "--profile", "keyed", "-o", str(file)], 3),
        (["plan", "--profile", "keyed", "--json"], 3),
        (["deploy", str(file), "--yes"], 0),
        (["deploy", "--profile", "leaking", "--yes", "--json"], 5),
        (["render", "--profile", "keyed", "--json"], 0),
        (["status", "--json"], 0),
        (["logs", "--lines", "500"], 0),
        (["history", "--json"], 0),
        (["hosts", "--json"], 0),
        (["verify-exactness", "--json"], 0),
        (["snapshot", "--json"], 0),
        (["restart", "--yes", "--json"], 0),
        (["plan", "--profile", "b16k4", "--json"], 3),
    ):
        plain = words[0] == "hosts" or (str(file) in words and words[0] == "deploy")
        done = world.workspace.ddtree(*(words if plain else world.words(*words)), code=code)
        said.append(done.stdout + done.stderr)
    for text in said:
        assert secret not in text
    for path in world.workspace.path.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert secret not in file.read_text()

    # the engine does tell it: what is checked is that it was hidden, not that it was never said
    log = ct200.sh(f"journalctl -b -o json --no-pager -u {SERVICE}")
    assert any(secret in str(json.loads(line).get("MESSAGE")) for line in log.splitlines())
    others = ct200.sh("journalctl -b -o json --no-pager").splitlines()
    tellers = {json.loads(line).get("SYSLOG_IDENTIFIER") for line in others if secret in line}
    assert tellers == {SERVICE}
    shown = ct200.sh(
        f"systemctl show {SERVICE}; systemctl cat {SERVICE}; ps axeww -o args; cat /proc/*/cmdline | tr '\\0' ' '"
    )
    assert secret not in shown
    assert secret not in ct200.sh("for p in /proc/[0-9]*; do cat $p/environ 2>/dev/null | tr '\\0' ' '; done; true")
    found = ct200.run(
        ["grep", "-rlaF", secret, "/opt/ddtree", "/etc/systemd", "/var/tmp", "/tmp", "/run/systemd/system"]
    )
    assert found.stdout == b"", found.stdout
    assert ct200.sh(f"ls {HOME}/generations/2/evidence").strip()
