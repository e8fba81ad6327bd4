"""Injection against the real systemd: generated values of every kind that reaches a process, hundreds a start.

What the model accepts, a program started by the rendered lines sees byte for byte; tests/unit/units/test_injection.py
holds what never reaches one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.units import launch, render
from tests.longer import longer

from ..unit.units.kinds import KINDS, RELEASE, Inventory, Kind, accepted
from .harness import TestHost

NAME = "values"
#: Of the values that become words of a command line: one of each way in. tests/unit/units has them all.
SOME = ("the host's root", "an argument", "the bind")
UNIT = f"/etc/systemd/system/{NAME}.service"
DUMP = "/var/tmp/ddtree-dump"
VALUES, A_START = 1000, 250
# Stands where the release's Python would, under every root; appends what it was given.
PROGRAM = f"""\
#!/usr/bin/python3 -I
import json, os, sys
found = {{"argv": [os.fsencode(word).hex() for word in sys.argv]}}
found["env"] = {{key.hex(): value.hex() for key, value in os.environb.items()}}
with open("{DUMP}", "a") as out:
    out.write(json.dumps(found) + "\\n")
""".encode()


@pytest.fixture
def host(testhost: TestHost) -> Iterator[TestHost]:
    yield testhost
    testhost.sh(f"rm -rf {UNIT} {DUMP} /etc/{NAME}.env /opt/{NAME}; systemctl daemon-reload; systemctl reset-failed")


def start(host: TestHost, lines: list[str], programs: set[str]) -> list[dict[str, object]]:
    """One oneshot unit of all these lines; what each started program saw."""
    host.put(f"/opt/{NAME}/program", PROGRAM, 0o755)
    for program in programs:
        done = host.run(
            ["sh", "-ec", 'mkdir -p "$(dirname "$1")"; ln -sfn "$2" "$1"', "sh", program, f"/opt/{NAME}/program"]
        )
        assert done.returncode == 0, done.stderr
    host.put(UNIT, ("[Service]\nType=oneshot\n" + "".join(f"{line}\n" for line in lines)).encode())
    host.sh(f"rm -f {DUMP}; systemctl daemon-reload; systemctl start {NAME}")
    return [json.loads(line) for line in host.sh(f"cat {DUMP}").splitlines()]


def unhex(words: object) -> list[str]:
    assert isinstance(words, list)
    return [bytes.fromhex(word).decode() for word in words]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind",
    [kind if kind.name in SOME else longer(kind) for kind in KINDS if kind.in_argv],
    ids=lambda kind: kind.name,
)
def test_command_lines_arrive_word_for_word(host: TestHost, tmp_path: Path, kind: Kind) -> None:
    found = []
    for value, deployment in accepted(kind, Inventory(tmp_path), VALUES):
        try:
            unit = render(deployment, RELEASE, 1).files["unit"]
        except UsageError:
            continue
        (line,) = [line for line in unit.split("\n") if line.startswith("ExecStart=")]
        assert kind.arrives(deployment, value)
        found.append((line, launch(deployment, RELEASE).argv))
    assert found, "every value was refused"
    for at in range(0, len(found), A_START):
        chunk = found[at : at + A_START]
        seen = start(host, [line for line, _ in chunk], {argv[0] for _, argv in chunk})
        assert [unhex(one["argv"]) for one in seen] == [argv for _, argv in chunk]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.name.startswith("a variable")], ids=lambda kind: kind.name
)
def test_variables_arrive_byte_for_byte(host: TestHost, tmp_path: Path, kind: Kind) -> None:
    found = []
    for _, deployment in accepted(kind, Inventory(tmp_path), VALUES):
        try:
            found.append((render(deployment, RELEASE, 1).files["env"], launch(deployment, RELEASE).env))
        except UsageError:
            continue
    assert found, "every value was refused"
    for at in range(0, len(found), A_START):
        chunk = found[at : at + A_START]
        # One environment file holds a name once: here each value has a name of its own.
        named = kind.name == "a variable's name"
        lines, wanted = [], {}
        for index, (text, env) in enumerate(chunk):
            for line in text.split("\n"):
                key = line.partition("=")[0]
                if named and key in env and env[key] == "x":
                    lines.append(line)
                    wanted[key] = "x"
                elif not named and key == "V":
                    lines.append(f"V{index}{line[1:]}")
                    wanted[f"V{index}"] = env["V"]
        host.put(f"/etc/{NAME}.env", "".join(f"{line}\n" for line in lines).encode())
        (seen,) = start(host, [f"EnvironmentFile=/etc/{NAME}.env", f"ExecStart=/opt/{NAME}/program"], set())
        environment = {bytes.fromhex(key): bytes.fromhex(value) for key, value in seen["env"].items()}  # type: ignore[attr-defined]
        for key, value in wanted.items():
            assert environment[key.encode()] == value.encode(), key
