"""What each command's ``--json`` document holds: docs/json.md is made of it, and tests hold what comes out to it.

``python -m ddtree_ops.cli.documents`` prints that page. Fields may be added in a later version, never taken away or
given another type; what is not named here may change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "true or false": (bool,),
    "object": (dict,),
    "list": (list,),
    "null": (type(None),),
}


class Field(NamedTuple):
    """``types``: names of `TYPES`; ``always``: whether it is there in every document of the command."""

    means: str
    types: tuple[str, ...]
    always: bool = True


Fields = Mapping[str, Field]


def _fields_of(kind: str) -> Callable[..., Field]:
    def make(means: str, *more: str, always: bool = True) -> Field:
        return Field(means, (kind, *more), always)

    return make


#: A field of that type, or of one of ``more``.
text, integer, number, flag, thing, several = map(
    _fields_of, ("text", "integer", "number", "true or false", "object", "list")
)


ERROR: Fields = {
    "kind": text(
        "the class of the failure: Failed, UsageError, Unreachable, Locked, RolledBack, NeedsHand, Interrupted, Bug"
    ),
    "exit_code": integer("as `docs/exit-codes.md` has it"),
    "message": text("what happened"),
    "hint": text("what to do next, lines; may be empty"),
}
#: Of every service that a command names, whatever became of it.
ROW: Fields = {
    "host": text("its name in the inventory"),
    "service": text("the service's name"),
    "exit_code": integer("of this host alone; absent where `skipped`", always=False),
    "skipped": flag("true: an earlier host failed, this one was not touched", always=False),
    "error": thing("an expected failure, fields as below", always=False),
    "summary": text("what became of it, in a few words", always=False),
}
PLAN = thing(
    "action, from, to, release, reasons, drift, notes, behind, adopts, overwrite, guard, transfer, restarts, "
    "downtime_s, downtime_limit_s, others (plans of a service's further nodes), diff",
    always=False,
)
OUTCOME = thing(
    "result (confirmed, unchanged, declined) and, of a confirmed one, generation, release, verdict, downtime_s, "
    "bytes_sent, seconds",
    always=False,
)
VERDICT = thing("the gate's verdict whole: kind, methods, runs, findings, evidence", always=False)
OTHERS = several("the same of a service's further nodes, by rank", always=False)
#: Commands over services: what their rows have beside `ROW`.
ROWS: dict[str, Fields] = {
    "plan": {"plan": PLAN},
    "deploy": {"outcome": OUTCOME},
    "rollback": {"outcome": OUTCOME},
    "status": {
        "status": thing("the row of the table, drift, unproven and verified; `others`: of further nodes", always=False)
    },
    "history": {"history": thing("every transaction with its end, as the host's journal has it", always=False)},
    "verify-exactness": {
        "verdict": VERDICT,
        "golden": text("where the golden answers were recorded", "null", always=False),
    },
    "snapshot": {"commit": text("of the snapshot; null: nothing had changed", "null", always=False)},
    "stop": {"reply": thing("what the host says is so now", always=False), "others": OTHERS},
    "start": {"reply": thing("as of stop", always=False), "others": OTHERS},
    "restart": {"reply": thing("as of stop", always=False), "others": OTHERS},
    "recover": {"reply": thing("result and generation", always=False), "others": OTHERS},
    "unlock": {"reply": thing("whose lock it was, and whether it is free", always=False), "others": OTHERS},
    "doctor": {
        "doctor": thing("failed, findings, passed, not_made, silenced, arch_rules", always=False),
        "collector": thing("how the collector fared: what was not finished, problems", "null", always=False),
    },
    "releases": {
        "releases": several("id, base, engine, arch, bytes, installed, users, whole of each", always=False),
        "store": integer("bytes of the store", always=False),
        "now": number("the host's clock, seconds since 1970", always=False),
    },
    "prune": {
        "keep": several("releases that stay, each with why", always=False),
        "remove": several("releases that go", always=False),
        "blobs": thing("count and bytes of blobs that go", always=False),
        "staging": several("stale uploads that go", always=False),
        "bytes": integer("freed in all", always=False),
    },
}
#: Commands with a document of their own: its fields beside ``ok``.
WHOLE: dict[str, Fields] = {
    "init": {"workspace": text("its directory"), "files": several("what was written")},
    "render": {"hosts": several("host, service, release and the files of each, by name")},
    "build": {
        "release": text("its id"),
        "files": integer("how many"),
        "bytes": integer("of their content"),
        "manifest": thing("what it requires, what was left out, which patches"),
    },
    "hosts": {"hosts": several("the rows of the table, each with `metrics` by Prometheus' names, or `error`")},
    "logs": {
        "host": text("its name"),
        "lines": several("of the log, oldest first"),
        "others": thing("the lines of a service's further nodes, by host", always=False),
    },
    "sweep": {
        "run": text("the run's directory"),
        "complete": flag("whether no cell is left"),
        "left": integer("cells that are left"),
        "cells": several("the rows of the table"),
    },
    "report": {
        "folder": text("where the files are"),
        "files": several("their names"),
        "headline": text("the run in a line"),
        "sha256": text("of the run's records"),
        "readme": flag("whether the workspace's README was changed"),
    },
    "tune": {
        "run": text("the run's directory"),
        "complete": flag("whether a profile was written"),
        "left": integer("cells that are left", always=False),
        "shape": text("the fastest exact one", always=False),
        "tokens_per_s": number("measured", always=False),
        "ran": integer("cells that it took", always=False),
        "profile": text("the file that was written", always=False),
    },
    "export": {"release": text("the release that it names"), "text": text("manifests, or the script")},
    "demo": {
        "release": text("its id"),
        "seconds": number("the whole of it"),
        "prompts": integer("how many"),
        "deployed": several("profile, verdict, tokens_per_step, differ_from_ar of each"),
        "planted_fault": thing("which, and how the deploy ended"),
        "shapes": thing("what each shape commits a step: outcomes and how they were measured"),
    },
    "help": {
        "topics": thing("titles by topic", always=False),
        "topic": text("which", always=False),
        "markdown": text("the document", always=False),
    },
    "patch check": {"faults": several("what does not fit, in words")},
    "patch edit": {"tree": text("where it is"), "commits": several("a subject a patch")},
    "patch refresh": {"written": several("patches that changed"), "removed": several("patches that are gone")},
    "status --watch": {"looks": several("host, service, t and the figures of each look")},
    "doctor --list": {"checks": several("id, group, severity, what, reference of each")},
}
HEAD = """\
# The documents of --json

Written by `python -m ddtree_ops.cli.documents`; tests hold what comes out to it. With `--json` stdout is one JSON
document and nothing else; steps, questions and warnings are on stderr. `ok` says whether the exit code is 0; a `sweep`
or `tune` with cells left (3) is ok as well. Fields may be added, and are never taken away or given another type.

A command that fails as a whole, before it comes to any host, has `ok` (false) and `error`:
"""


def faults(command: str, document: Any) -> list[str]:
    """What of a document is not as it is said here, in words. ``command``: a key of `ROWS` or `WHOLE`."""
    if not isinstance(document, dict) or not isinstance(document.get("ok"), bool):
        return ["no object with ok"]
    if "error" in document:
        return [*_wrong(document, {"error": thing("")}, "", extra={"ok"}), *_wrong(document["error"], ERROR, "error.")]
    if command in WHOLE:
        return list(_wrong(document, WHOLE[command], "", extra={"ok"}))
    found = list(_wrong(document, {"hosts": several("")}, "", extra={"ok"}))
    for row in document.get("hosts", []):
        found += _wrong(row, {**ROW, **ROWS[command]}, "hosts[].")
        found += _wrong(row["error"], ERROR, "hosts[].error.") if "error" in row else []
        if ("exit_code" in row) == ("skipped" in row):
            found.append("hosts[]: exactly one of exit_code and skipped")
    return found


def _wrong(document: Any, fields: Fields, where: str, extra: frozenset[str] | set[str] = frozenset()) -> Iterator[str]:
    if not isinstance(document, dict):
        yield f"{where or 'the document'} is no object"
        return
    for name, field in fields.items():
        if name not in document:
            if field.always:
                yield f"{where}{name} is missing"
            continue
        kinds = [kind for one in field.types for kind in TYPES[one]]
        value = document[name]
        # In Python a boolean is an integer, in JSON it is none.
        if type(value) not in kinds:
            yield f"{where}{name} is {value!r:.60}, not {' or '.join(field.types)}"
    for name in document.keys() - fields.keys() - extra:
        yield f"{where}{name} is not said"


def markdown() -> str:
    parts = [HEAD, _table(ERROR)]
    said = "Commands over services have `ok` and `hosts`, a row for each service:"
    parts += ["## Commands over services\n", said + "\n", _table(ROW)]
    for command, fields in ROWS.items():
        parts += [f"### {command}\n", "A row has beside those above:\n", _table(fields)]
    parts += ["## Other commands\n", "Beside `ok`:\n"]
    for command, fields in WHOLE.items():
        parts += [f"### {command}\n", _table(fields)]
    return "\n".join(parts)


def _table(fields: Fields) -> str:
    rows = "".join(
        f"| `{name}` | {' or '.join(field.types)} | {'always' if field.always else 'sometimes'} | {field.means} |\n"
        for name, field in fields.items()
    )
    return f"| field | is | | means |\n|---|---|---|---|\n{rows}"


if __name__ == "__main__":
    sys.stdout.write(markdown())
