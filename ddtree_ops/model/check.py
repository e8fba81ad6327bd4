"""Typed access to a node: each function returns the checked value or raises UsageError naming file, line and key."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from ddtree_ops.model.yamlfile import Node

T = TypeVar("T")

NAME_FORM = "[a-z0-9][a-z0-9-]{0,40}"
NAME_TEXT = "lower-case letters, digits and '-', at most 41, not beginning with '-'"
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known word nearest to ``word``, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{found[0]}'?" if found else ""


def describe(node: Node) -> str:
    """What a node is, for a message. Lists and mappings are not quoted; long text is cut."""
    if node.doubt:
        return f"{node.raw[:60]!r}, which {node.doubt} (quote it if text is meant)"
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    if node.value is None:
        return "nothing"
    if isinstance(node.value, bool):
        return f"the boolean {node.raw}"
    return repr(node.value if not isinstance(node.value, str) else node.value[:60])


def _kind(node: Node) -> str:
    """As ``describe``, but never repeats text: in place of a list or mapping it may be a secret gone astray."""
    return "text" if isinstance(node.value, str) else describe(node)


def mapping(node: Node, keys: Collection[str], required: Collection[str] = ()) -> dict[str, Node]:
    """The node's mapping, its keys all among ``keys`` and all ``required`` ones present."""
    values = any_mapping(node)
    for key, child in values.items():
        if key not in keys:
            child.fail("unknown key" + nearest(key, keys), allowed=", ".join(keys))
    for key in required:
        if key not in values:
            node.fail(f"the key {key} is missing", allowed=", ".join(keys))
    return values


def any_mapping(node: Node) -> dict[str, Node]:
    """The node's mapping, whatever its keys."""
    if not isinstance(node.value, dict):
        node.fail(f"expected a mapping, got {_kind(node)}", allowed="key: value")
    return node.value


def items(node: Node, of: Callable[[Node], T], *, least: int = 0) -> list[T]:
    """The node's list, every item checked by ``of``."""
    if not isinstance(node.value, list):
        node.fail(f"expected a list, got {_kind(node)}", allowed="[a, b, ...]")
    if len(node.value) < least:
        node.fail("the list is too short", allowed=f"at least {least}")
    return [of(item) for item in node.value]


def text(node: Node, *, allowed: str = "text") -> str:
    """Text of one line without control characters; not empty."""
    if node.doubt or not isinstance(node.value, str):
        hint = f'; write "{node.raw}" in quotes' if isinstance(node.value, (bool, int, float)) else ""
        node.fail(f"expected text, got {describe(node)}{hint}", allowed=allowed)
    if not node.value.strip():
        node.fail("empty", allowed=allowed)
    return one_line(node, node.value)


def one_line(node: Node, value: str) -> str:
    """``value``, refused when it has a newline or another control character."""
    found = _CONTROL.search(value)
    if found:
        node.fail(f"has the control character U+{ord(found[0]):04X}", allowed="one line of printable text")
    return value


def argument(node: Node) -> str:
    """A program's argument or variable: text, empty text, or a number exactly as it is written."""
    if not node.doubt and isinstance(node.value, str) and not node.value:
        return ""
    if not node.doubt and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.raw
    if isinstance(node.value, str) and not node.doubt:
        if "\n" in node.value or "\x00" in node.value:
            node.fail("has a newline or NUL", allowed="one line")
        return node.value
    return text(node)


def pattern(node: Node, form: str, allowed: str) -> str:
    """Text that matches ``form`` in full."""
    value = text(node, allowed=allowed)
    if not re.fullmatch(form, value, re.ASCII):
        node.fail(f"not {describe(node)}", allowed=allowed)
    return value


def name(node: Node) -> str:
    """The name of a host, service or profile."""
    return pattern(node, NAME_FORM, NAME_TEXT)


def choice(node: Node, among: Collection[str]) -> str:
    """One of the given words."""
    allowed = ", ".join(among)
    value = text(node, allowed=allowed)
    if value not in among:
        node.fail(f"not {describe(node)}{nearest(value, among)}", allowed=allowed)
    return value


def integer(node: Node, least: int, most: int) -> int:
    """A whole number within both bounds."""
    allowed = f"a whole number from {least} to {most}"
    value: Any = node.value
    if node.doubt or not isinstance(value, int) or isinstance(value, bool):
        node.fail(f"expected a whole number, got {describe(node)}", allowed=allowed)
    if not least <= value <= most:
        node.fail(f"not {value}", allowed=allowed)
    return value


def number(node: Node, above: float, most: float) -> float:
    """A number above ``above`` and at most ``most``."""
    allowed = f"a number above {above:g}, at most {most:g}"
    value: Any = node.value
    if node.doubt or not isinstance(value, (int, float)) or isinstance(value, bool):
        node.fail(f"expected a number, got {describe(node)}", allowed=allowed)
    if not above < value <= most:
        node.fail(f"not {value:g}", allowed=allowed)
    return float(value)


def boolean(node: Node) -> bool:
    """true or false, written so."""
    if node.doubt or not isinstance(node.value, bool):
        node.fail(f"expected true or false, got {describe(node)}", allowed="true, false")
    return node.value


def absolute_path(node: Node) -> str:
    """An absolute path on a host, in its shortest form (no ``..``, no double or trailing slash)."""
    allowed = "an absolute path without '..', '//' or trailing '/'"
    value = text(node, allowed=allowed)
    parts = value.split("/")
    if parts[0] != "" or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
        node.fail(f"not {describe(node)}", allowed=allowed)
    return value


def address(node: Node) -> str:
    """An IP address or a host name (RFC 1123 labels; ``_`` is tolerated)."""
    allowed = "an IP address or a host name"
    value = text(node, allowed=allowed)
    try:
        return str(ipaddress.ip_address(value)) if value.isascii() else _bad_address(node, allowed)
    except ValueError:
        labels = value.removesuffix(".").split(".")
        if len(value) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
            _bad_address(node, allowed)
        if labels[-1].isdigit():
            node.fail(f"not {describe(node)}: looks like an IP address and is none", allowed=allowed)
        return value


def _bad_address(node: Node, allowed: str) -> str:
    node.fail(f"not {describe(node)}", allowed=allowed)
