"""Secrets written as values, circles of profiles, files that would be left unread: each refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_refusals import HOSTFILE, P, refusal
from .workspaces import HOST, make

SECRET = "hunter2hunter2hunter2"
SECRETS = [
    (f"api_key: {SECRET}\n", "", f"{P}:1: api_key: a secret is never written as a value"),
    (f"api_key: {{value: {SECRET}}}\n", "", f"{P}:1: api_key.value: unknown key"),
    (f"api_key: {{env: {SECRET}-x}}\n", "", f"{P}:1: api_key.env: not the name of an environment variable"),
    (f"api_key: {{file: {SECRET}}}\n", "", f"{P}:1: api_key.file: not an absolute path"),
    ("api_key: {env: KEY, file: /k}\n", "", f"{P}:1: api_key: needs exactly one of env and file"),
    (f"env: {{HF_TOKEN: {SECRET}}}\n", "", f"{P}:1: env.HF_TOKEN: looks like a secret"),
    (f"env:\n  A: b\n  OPENAI_API_KEY: {SECRET}\n", "", f"{P}:3: env.OPENAI_API_KEY: looks like a secret"),
    (f"env: {{db_password: {SECRET}}}\n", "", f"{P}:1: env.db_password: looks like a secret"),
    (f"env: {{http_proxy: 'http://u:{SECRET}@p/'}}\n", "", f"{P}:1: env.http_proxy: looks like a secret"),
    (f"env: {{X: 'hf_{SECRET}'}}\n", "", f"{P}:1: env.X: looks like a secret"),
    (f"env: {{HF_TOKEN: [{SECRET}]}}\n", "", f"{P}:1: env.HF_TOKEN: looks like a secret"),
    ("env: {HF_TOKEN: 12345}\n", "", f"{P}:1: env.HF_TOKEN: looks like a secret"),
    (f"extra_args: [--ssl-keyfile-password, {SECRET}]\n", "", f"{P}:1: extra_args[1]: looks like a secret"),
    (f"extra_args: [--auth-token={SECRET}]\n", "", f"{P}:1: extra_args[0]: looks like a secret"),
    (f"extra_args: [--api-key, {SECRET}]\n", "", f"{P}:1: extra_args[1]: looks like a secret"),
    ("", f"secrets: {{key: {SECRET}}}\n", f"{HOSTFILE}:15: secrets.key: a secret is never written as a value"),
    ("", f"secrets:\n  {SECRET}\n", f"{HOSTFILE}:15: secrets: expected a mapping"),
    ("api_key: {secret: key}\n", "", f"{P}:1: api_key: inventories/h.yaml has no secret 'key'"),
    ("api_key: {env: KEY}\n", "", f"{P}:1: api_key: a service outlives the environment"),
]


@pytest.mark.parametrize(("profile", "host", "wants"), SECRETS)
def test_a_secret_written_as_a_value_is_refused_and_never_repeated(
    profile: str, host: str, wants: str, tmp_path: Path
) -> None:
    workspace = make(tmp_path, {"profiles/over.yaml": "extends: b8k4\n" + profile}, host=HOST + host)
    message = refusal(workspace, "over")
    assert wants.replace(f"{P}:1:", f"{P}:2:").replace(f"{P}:3:", f"{P}:4:") in message
    assert SECRET not in message


def test_an_api_key_is_refused_where_it_would_be_an_argument(tmp_path: Path) -> None:
    over = "extends: b8k4\ntp: 2\napi_key: {file: /etc/key}\n"
    workspace = make(tmp_path, {"profiles/over.yaml": over}, host=HOST.replace("base: tiny", "base: kimi-k26"))
    assert f"{P}:3: api_key: SGLang 0.5.17 takes a key only in its arguments" in refusal(workspace, "over")


def test_a_backend_that_ignores_the_tree_mask_is_refused(tmp_path: Path) -> None:
    over = "extends: b8k4\ntp: 2\nattention_backend: fa3\n"
    workspace = make(tmp_path, {"profiles/over.yaml": over}, host=HOST.replace("base: tiny", "base: kimi-k26"))
    assert f"{P}:3: attention_backend: fa3 does not read the tree's mask" in refusal(workspace, "over")


def test_a_profile_without_algorithm_is_refused_for_the_drafter_it_would_lose(tmp_path: Path) -> None:
    message = refusal(make(tmp_path, {"profiles/over.yaml": "block_size: 8\n"}), "over")
    assert "profiles/tiny.yaml:4: drafter: given, but the algorithm is none (no profile names another)" in message


def test_a_circle_of_profiles_is_refused(tmp_path: Path) -> None:
    files = {f"profiles/{a}.yaml": f"# {a}\nextends: {b}\n" for a, b in (("a", "b"), ("b", "c"), ("c", "b"))}
    message = refusal(make(tmp_path, files), None)
    assert "inventories/profiles/c.yaml:2: extends: goes round in a circle: b -> c -> b" in message


def test_files_that_would_be_left_unread_are_refused(tmp_path: Path) -> None:
    for name, wants in (
        ("x.yml", "x.yml: would not be read"),
        ("X.yaml", "X.yaml: the file's name"),
        ("all.yaml", "all.yaml"),
    ):
        workspace = make(tmp_path / name, {name: HOST})
        assert f"inventories/{wants}" in refusal(workspace, None)


def test_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    workspace = make(tmp_path)
    (workspace / "inventories/profiles/over.yaml").write_bytes(b"# a\nopen: \xff\n")
    assert f"{P}:2: not UTF-8" in refusal(workspace, "over")


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("default_host: g\n", "workspace.yaml:1: default_host: no host 'g'"),
        ("default: h\n", "workspace.yaml:1: default: unknown key; did you mean 'default_host'?"),
    ],
)
def test_a_wrong_workspace_file_is_refused(text: str, wants: str, tmp_path: Path) -> None:
    assert wants in refusal(make(tmp_path, {"workspace.yaml": text}), None)
