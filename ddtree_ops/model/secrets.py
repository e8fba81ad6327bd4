"""Secrets are named, never written: the one reference form, and what a secret written by mistake looks like."""

from __future__ import annotations

import itertools
import re

from ddtree_ops.model import check
from ddtree_ops.model.types import SecretRef
from ddtree_ops.model.yamlfile import Node

REFERENCE = "{env: NAME} or {file: /absolute/path/on/the/host}"
ENV_NAME = "[A-Za-z_][A-Za-z0-9_]*"
SECRET_NAME = "[a-z][a-z0-9_-]{0,40}"
SECRET_NAME_TEXT = "lower-case letters, digits, '_' and '-'"

_SECRET_PARTS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
_KEY_BEFORE = {"api", "access", "private", "secret", "auth"}
_SECRET_VALUE = re.compile(
    r"-----BEGIN|://[^/\s:@]*:[^/\s@]+@|\b(hf_|sk-|ghp_|github_pat_|xox[abp]-)[A-Za-z0-9_-]{16,}|\bBearer\s+\S{8,}"
)


def looks_secret(key: str) -> bool:
    """True for a variable or flag whose name says that its value is a secret (HF_TOKEN, --ssl-keyfile-password)."""
    parts = [part for part in re.split(r"[^a-z0-9]+", key.lower()) if part]
    if not parts:
        return False
    pairs = itertools.pairwise(parts)
    return (
        bool(_SECRET_PARTS.intersection(parts))
        or parts[-1] == "token"
        or any(first in _KEY_BEFORE and second == "key" for first, second in pairs)
    )


def refuse_secret(node: Node, key: str, value: str) -> None:
    """Refuse a value whose key, or whose own form, is a secret's. The message never repeats the value."""
    if value and (looks_secret(key) or _SECRET_VALUE.search(value)):
        node.fail(
            "looks like a secret written as a value",
            allowed=f"secrets by reference only: {REFERENCE}, under secrets or api_key",
        )


def profile_secret(node: Node) -> SecretRef:
    """A profile's reference: as ``secret_ref``, or ``{secret: NAME}`` of the host's own ``secrets``."""
    if isinstance(node.value, dict) and list(node.value) == ["secret"]:
        return SecretRef(secret=check.pattern(node.value["secret"], SECRET_NAME, SECRET_NAME_TEXT))
    return secret_ref(node, allowed=f"{REFERENCE} or {{secret: NAME}} from the host's secrets")


def secret_ref(node: Node, *, allowed: str = REFERENCE) -> SecretRef:
    """A secret's reference; a value in its place is refused without being repeated."""
    if not isinstance(node.value, dict):
        node.fail("a secret is never written as a value", allowed=allowed)
    values = check.mapping(node, ("env", "file"))
    if len(values) != 1:
        node.fail("needs exactly one of env and file", allowed=allowed)
    env, file = node.child("env"), node.child("file")
    if env is not None:
        if not isinstance(env.value, str) or not re.fullmatch(ENV_NAME, env.value):
            env.fail("not the name of an environment variable", allowed="letters, digits and '_'")
        return SecretRef(env=env.value)
    assert file is not None
    if not isinstance(file.value, str) or not file.value.startswith("/"):
        file.fail("not an absolute path", allowed="the absolute path of a file on the host")
    return SecretRef(file=check.absolute_path(file))
