"""One profile file: its keys, what each may be, and where each was written. Nothing is merged here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from ddtree_ops.engine.ladder import STEP
from ddtree_ops.model import check, secrets
from ddtree_ops.model.types import CheckOverride, EvidenceRef, Origin, RawProfile, Severity
from ddtree_ops.model.yamlfile import Node

ALGORITHMS = ("none", "dflash", "ddtree")
ENGINES = ("sglang", "reference")
DTYPES = ("float32", "bfloat16", "float16")
POLICIES = ("exact", "near-tie")
SEVERITIES = ("off", "info", "warning", "error")
EXACTNESS_METHODS = ("self-score", "replay", "distribution")
"""Those that need nothing beside the server: a deploy's gate may run them."""
_MODEL_TEXT = "an absolute path on the host, or release:<path inside the release's share/>"
_BACKENDS = "[a-z0-9_]{1,40}"
_LADDER = f"{STEP}(,{STEP})*"
DAY_S = 86_400


def _model_path(node: Node) -> str:
    value = check.text(node, allowed=_MODEL_TEXT)
    inside = value.removeprefix("release:")
    if inside != value:
        if any(part in ("", ".", "..") for part in inside.split("/")):
            node.fail(f"not {check.describe(node)}", allowed=_MODEL_TEXT)
        return value
    if not value.startswith("/"):
        node.fail(f"not {check.describe(node)}", allowed=_MODEL_TEXT)
    return check.absolute_path(node)


def _arguments(node: Node) -> list[str]:
    values = check.items(node, check.argument)
    for index, (item, value) in enumerate(zip(node.value, values, strict=True)):
        flag, equals, rest = value.partition("=")
        if flag.startswith("-") and equals:
            secrets.refuse_secret(item, flag, rest)
        elif index and values[index - 1].startswith("-") and not value.startswith("-"):
            secrets.refuse_secret(item, values[index - 1], value)
        else:
            secrets.refuse_secret(item, "", value)
    return values


def _environment(node: Node) -> dict[str, str | None]:
    """Variables to set; null takes away what a weaker profile sets."""
    found: dict[str, str | None] = {}
    for key, child in check.any_mapping(node).items():
        if not re.fullmatch(secrets.ENV_NAME, key):
            child.fail("not the name of an environment variable", allowed="letters, digits and '_', no digit first")
        if child.value is None and not child.doubt:
            found[key] = None
            continue
        if secrets.looks_secret(key):
            secrets.refuse_secret(child, key, str(child.raw or "x"))
        found[key] = check.argument(child)
        secrets.refuse_secret(child, key, check.argument(child))
    return found


def _concurrency(node: Node) -> list[int]:
    values = check.items(node, lambda item: check.integer(item, 1, 1024), least=1)
    if len(set(values)) != len(values):
        node.fail("a value is written twice")
    return values


def _file(node: Node) -> str:
    allowed = "a file inside the workspace, relative to it"
    value = check.text(node, allowed=allowed)
    if value.startswith(("/", "~")) or any(part in ("", ".", "..") for part in value.split("/")):
        node.fail(f"not {check.describe(node)}", allowed=allowed)
    return value


def _bind(node: Node) -> str:
    return check.address(node)


def _integer(least: int, most: int) -> Callable[[Node], int]:
    return lambda node: check.integer(node, least, most)


def _optional(parse: Callable[[Node], Any]) -> Callable[[Node], Any]:
    return lambda node: None if node.value is None and not node.doubt else parse(node)


def _checks(node: Node) -> dict[str, CheckOverride | None]:
    """{check or arch rule: how it is taken, and why}; null takes away what a weaker profile says."""
    found: dict[str, CheckOverride | None] = {}
    for key, child in check.any_mapping(node).items():
        if not re.fullmatch("[a-z][a-z0-9-]{1,40}", key):
            child.fail("not a check's name", allowed="the names that ddtree doctor shows")
        if child.value is None and not child.doubt:
            found[key] = None
            continue
        values = check.mapping(child, ("severity", "reason"), required=("severity", "reason"))
        severity = cast(Severity, check.choice(values["severity"], SEVERITIES))
        found[key] = CheckOverride(severity=severity, reason=check.text(values["reason"]))
    return found


def _evidence(node: Node) -> EvidenceRef:
    """The records of a sweep, relative to the workspace, and their hash."""
    values = check.mapping(node, ("records", "sha256"), required=("records", "sha256"))
    sha256 = check.pattern(values["sha256"], "[0-9a-f]{64}", "64 hexadecimal digits")
    return EvidenceRef(records=_file(values["records"]), sha256=sha256)


_EXACTNESS_KEYS: dict[str, Callable[[Node], Any]] = {
    "policy": lambda node: check.choice(node, POLICIES),
    "epsilon_roundings": _integer(0, 64),
    "concurrency": _concurrency,
    "max_new_tokens": _integer(1, 100_000),
    "prompts": _optional(_file),
    "time_limit_s": _integer(1, DAY_S),
    "methods": lambda node: check.items(node, lambda item: check.choice(item, EXACTNESS_METHODS)),
}


def _exactness(node: Node) -> dict[str, Any]:
    values = check.mapping(node, tuple(_EXACTNESS_KEYS))
    return {key: _EXACTNESS_KEYS[key](child) for key, child in values.items()}


PROFILE_KEYS: dict[str, Callable[[Node], Any]] = {
    "engine": lambda node: check.choice(node, ENGINES),
    "release_base": lambda node: check.pattern(node, r"[a-z0-9][a-z0-9.+-]{0,60}", "a name such as sglang-0.5.17"),
    "model": _model_path,
    "drafter": _optional(_model_path),
    "algorithm": lambda node: check.choice(node, ALGORITHMS),
    "budget": _optional(_integer(1, 1024)),
    "topk": _optional(_integer(1, 1 << 24)),
    "ladder": _optional(lambda node: check.pattern(node, _LADDER, "REQUESTS:BUDGET,..., such as 8:8,32:0, in quotes")),
    "block_size": _integer(2, 256),
    "vocab_size": _optional(_integer(2, 1 << 24)),
    "tp": _integer(1, 64),
    "pp": _integer(1, 64),
    "ep": _integer(1, 64),
    "attention_backend": _optional(lambda node: check.pattern(node, _BACKENDS, "a backend's name, such as triton")),
    "cuda_graph": check.boolean,
    "dtype": lambda node: check.choice(node, DTYPES),
    "memory_fraction": _optional(lambda node: check.number(node, 0, 0.99)),
    "context_length": _optional(_integer(2, 1 << 24)),
    "max_running_requests": _optional(_integer(1, 65_536)),
    "extra_args": _optional(_arguments),
    "env": _environment,
    "bind": _bind,
    "open": _optional(check.text),
    "api_key": _optional(secrets.profile_secret),
    "load_timeout_s": _integer(1, DAY_S),
    "stop_timeout_s": _integer(1, 3600),
    "min_accept_length": _optional(lambda node: check.number(node, 0, 256)),
    "exactness": _exactness,
    "checks": _checks,
    "evidence": _optional(_evidence),
}


def parse_profile(root: Node, name: str) -> RawProfile:
    """A profile file's own values. ``extends`` names another profile. Raises UsageError at the key in question."""
    nodes = check.mapping(root, ("extends", *PROFILE_KEYS))
    extends = nodes.pop("extends", None)
    return RawProfile(
        name=name,
        file=root.file,
        extends=check.name(extends) if extends else None,
        values={key: PROFILE_KEYS[key](node) for key, node in nodes.items()},
        origins=origins({**nodes, **({"extends": extends} if extends else {})}),
    )


def origins(nodes: dict[str, Node], prefix: str = "") -> dict[str, Origin]:
    """Where each key, nested key and list item was written: ``exactness.policy``, ``extra_args[0]``."""
    found: dict[str, Origin] = {}
    for key, node in nodes.items():
        path = f"{prefix}{key}"
        found[path] = Origin(file=node.file, line=node.line, path=node.path)
        if isinstance(node.value, dict):
            found |= origins(node.value, f"{path}.")
        elif isinstance(node.value, list):
            found |= {
                f"{path}[{index}]": Origin(file=item.file, line=item.line, path=item.path)
                for index, item in enumerate(node.value)
            }
    return found
