"""One YAML file as a tree of nodes that remember their line, in a strict subset of YAML 1.1.

YAML 1.1 guesses: ``no`` is a boolean, ``010`` is eight, ``1:30`` is ninety, an alias may stand for a gigabyte. An
inventory that says something else than it seems to say is worse than one that is refused, so every such form is an
error here, as are duplicate keys, anchors, tags and several documents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.composer import Composer
from yaml.resolver import Resolver

from ddtree_ops.errors import UsageError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 12

# What libyaml and PyYAML read alike: printable ASCII on lines, without escapes, directives and blocks of text.
_PLAIN = re.compile(r"[\n !\"#$&'()*+,\-./0-9:;<=?@A-Z\[\]^_`a-z{}~]*")
_DOCUMENT = re.compile(r"^(---|\.\.\.)", re.MULTILINE)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Node:
    """A value of a file: ``value`` is str, int, float, bool, None, list[Node] or dict[str, Node].

    ``raw`` is the scalar as written, ``key_line`` the line (from 1) of its key, or of the value in a list.
    """

    value: Any
    file: str
    line: int
    path: str
    raw: str = ""
    doubt: str = field(default="", compare=False)

    def fail(self, problem: str, *, allowed: str = "", hint: str = "") -> NoReturn:
        """Raise UsageError ``file:line: key: problem; allowed: ...``."""
        raise UsageError(position(self.file, self.line, self.path, problem, allowed), hint=hint)

    def child(self, key: str) -> Node | None:
        """The value under ``key`` of a mapping; None when absent."""
        found = self.value.get(key)
        return found if isinstance(found, Node) else None


def position(file: str, line: int, path: str, problem: str, allowed: str = "") -> str:
    """The one form of every message about a file."""
    where = f"{file}:{line}: {path}: " if path else f"{file}:{line}: "
    return where + problem + (f"; allowed: {allowed}" if allowed else "")


def read_yaml(path: Path, shown: str) -> Node:
    """The file's root node; ``shown`` is how messages call the file.

    Raises UsageError when it is unreadable, larger than MAX_BYTES, not UTF-8 or outside the subset.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{shown}: larger than {MAX_BYTES // 1024} KiB, which no inventory is")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(position(shown, line, "", "not UTF-8")) from error
    quick = _quickly(text, shown)
    if quick is not None:
        return _convert(quick, shown, "", quick.start_mark.line + 1)
    try:
        loader = _Loader(text, shown)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        # Only the problem and the line: PyYAML's own text quotes the file, which may hold a secret by mistake.
        mark = error.problem_mark or error.context_mark
        raise UsageError(
            position(shown, mark.line + 1 if mark else 1, "", f"not valid YAML: {error.problem or error.context}")
        ) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise UsageError(position(shown, line, "", f"not valid YAML: {error.reason}")) from error
    except (ValueError, OverflowError) as error:  # PyYAML on "\\UFFFFFFFF": no such code point
        line = loader.get_mark().line + 1
        raise UsageError(position(shown, line, "", "not valid YAML: an escape that names no character")) from error
    if root is None:
        raise UsageError(position(shown, 1, "", "empty", "a mapping"))
    return _convert(root, shown, "", root.start_mark.line + 1)


def _quickly(text: str, shown: str) -> yaml.Node | None:
    """The root node by libyaml, a tenth of PyYAML's time; None where that is not at hand or finds anything wrong.

    PyYAML then says what is wrong, and where. Both read YAML 1.1; what only one of them reads is left to PyYAML: all
    but printable ASCII, blocks of text, several documents.
    """
    if _Quick is None or not _PLAIN.fullmatch(text) or _DOCUMENT.search(text):
        return None
    try:
        return _Quick(text, shown).get_single_node()
    except (yaml.YAMLError, UsageError, ValueError):
        return None


class _Strict:
    """Composes nodes; refuses what could grow or nest without bound before it does."""

    _shown: str
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[attr-defined]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise UsageError(position(self._shown, line, "", "anchors and aliases (& and *) are refused; write it out"))
        if getattr(event, "tag", None) is not None:
            raise UsageError(position(self._shown, line, "", "tags (!) are refused"))
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UsageError(position(self._shown, line, "", f"nested deeper than {MAX_DEPTH}"))
        try:
            return super().compose_node(parent, index)  # type: ignore[misc,no-any-return]
        finally:
            self._depth -= 1


class _Loader(_Strict, yaml.SafeLoader):
    """All by PyYAML."""

    def __init__(self, text: str, shown: str) -> None:
        super().__init__(text)
        self._shown = shown


if yaml.__with_libyaml__:

    class _Quick(_Strict, Composer, yaml.cyaml.CParser, Resolver):  # type: ignore
        """Events by libyaml; nodes and tags by PyYAML."""

        def __init__(self, text: str, shown: str) -> None:
            yaml.cyaml.CParser.__init__(self, text)  # type: ignore[attr-defined]
            Composer.__init__(self)
            Resolver.__init__(self)
            self._shown = shown

else:
    _Quick = None  # type: ignore[assignment,misc]


def _convert(node: yaml.Node, shown: str, path: str, line: int) -> Node:
    here = Node(None, shown, line, path)
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key = _key(key_node, shown, path)
            key_line = key_node.start_mark.line + 1
            below = f"{path}.{key}" if path else key
            if key in values:
                Node(None, shown, key_line, below).fail(f"written twice; the first is on line {values[key].line}")
            values[key] = _convert(value_node, shown, below, key_line)
        return Node(values, shown, line, path)
    if isinstance(node, yaml.SequenceNode):
        items = [
            _convert(item, shown, f"{path}[{index}]", item.start_mark.line + 1) for index, item in enumerate(node.value)
        ]
        return Node(items, shown, line, path)
    if _SURROGATE.search(node.value):
        here.fail("has half a surrogate pair, which no text has")
    value, doubt = _scalar(node)
    return Node(value, shown, line, path, raw=node.value, doubt=doubt)


def _key(node: yaml.Node, shown: str, path: str) -> str:
    here = Node(None, shown, node.start_mark.line + 1, path)
    if not isinstance(node, yaml.ScalarNode) or not isinstance(node.value, str):
        here.fail("a key must be plain text")
    value, doubt = _scalar(node)
    if not node.value.isprintable():
        here.fail("a key has a character that cannot be printed")
    if doubt or not isinstance(value, str):
        here.fail(f"the key {node.value} is not text for YAML; quote it")
    return value


def _scalar(node: Any) -> tuple[Any, str]:
    """The value of a scalar, and why it is doubtful ("" when it is not)."""
    text: str = node.value
    if node.style:  # a plain one has None by PyYAML, "" by libyaml
        return text, ""
    if text in ("", "~", "null"):
        return None, ""
    if text in ("true", "false"):
        return text == "true", ""
    if _INTEGER.fullmatch(text):
        return int(text), ""
    if _FLOAT.fullmatch(text):
        return float(text), ""
    kind = node.tag.rpartition(":")[2]
    if kind in ("str", "timestamp"):
        return text, "" if kind == "str" else "is a date for YAML"
    return text, {"bool": "is a boolean for YAML", "null": "is nothing for YAML"}.get(kind, f"is a YAML {kind}")
