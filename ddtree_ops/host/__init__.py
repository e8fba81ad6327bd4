"""The host's half. Its parts in `agent/` become one standard-library file that runs on hosts; nothing here runs it.

One file, because it goes to a host by stdin before anything is installed there; parts, because that is how it is
read and typed. A part imports other parts by ``from .part import ...`` at its top, and only earlier ones at run time.
"""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources

PARTS = (
    *("base", "system", "form", "supervisors", "plain", "service", "guard"),
    *("store", "causes", "fitting", "manifest", "making", "releases"),
    *("facts", "recovery", "applier", "engine", "verbs", "keeping", "entry"),
)
_DOCSTRING = re.compile(r'\A"""(.*?)"""\n', re.DOTALL)
_BETWEEN = re.compile(r"^(if TYPE_CHECKING:\n(    .*\n)+|(    )?from \.\w+ import (\([^)]*\)|.*)\n)", re.MULTILINE)
_IMPORT = re.compile(r"^(?:import (\S+)|from (\S+) import (.*))\n", re.MULTILINE)


@functools.cache
def source() -> str:
    """The text of ``ddtree-host``, joined from its parts, from a checkout or an installed wheel."""
    folder = resources.files(__name__).joinpath("agent")
    head = _DOCSTRING.match(folder.joinpath("__init__.py").read_text(encoding="utf-8"))
    assert head is not None
    modules: set[str] = set()
    names: dict[str, set[str]] = {}
    bodies = []
    for name in PARTS:
        text = _BETWEEN.sub("", folder.joinpath(f"{name}.py").read_text(encoding="utf-8"))
        title = _DOCSTRING.match(text)
        assert title is not None, f"{name}.py has no docstring"
        text = text[title.end() :]
        for module, package, wanted in _IMPORT.findall(text):
            modules.add(module)
            names.setdefault(package, set()).update(wanted.split(", "))
        bodies.append(f"# {'-' * 20} {title[1].splitlines()[0]}\n\n\n{_IMPORT.sub('', text).strip()}\n")
    names["typing"].discard("TYPE_CHECKING")
    future = f"from __future__ import {', '.join(names.pop('__future__'))}\n"
    imports = [f"import {module}\n" for module in sorted(modules - {""})]
    imports += [f"from {package} import {', '.join(sorted(names[package]))}\n" for package in sorted(names) if package]
    top = f"#!/usr/bin/env -S python3 -I\n{head[0]}\n{future}\n{''.join(imports)}\n\n"
    return top + "\n\n".join(bodies)


@functools.cache
def sha256() -> str:
    """Hex sha256 of the source: what ``probe`` answers as ``agent_sha256`` once it is installed."""
    return hashlib.sha256(source().encode()).hexdigest()
