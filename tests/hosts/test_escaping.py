"""Escaping against the real systemd: what a rendered unit starts sees every value byte for byte."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment
from ddtree_ops.units import escape, launch, render

from ..unit.model.workspaces import deployment as small_deployment
from .harness import TestHost

RELEASE = "0123456789abcdef"
NAME = "one"

# Stands where the release's Python would: writes what it was given where the service may write.
DUMP = b"""\
#!/usr/bin/python3 -I
import json, os, sys
found = {
    "argv": [os.fsencode(word).hex() for word in sys.argv],
    "env": {key.hex(): value.hex() for key, value in os.environb.items()},
    "cwd": os.getcwd(),
    "uid": os.getuid(),
}
for index, word in enumerate(sys.argv):
    if word == "--api-key-file":
        found["key"] = open(sys.argv[index + 1]).read()
with open(os.environ["HOME"] + "/dump.json", "w") as out:
    json.dump(found, out)
"""

AWKWARD = [
    *("", " ", "  a  ", "a b", '"', "'", "\\", "\\n", "a\\", "\\x41", "\\u0041", "%", "%%", "%h", "%n", "$", "$$"),
    *("$HOME", "${HOME}", "$$HOME", ";", "\\;", "a;b", "#", "# a", "|", "&", "<", ">", "*", "?", "~", "`id`", "$(id)"),
    *(
        "@x",
        "-x",
        "+x",
        "!x",
        "!!x",
        ":x",
        "\t",
        "\tx\t",
        "'a b'",
        '"a"b',
        "a=b",
        "=",
        "\r",
        "\x01",
        "\x1b[31m",
        "\x7f",
    ),
    *("é", "日本", "🙂", "\u00a0", "\u0085", "\u2028", "\ufeff", "\ue000", "[Service]", "x" * 20_000),
]


def generated(count: int) -> list[str]:
    """Values of what systemd treats in some special way, and a few plain characters between."""
    chance = random.Random(20260604)
    pieces = [*"\\\"'%$;# \t{}`=xnu0:\x08", "é", "日", "🙂"]
    return ["".join(chance.choices(pieces, k=chance.randrange(1, 12))) for _ in range(count)]


@pytest.fixture
def host(testhost: TestHost) -> Iterator[TestHost]:
    """An empty host with the service user that an install makes; everything is taken away again."""
    testhost.reset()
    testhost.sh("useradd --system ddtree")
    yield testhost
    units = " ".join(f"/etc/systemd/system/{unit}.service" for unit in (NAME, "refused", "strange", "gpu"))
    testhost.sh(f"rm -rf {units} /opt/strange /opt/ddtree /var/cache/ddtree '/etc/ddtree 100%'; userdel ddtree")
    testhost.sh("systemctl daemon-reload; systemctl reset-failed")


def start(host: TestHost, deployment: Deployment) -> dict[str, object]:
    """Put a generation on the host, start it, return what its process saw."""
    files = render(deployment, RELEASE, 1).files
    root = deployment.host.root
    host.put(f"{root}/releases/{RELEASE}/venv/bin/python", DUMP, 0o755)
    host.put(f"{root}/services/{NAME}/generations/1/env", files["env"].encode())
    host.put(f"/etc/systemd/system/{NAME}.service", files["unit"].encode())
    verify = host.run(["systemd-analyze", "verify", f"/etc/systemd/system/{NAME}.service"])
    # The recovery unit belongs to a bootstrap, which is not what is tested here.
    said = [line for line in verify.stderr.decode().splitlines() if "ddtree-recover@" not in line]
    assert (verify.returncode, said) == (0, [])
    dump = f"/var/cache/ddtree/{NAME}/dump.json"
    host.sh(
        f"rm -f {dump}; systemctl daemon-reload; systemctl reset-failed {NAME} || true; systemctl start --wait {NAME}"
    )
    return dict(json.loads(host.sh(f"cat {dump}")))


def yaml_list(values: list[str]) -> str:
    """JSON text is YAML; it keeps every character."""
    return json.dumps(values, ensure_ascii=True)


def test_values_reach_the_process_byte_for_byte(host: TestHost, tmp_path: Path) -> None:
    """Given arguments and variables with everything that systemd treats specially, each arrives unchanged."""
    values = [value for value in AWKWARD + generated(400) if "--" not in value]
    env = {f"V{index}": value for index, value in enumerate(values)}
    as_yaml = f"extra_args: {yaml_list(values)}\nenv: {json.dumps(env)}\n".replace("\\ud83d\\ude42", "\\U0001f642")
    deployment = small_deployment(tmp_path, as_yaml)
    wanted = launch(deployment, RELEASE)
    assert wanted.argv[-len(values) :] == values

    seen = start(host, deployment)

    argv = [bytes.fromhex(word).decode() for word in seen["argv"]]  # type: ignore[attr-defined]
    assert argv == wanted.argv
    environment = {bytes.fromhex(key): bytes.fromhex(value) for key, value in seen["env"].items()}  # type: ignore[attr-defined]
    for key, value in wanted.env.items():
        assert environment[key.encode()] == value.encode(), key
    assert seen["cwd"] == wanted.cwd
    assert seen["uid"] != 0


def test_what_is_refused_is_not_carried_by_systemd(host: TestHost) -> None:
    """Given the code points that are refused, written unescaped, systemd refuses the unit: nothing good is refused."""
    for value in ("\ufdd0", "\ufffe", "\uffff", "\U0001fffe", "\U0010ffff"):
        with pytest.raises(UsageError):
            escape.exec_word(value)
        unit = f'[Service]\nType=oneshot\nExecStart=/bin/echo "a{value}b"\n'
        host.put("/etc/systemd/system/refused.service", unit.encode())
        assert host.run(["systemctl", "daemon-reload"]).returncode == 0
        assert host.run(["systemctl", "start", "refused"]).returncode != 0, repr(value)


@pytest.mark.parametrize("directory", ["plain", "with space", "p%h", "é日", "@-+!:", "a;b", "#x", "a{b}", "~", "*"])
def test_an_executable_with_a_strange_path_is_started(host: TestHost, directory: str) -> None:
    program = f"/opt/strange/{directory}/x"
    host.put(program, b'#!/bin/sh\nprintf %s "$0" > /run/strange\n', 0o755)
    unit = f"[Service]\nType=oneshot\nExecStart={escape.exec_line([program])}\n"
    host.put("/etc/systemd/system/strange.service", unit.encode())
    host.sh("rm -f /run/strange; systemctl daemon-reload; systemctl start strange")
    assert host.run(["cat", "/run/strange"]).stdout == program.encode()


def test_the_api_key_reaches_the_service_as_a_credential(host: TestHost, tmp_path: Path) -> None:
    """Given a key in a root-only file, the service reads it, and neither its arguments nor its unit hold it."""
    host.put("/etc/ddtree 100%/key", b"k3y", 0o600)
    deployment = small_deployment(tmp_path, 'api_key: {file: "/etc/ddtree 100%/key"}\n')
    seen = start(host, deployment)
    assert seen["key"] == "k3y"
    shown = host.sh(f"systemctl show {NAME}; systemctl cat {NAME}")
    assert "k3y" not in shown


def test_the_hardening_scores_as_expected(host: TestHost, tmp_path: Path) -> None:
    """Given a unit for GPUs, its exposure is far below a bare unit's 9.6."""
    deployment = small_deployment(tmp_path, "tp: 2\n", base="kimi-k26")
    host.put("/etc/systemd/system/gpu.service", render(deployment, RELEASE, 1).files["unit"].encode())
    unit = "/etc/systemd/system/gpu.service"
    told = host.run(["systemd-analyze", "security", "--no-pager", "--threshold=38", "--offline=true", unit])
    assert told.returncode == 0, told.stdout.decode()[-300:]
