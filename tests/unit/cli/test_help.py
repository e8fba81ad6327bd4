"""The documents are where the tool is, and the reference of keys is what the parsers do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.model import hostfile, meanings, reference
from ddtree_ops.model.nodes import _KEYS as _NODES_KEYS
from ddtree_ops.model.profilefile import _EXACTNESS_KEYS, PROFILE_KEYS
from ddtree_ops.model.types import CheckOverride, EvidenceRef, Gpus, ReleaseOptions, Router, SecretRef, Service

CHECKOUT = Path(__file__).parents[3]


def ddtree(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ddtree_ops.cli", *words], capture_output=True, text=True, check=False)


def test_every_document_is_a_topic_and_shown_as_it_is() -> None:
    documents = {path.stem: path.read_text(encoding="utf-8") for path in (CHECKOUT / "docs").glob("*.md")}
    told = json.loads(ddtree("help", "--json").stdout)
    assert set(told["topics"]) == set(documents)
    assert all(title and documents[name].startswith(f"# {title}") for name, title in told["topics"].items())
    assert ddtree("help", "exit-codes").stdout.rstrip() == documents["exit-codes"].rstrip()
    wrong = ddtree("help", "exit-code")
    assert wrong.returncode == 2 and "did you mean 'exit-codes'" in wrong.stderr


def test_the_reference_is_what_the_parsers_say() -> None:
    assert (CHECKOUT / "docs/reference.md").read_text(encoding="utf-8") == reference.markdown(), (
        "python -m ddtree_ops.model.reference > docs/reference.md"
    )


def test_every_key_has_its_meaning() -> None:
    def below(prefix: str, fields: tuple[str, ...]) -> set[str]:
        return {f"{prefix}.{field}" for field in fields if field != "line"}

    profile = {"extends", *PROFILE_KEYS, *below("exactness", tuple(_EXACTNESS_KEYS))}
    profile |= below("checks.NAME", CheckOverride.__struct_fields__)
    profile |= below("evidence", EvidenceRef.__struct_fields__)
    assert set(meanings.PROFILE) == profile
    host = {*hostfile._HOST_KEYS, *below("gpus", Gpus.__struct_fields__)}
    host |= below("release", ReleaseOptions.__struct_fields__) | below("services.NAME", Service.__struct_fields__)
    host -= {"services.NAME.lead"}  # of the further ranks' services, which nobody writes
    host |= below("services.NAME.nodes", _NODES_KEYS) | below("services.NAME.nodes.ranks[]", ("host", "address"))
    host |= below("services.NAME.router", Router.__struct_fields__)
    host |= below("rules[]", ("when", "set", "reason"))
    host |= below("secrets.NAME", SecretRef.__struct_fields__) - {"secrets.NAME.secret"}
    assert set(meanings.HOST) == host
    assert set(meanings.WORKSPACE) == {"default_host", "order", "groups", "max_unavailable"}


@pytest.mark.parametrize(
    ("path", "allowed", "default"),
    [
        ("budget", "a whole number from 1 to 1024; or null", "none"),
        ("algorithm", "none, dflash, ddtree", "none"),
        ("exactness.concurrency", "[a, b, ...]; each a whole number from 1 to 1024", "[1, 8]"),
        ("release_base", "a name such as sglang-0.5.17", "sglang-0.5.17 (sglang), reference (reference)"),
    ],
)
def test_a_row_says_what_the_model_does(path: str, allowed: str, default: str) -> None:
    (row,) = (key for key in reference.profile_keys() if key.path == path)
    assert (row.allowed, row.default) == (allowed, default)


def test_exit_codes_are_all_explained() -> None:
    """Each code of the README's table has its section: what happened, in what state the host is, what to do."""
    text = (CHECKOUT / "docs/exit-codes.md").read_text(encoding="utf-8")
    codes = re.findall(r"^\| (\d+) \|", (CHECKOUT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    sections = dict(re.findall(r"^## (\d+)\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert codes[:11] == list(sections)
    for said in sections.values():
        assert all(word in said for word in ("**What happened.**", "**The host.**", "**Next.**"))
