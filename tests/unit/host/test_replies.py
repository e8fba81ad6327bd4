"""What leaves a host is capped, without control characters and without secrets; what enters is checked by its form."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.doctor import collector
from ddtree_ops.host import PARTS, _bound, joined, sha256, source
from ddtree_ops.host.agent import base
from ddtree_ops.host.agent.base import safe

from .box import Box, Refused


def test_the_source_is_the_file_and_its_hash_what_the_host_tells(box: Box) -> None:
    assert box.agent.read_text() == source()
    assert box.agent.stat().st_mode & 0o777 == 0o755
    assert box.probe()["agent_sha256"] == sha256()
    assert box.bootstrap()["changed"] == []


def test_the_parts_make_one_file_without_imports_of_ours() -> None:
    tree = ast.parse(source(), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    roots = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert {root.partition(".")[0] for root in roots} <= sys.stdlib_module_names
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in imports)
    files = {path.stem for path in Path(base.__file__).parent.glob("*.py")}
    assert files == {"__init__", *PARTS}


@pytest.mark.parametrize("text", [source(), joined("collector", collector.PARTS)], ids=["agent", "collector"])
def test_no_part_takes_a_name_of_another(text: str) -> None:
    """They share one module: the later one would be called for both, whatever the types said of each part."""
    named = Counter(name for node in ast.parse(text).body for name in _bound(node))
    assert [name for name, times in named.items() if times > 1] == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x00\x08\r\n", "red x\n"),
        ("a\u202eb\u2066c\u200f", "abc"),
        ("Args(api_key='abc123', tp_size=8)", "Args(api_key='<redacted>', tp_size=8)"),
        ("api_key=None, tp_size=8", "api_key=None, tp_size=8"),
        ('"hf_token": "zzz999"', '"hf_token": "<redacted>"'),
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer <redacted>"),
        ("use sk-abcdefghijkl1234 now", "use <redacted> now"),
        ("hf_abcdefghijklmnop", "<redacted>"),
        ("max_total_tokens=4096 tokenizer_path=/m", "max_total_tokens=4096 tokenizer_path=/m"),
        ("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934c", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934c"),
        ("Zk9qLw3TnB7xVd2RfY8sHj5MpC1aGe6U", "<redacted>"),
    ],
)  # fmt: skip
def test_texts_are_made_safe(text: str, left: str) -> None:
    assert safe(text) == left


@given(st.text(max_size=300), st.text(alphabet="abcXYZ0123456789-_", min_size=8, max_size=40))
def test_no_known_secret_and_no_control_character_is_left(text: str, secret: str) -> None:
    said = safe(text + secret + text, (secret,))
    assert secret not in said.replace("<redacted>", "\n") or secret in text.replace(secret, "")
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in said)


def test_texts_that_the_patterns_are_spared_are_none_of_theirs() -> None:
    patterns = (base.SECRET_PAIR, base.SECRET_VALUE, base.WORD)
    assert min(re._parser.parse(each.pattern).getwidth()[0] for each in patterns) >= base.SHORT  # type: ignore[attr-defined]
    found = [chr(code) for code in range(0x3000) if base.CONTROL.match(chr(code))]
    assert len(found) > 70 and not any(char.isprintable() for char in [*found, "\x1b"])


@pytest.mark.alone
@pytest.mark.parametrize(
    "unit", ["x", "secret", "\x1b]", "eyJ-", "sk-", "hf_", "api_key=", "password ", "A1b", " ", "\x1b[", "Bearer "]
)
def test_hostile_lines_cost_little(unit: str) -> None:
    began = time.monotonic()
    for _ in range(20):
        safe(unit * 2000)
    assert time.monotonic() - began < 4


def test_control_characters_in_a_log_stay_on_the_host(box: Box) -> None:
    box.deploy("txn-1", engine={"who": "x", "say": "\x1b[2Jboo\x07\u202e"}, passed=False)
    replies = json.dumps([box.probe(), box.call("logs"), box.entries("txn-1")], ensure_ascii=False)
    assert "boo" in replies
    assert not any(ord(c) < 32 or c in "\u202e\x9b" for c in json.loads(replies)[1]["lines"][0])
    evidence = (box.dir / "generations/1/evidence/txn-1/log.txt").read_text()
    assert "\x1b" not in evidence


@pytest.mark.parametrize(
    "change",
    [
        {"verb": "nothing"}, {"service": "../x"}, {"service": "A"}, {"root": "relative"}, {"root": "/a/../b"},
        {"root": "/a//b"}, {"root": "/a b"}, {"root": "/a\nb"}, {"root": "/a/"}, {"unit_dir": "etc"},
        {"supervisor": "upstart"}, {"releases": ["../../x"]}, {"port": 70000},
        {"port": True}, {"model_paths": ["../x"]}, {"model_paths": "/x"},
    ],
)  # fmt: skip
def test_a_request_of_another_form_is_refused(box: Box, change: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        box.call(**{"verb": "probe", **change})
    assert refused.value.kind == "usage"


@pytest.mark.parametrize(
    "change",
    [
        {"txn": "../../x"}, {"txn": "x/y"}, {"format": 2}, {"target": 7}, {"target": "1"}, {"release": "x"},
        {"health": {"port": 1}}, {"health": {"port": 1, "timeout_s": 1, "expect": {}, "fatal": ["("]}},
        {"lease_s": 0}, {"lease_s": "60"}, {"stop_timeout_s": None}, {"service": "other"}, {"root": "/elsewhere"},
        {"supervisor": "systemd"}, {"generation": {"n": 1, "files": {"../x": ""}, "meta": {}}},
        {"generation": {"n": 1, "files": {"a/b": ""}, "meta": {}}},
        {"generation": {"n": 1, "files": {"generation.json": ""}, "meta": {}}},
        {"generation": {"n": 1, "files": {"env": 1}, "meta": {}}},
    ],
)  # fmt: skip
def test_a_plan_of_another_form_is_refused_before_any_write(box: Box, change: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        box.call("apply", plan={**box.plan("txn-1"), **change})
    assert refused.value.kind in ("usage", "failed")
    assert not box.dir.exists()


def test_a_verdict_must_be_of_a_deploy_in_progress_and_counts_once(box: Box) -> None:
    box.call("apply", plan=box.plan("txn-1"))
    box.wait("txn-1", "health", "begin")
    for wrong in ({"kind": "EXACT"}, {"passed": 1}):
        with pytest.raises(Refused, match="neither true nor false"):
            box.call("verdict", txn="txn-1", verdict=wrong)
    with pytest.raises(Refused, match="not in progress"):
        box.verdict("txn-2")
    box.verdict("txn-1", passed=False)
    with pytest.raises(Refused, match=r"already|not in progress"):
        box.verdict("txn-1", passed=True)
    assert box.end("txn-1")["event"] == "recovered"


def test_a_verdict_from_outside_a_deploy_is_kept_and_changes_nothing_that_is_confirmed(box: Box) -> None:
    given = {"kind": "FAIL", "passed": False, "binds": {"generation": 1}}
    with pytest.raises(Refused, match="confirmed is None"):
        box.call("record", n=1, verdict=given)
    box.deploy("txn-1")
    before = box.probe()
    assert before["verified"] is None
    kept = box.call("record", n=1, verdict=given, who="ann", client="desk")
    after = box.probe()
    assert after["verified"].items() >= given.items() and after["verified"]["t"] > 0
    for key in ("state", "verdict", "drift", "unit"):
        assert after[key] == before[key]
    row = box.call("history")["history"][0]
    assert (row["txn"], row["note"], row["reason"]) == (kept["txn"], "record", "verify-exactness: FAIL")
    with pytest.raises(Refused, match="generation 2, confirmed is 1"):
        box.call("record", n=2, verdict=given)
    with pytest.raises(Refused, match="neither true nor false"):
        box.call("record", n=1, verdict={"kind": "EXACT"})
    assert box.probe()["verified"] == after["verified"]


def test_no_verdict_is_kept_while_a_deploy_runs_and_none_outlives_the_next_confirmation(box: Box) -> None:
    given = {"kind": "FAIL", "passed": False}
    box.deploy("txn-1")
    box.call("record", n=1, verdict=given)
    box.call("apply", plan=box.plan("txn-2"))
    box.wait("txn-2", "health", "begin")
    with pytest.raises(Refused, match=r"locked|unfinished"):
        box.call("record", n=1, verdict=given)
    box.verdict("txn-2", passed=True)
    assert box.end("txn-2")["event"] == "confirmed"
    assert box.probe()["verified"] is None


def test_models_are_identified_by_headers_and_sizes(box: Box, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    header = b'{"w": {"dtype": "F32"}}'
    (model / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)

    def ask() -> Any:
        return box.call("probe", model_paths=[str(model), "/nonexistent"])["models"]

    first = ask()
    assert first["/nonexistent"] == {"present": False, "identity": None}
    identity = first[str(model)]["identity"]
    assert identity["shards"] == [["a.safetensors", 8 + len(header) + 64]]
    (model / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.replace(b"32", b"16") + b"\0" * 64)
    assert ask()[str(model)]["identity"]["headers_sha256"] != identity["headers_sha256"]
    (model / "config.json").write_text("{ }")
    assert ask()[str(model)]["identity"]["config_sha256"] != identity["config_sha256"]


def test_a_probe_tells_the_pythons_that_a_release_may_stand_on(box: Box) -> None:
    told = box.probe()["system"]["pythons"]
    assert ".".join(sys.version.split(".")[:2]) in told
    assert told == sorted(set(told), key=lambda version: int(version[2:]))
