"""From a host's reply to files and message: what is kept, what is left out, what is hidden."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.errors import DdtreeError, Failed, UsageError
from ddtree_ops.snapshot import files, message, redact

TOP = "snapshots/ct200/sglang-k26-ddtree/"
UNIT = """[Service]
ExecStart=/opt/ddtree/releases/ab12/venv/bin/python -m sglang.launch_server --port 30000 --api-key "k-from-unit-1"
Environment="HF_TOKEN=hf-quoted with spaces" CUDA_HOME=/usr/local/cuda WANDB_API_KEY=plainvalue99
LoadCredential=api_key:/etc/ddtree/api_key
SetCredential=other:inline-credential-value
"""


def collected(**changes: Any) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "unit": UNIT,
        "dropins": {"/etc/systemd/system/x.service.d/10-numa.conf": "[Service]\r\nNUMAPolicy=bind"},
        "env": "CUDA_VISIBLE_DEVICES=0,1\nADMIN_PASSWORD='pass word one'\n",
        "generation": {
            "n": 3,
            "meta": {"profile": {"algorithm": "ddtree", "budget": 16}, "release": "ab12ff", "time": 12.5},
        },
        "manifest": {"id": "ab12ff", "pins": ["torch==2.13.0"]},
        "server_info": {
            "speculative_algorithm": "DDTREE",
            "speculative_ddtree_budget": 16,
            "speculative_ddtree_topk": 4,
            "max_total_tokens": 4096,
            "random_seed": 8123,
            "api_key": "k-from-info-22",
            "tokenizer_path": "/models/k26",
            "ssl_key_file": "/etc/key.pem",
            "note": "key is k-from-info-22 here",
        },
        "gpus": [{"name": "RTX PRO 6000", "memory_total": 97887, "memory_free": 1234, "pid": 5}],
        "driver": "570.1",
        "verdict": {"kind": "EXACT", "seconds": 14.2},
    }
    return reply | changes


def made(**changes: Any) -> dict[str, str]:
    return files(collected(**changes), "ct200", "sglang-k26-ddtree")


def test_the_files_have_fixed_names_and_stable_text() -> None:
    names = ["dropins/10-numa.conf", "env", "generation.json", "hardware.json", "release.json", "server-args.json"]
    assert list(made()) == [TOP + name for name in [*names, "unit.service", "verdict.json"]]
    assert made()[TOP + "dropins/10-numa.conf"] == "[Service]\nNUMAPolicy=bind\n"
    backwards = dict(reversed(collected().items()))
    backwards["server_info"] = dict(reversed(collected()["server_info"].items()))
    assert files(backwards, "ct200", "sglang-k26-ddtree") == made()


def test_what_changes_by_itself_is_left_out() -> None:
    other = collected()
    other["server_info"] |= {"random_seed": 1, "internal_states": [{"avg_spec_accept_length": 3.1}]}
    other["generation"]["meta"]["time"] = 99
    other["gpus"][0] |= {"memory_free": 1, "pid": 77, "utilization": 12, "temperature_gpu": 70}
    other["verdict"]["seconds"] = 1.0
    other["active"] = {"pid": 4}
    assert files(other, "ct200", "sglang-k26-ddtree") == made()
    assert '"memory_total": 97887' in made()[TOP + "hardware.json"]


def test_no_secret_is_kept_and_what_is_none_stays() -> None:
    everything = "".join(made().values())
    for secret in (
        "k-from-unit",
        "k-from-info",
        "hf-quoted",
        "plainvalue99",
        "inline-credential",
        "pass word one",
        "with spaces",
    ):
        assert secret not in everything
    for kept in ("LoadCredential=api_key:/etc/ddtree/api_key", "CUDA_HOME=/usr/local/cuda", "CUDA_VISIBLE_DEVICES=0,1"):
        assert kept in everything
    arguments = json.loads(made()[TOP + "server-args.json"])
    assert arguments["api_key"] == redact.REDACTED and arguments["max_total_tokens"] == 4096
    assert arguments["tokenizer_path"] == "/models/k26" and arguments["ssl_key_file"] == "/etc/key.pem"
    assert arguments["note"] == f"key is {redact.REDACTED} here"


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("HF_TOKEN", True), ("api_key", True), ("adminApiKey", True), ("AWS_SECRET_ACCESS_KEY", True),
        ("password", True),
        ("max_total_tokens", False), ("tokenizer_path", False), ("skip_tokenizer_init", False), ("keyboard", False),
        ("api_key_file", False), ("speculative_num_draft_tokens", False), ("monkey", False), ("LoadCredential", False),
        ("author", False), ("key", True), ("client_secret", True),
    ],
)  # fmt: skip
def test_secret_names(key: str, secret: bool) -> None:
    assert redact.secret_key(key) is secret


@pytest.mark.parametrize(
    "value",
    [
        "sk-" + "a1" * 10,
        "hf_" + "Ab1" * 8,
        "ghp_" + "a" * 36,
        "AKIA" + "A1B2" * 4,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    ],
)
def test_values_that_look_like_secrets_go_wherever_they_stand(value: str) -> None:
    assert value not in redact.text(f"ExecStart=/x --flag {value}\n")
    assert value not in json.dumps(redact.document({"argv": ["a", f"b={value}"]}))


def test_more_shapes_of_secrets() -> None:
    assert "hunter22" not in redact.text("Environment=URL=https://user:hunter22@example.org/x")
    assert "abcdefgh" not in redact.text('H="Authorization: Bearer abcdefghijkl"')
    assert "MIIE" not in redact.text("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nA=1")
    assert redact.text("ExecStart=/x --api-key=abc --port 1") == f"ExecStart=/x --api-key={redact.REDACTED} --port 1"
    assert redact.text("ExecStart=/x --api-key abc --port 1") == f"ExecStart=/x --api-key {redact.REDACTED} --port 1"
    assert redact.text("ExecStart=/x --max-total-tokens 12") == "ExecStart=/x --max-total-tokens 12"


def test_names_from_a_host_cannot_leave_their_place() -> None:
    hostile = {
        "../../../.git/hooks/x.conf": "a",
        "/x/..": "b",
        "/y/.conf": "c",
        "/z/a b\n;$.conf": "d",
        "/q/a_b___.conf": "e",
    }
    paths = [path for path in made(dropins=hostile) if "dropins" in path]
    assert len(paths) == 5
    for path in paths:
        name = path.removeprefix(TOP + "dropins/")
        assert "/" not in name and not name.startswith(".") and name.endswith(".conf")


def test_control_characters_are_replaced() -> None:
    text = made(unit="A=\x1b[31m\x00\r\nB=ü\t1\n\n")[TOP + "unit.service"]
    assert text == "A=\ufffd[31m\ufffd\nB=ü\t1\n"


def test_a_plain_process_has_its_own_name() -> None:
    assert TOP + "process.json" in made(unit='{"argv": ["x"]}') and TOP + "unit.service" not in made(
        unit='{"argv": []}'
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"unit": 3},
        {"unit": "x" * 300_000},
        {"dropins": ["a"]},
        {"dropins": {f"{i}.conf": "" for i in range(65)}},
        {"server_info": {"a": [0] * 30_000}},
    ],
)
def test_a_reply_that_cannot_be_one_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Failed):
        made(**changes)


def test_deep_and_empty_replies_and_wrong_names_are_refused() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    with pytest.raises(Failed):
        made(server_info={"a": deep})
    with pytest.raises(Failed):
        files({}, "ct200", "svc")
    for host, service in (("../x", "svc"), ("ct200", "a/b"), ("", "svc"), ("CT", "svc")):
        with pytest.raises(UsageError):
            files(collected(), host, service)


LEAVES = st.none() | st.integers() | st.text()
JSON = st.recursive(LEAVES, lambda c: st.lists(c) | st.dictionaries(st.text(), c), max_leaves=8)


@given(st.dictionaries(st.sampled_from(list(collected())), JSON))
def test_any_reply_gives_files_or_a_clear_error(reply: dict[str, Any]) -> None:
    try:
        new = files(reply, "ct200", "svc")
    except DdtreeError as error:
        assert error.message
    else:
        assert all(path.startswith("snapshots/ct200/svc/") for path in new)
        assert message({}, new, "ct200", "svc").startswith("ct200: svc first snapshot")
        assert message(new, new, "ct200", "svc") == "ct200: svc no change\n"


def said(**changes: Any) -> str:
    return message(made(), made(**changes), "ct200", "sglang-k26-ddtree")


def test_the_message_says_what_changed() -> None:
    info = collected()["server_info"] | {"speculative_ddtree_budget": 8}
    changed = said(server_info=info, manifest={"id": "cd34aa"})
    assert changed == "ct200: sglang-k26-ddtree budget 16 -> 8, release ab12 -> cd34\n"
    assert said(verdict={"kind": "NEAR-TIE"}) == "ct200: sglang-k26-ddtree verdict EXACT -> NEAR-TIE\n"
    assert said(driver="580.2") == "ct200: sglang-k26-ddtree driver 570.1 -> 580.2\n"
    assert said(env="CUDA_VISIBLE_DEVICES=1\n") == "ct200: sglang-k26-ddtree env changed\n"
    assert said(dropins={}) == "ct200: sglang-k26-ddtree dropins/10-numa.conf removed\n"
    assert said(manifest={"id": "ab12fe"}) == "ct200: sglang-k26-ddtree release ab12ff -> ab12fe\n"


def test_the_first_message_says_what_runs() -> None:
    first = message({}, made(), "ct200", "sglang-k26-ddtree")
    start = "ct200: sglang-k26-ddtree first snapshot, algorithm DDTREE, budget 16, topk 4, release ab12ff"
    assert first.splitlines()[0] == start
    assert "verdict EXACT" in first


def test_a_long_message_goes_on_in_the_body() -> None:
    info = {f"argument_{i}": i for i in range(12)}
    subject, empty, *body = said(server_info=collected()["server_info"] | info).splitlines()
    assert len(subject) <= 100 and empty == "" and len(body) >= 8


def test_an_unreadable_old_snapshot_does_not_stop_the_next() -> None:
    broken = made() | {TOP + "server-args.json": "<<<<<<< HEAD\n", TOP + "generation.json": "[]\n"}
    assert "budget none -> 16" in message(broken, made(), "ct200", "sglang-k26-ddtree")
