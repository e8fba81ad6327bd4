"""The host's half. Its parts in `agent/` become one standard-library file that runs on hosts; nothing here runs it.

One file, because it goes to a host by stdin before anything is installed there; parts, because that is how it is
read and typed. A part imports other parts by ``from .part import ...`` at its top, and only earlier ones at run time.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

PARTS = (
    *("base", "system", "form", "supervisors", "plain", "service", "guard"),
    *("staging", "store", "causes", "fitting", "manifest", "making", "releases"),
    *("facts", "recovery", "applier", "engine", "verbs", "keeping", "entry"),
)
_joining = threading.Lock()
_DOCSTRING = re.compile(r'\A"""(.*?)"""\n', re.DOTALL)
_BETWEEN = re.compile(
    r"^(if TYPE_CHECKING:\n(    .*\n)+|(    )?from \.+\w[\w.]* import (\([^)]*\)|.*)\n)", re.MULTILINE
)
_IMPORT = re.compile(r"^(?:import (\S+)|from (\S+) import (.*))\n", re.MULTILINE)


def source() -> str:
    """The text of ``ddtree-host``, joined from its parts, from a checkout or an installed wheel."""
    with _joining:  # hosts are asked in threads: one joins, the others wait for it
        return _source()


@functools.cache
def _source() -> str:
    return "#!/usr/bin/env -S python3 -I\n" + joined("agent", [f"agent/{name}" for name in PARTS])


@functools.cache
def receiver() -> str:
    """What takes an upload there, alone: each connection of an upload compiles it. Its argument is the directory."""
    text = joined("agent", ["agent/base", "agent/staging"])
    act = "lambda: receive(absolute(sys.argv[1], 'staging'), 0)"
    return shaken(f"{text}\n\nimport sys\n\nraise SystemExit(answer({act}))\n")


def joined(folder: str, parts: Sequence[str]) -> str:
    """One module out of ``parts`` (``agent/base``), under the docstring of the package ``folder``."""
    home = Path(__file__).parent
    head = _DOCSTRING.match(home.joinpath(f"{folder}/__init__.py").read_text(encoding="utf-8"))
    assert head is not None
    modules: set[str] = set()
    names: dict[str, set[str]] = {}
    bodies = []
    for name in parts:
        text = _BETWEEN.sub("", home.joinpath(f"{name}.py").read_text(encoding="utf-8"))
        title = _DOCSTRING.match(text)
        assert title is not None, f"{name}.py has no docstring"
        text = text[title.end() :]
        for module, package, wanted in _IMPORT.findall(text):
            modules.add(module)
            names.setdefault(package, set()).update(wanted.split(", "))
        bodies.append(f"# {'-' * 20} {title[1].splitlines()[0]}\n\n\n{_IMPORT.sub('', text).strip()}\n")
    names["typing"].discard("TYPE_CHECKING")
    if not names["typing"]:  # it is slow to load, and annotations are never evaluated
        del names["typing"]
    future = f"from __future__ import {', '.join(names.pop('__future__'))}\n"
    imports = [f"import {module}\n" for module in sorted(modules - {""})]
    imports += [f"from {package} import {', '.join(sorted(names[package]))}\n" for package in sorted(names) if package]
    top = f"{head[0]}\n{future}\n{''.join(imports)}\n\n"
    return top + "\n\n".join(bodies)


def shaken(text: str) -> str:
    """A module's text without the top-level names that nothing reaches from what runs when it is loaded."""
    import ast

    names: dict[str, list[ast.stmt]] = {}
    body = ast.parse(text).body
    for node in body:
        for name in _bound(node):
            names.setdefault(name, []).append(node)
    waiting: list[ast.AST] = [node for node in body if not _bound(node)]
    kept: set[ast.AST] = set(waiting)
    while waiting:
        for used in ast.walk(waiting.pop()):
            for node in names.get(used.id, []) if isinstance(used, ast.Name) else []:
                if node not in kept:
                    kept.add(node)
                    waiting.append(node)
    lines = text.splitlines(keepends=True)
    for node in reversed(body):
        if node not in kept:
            start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            while lines[start - 2].startswith("#: "):  # what is said of it goes with it
                start -= 1
            del lines[start - 1 : node.end_lineno]
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines))


def _bound(node: ast.stmt) -> list[str]:
    """The names that a definition, an import or an assignment of a module binds; nothing for what merely runs."""
    import ast

    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Import):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module != "__future__":
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


@functools.cache
def sha256() -> str:
    """Hex sha256 of the source: what ``probe`` answers as ``agent_sha256`` once it is installed."""
    return hashlib.sha256(source().encode()).hexdigest()
