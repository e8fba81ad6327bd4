"""What of a host does not fit a release, both sides named; and which interpreter is taken."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.host.agent.fitting import Interpreter, misfits, parts

HOST = {"machine": "x86_64", "glibc": "2.36", "driver": "580.65.06", "capabilities": ["9.0", "9.0"]}
FIT = {"machine": "x86_64", "glibc": "2.28", "driver": "570.1"}


@pytest.mark.parametrize(
    ("requires", "arch", "host", "words"),
    [
        ({}, "sm_90", {}, None),
        ({}, "sm_90a", {}, None),
        ({}, "none", {"driver": "", "capabilities": []}, "needs NVIDIA driver 570.1 or later, this host has none"),
        ({"driver": None}, "none", {"driver": "", "capabilities": []}, None),
        ({"machine": "aarch64"}, "sm_90", {}, "is for aarch64, this is x86_64"),
        ({"glibc": "2.38"}, "sm_90", {}, "needs glibc 2.38, this host has 2.36"),
        ({}, "sm_90", {"glibc": ""}, "needs glibc 2.28, this host has another libc"),
        ({"glibc": "2.4"}, "sm_90", {}, None),
        ({"driver": "580.105"}, "sm_90", {}, "needs NVIDIA driver 580.105 or later, this host has 580.65.06"),
        ({"driver": "580.65.6"}, "sm_90", {}, None),
        ({}, "sm_120", {}, "is for sm_120, the GPUs here are sm_90"),
        ({}, "sm_103", {"capabilities": ["10.3"]}, None),
        ({}, "sm_90", {"capabilities": []}, "the GPUs here are none that nvidia-smi shows"),
    ],
)
def test_both_sides_are_named(requires: dict[str, Any], arch: str, host: dict[str, Any], words: str | None) -> None:
    found = misfits({**FIT, **requires}, arch, {**HOST, **host})
    assert (found == []) if words is None else (len(found) == 1 and words in found[0])


def test_versions_are_compared_as_numbers() -> None:
    assert parts("580.65.06") == [580, 65, 6] and parts("") == []


@pytest.mark.parametrize(
    ("want", "have", "fits"),
    [
        ("2.11.0", "2.11.0", True),
        ("2.11.0", "2.11.0+cu130", True),
        ("2.11.0+cu130", "2.11.0+cu130", True),
        ("2.11.0+cu130", "2.11.0+cu128", False),
        ("2.11.0+cu130", "2.11.0", False),
        ("2.11.0", "2.11.1", False),
        ("2.11.0", None, False),
    ],
)
def test_what_the_host_provides(want: str, have: str | None, fits: bool) -> None:
    lacks = Interpreter("/usr/bin/python3", {"provided": {"torch": have}}).lacks({"torch": want})
    assert lacks == ([] if fits else [f"torch {want}, /usr/bin/python3 has {have or 'none'}"])
