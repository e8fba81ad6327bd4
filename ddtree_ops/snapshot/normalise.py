"""From the host's `collect` reply to the files of a snapshot. Pure.

Only what is named here is kept, under names fixed here: a host chooses neither which files appear nor where.
Everything that differs between two looks at an unchanged service is left out, so that nothing changed is no commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.snapshot import redact

MAX_TEXT = 256 * 1024
MAX_DROPINS = 64
MAX_ITEMS = 20_000

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
_VOLATILE = re.compile(
    r"pids?|.*_pid|t|time|.*_(?:time|timestamp|unix|seconds|ms)|timestamp|seconds|since|started|uptime|restarts"
    r"|memory_(?:free|used)\w*|free_\w*|\w*_free|used_memory|utili[sz]ation\w*|temperature(?:_\w+)?|power_\w+|clocks?\w*"
    r"|random_seed|internal_states|avg_\w+|last_\w+|nccl_port|dist_init_addr|txn|who|client"
    r"|lease|deadline|downtime\w*|load_avg|fan\w*"
)
_KEPT_TIMES = frozenset({"load_timeout_s", "stop_timeout_s", "time_limit_s", "watchdog_timeout"})
_DOCUMENTS = {
    "generation.json": ("generation",),
    "release.json": ("manifest",),
    "server-args.json": ("server_info",),
    "hardware.json": ("gpus", "driver"),
    "verdict.json": ("verdict",),
}


def files(collected: Mapping[str, Any], host: str, service: str) -> dict[str, str]:
    """Path below the workspace -> text, all under ``snapshots/<host>/<service>/``.

    ``unit.service`` (or ``process.json`` of a plain process), ``dropins/<name>.conf``, ``env``, ``generation.json``,
    ``release.json``, ``server-args.json``, ``hardware.json`` (gpus and driver), ``verdict.json``; each only where the
    reply has it. Keys read: unit, dropins, env, generation, manifest, server_info, gpus, driver, verdict.
    Raises UsageError for a wrong host or service name, Failed for a reply that cannot be one.
    """
    for what, name in (("host", host), ("service", service)):
        if not _NAME.fullmatch(name):
            raise UsageError(f"snapshot: {what} {name!r} is not a name (a-z, 0-9, hyphen)")
    top = f"snapshots/{host}/{service}"
    texts = _texts(collected)
    documents = {name: _document(collected, keys, host) for name, keys in _DOCUMENTS.items()}
    if "process.json" in texts:
        documents["process.json"] = _parsed(texts.pop("process.json"), host)
    secrets = redact.found_secrets(texts.values(), documents.values())
    made = {f"{top}/{name}": _lines(redact.text(value, secrets)) for name, value in texts.items()}
    for name, value in documents.items():
        if value not in (None, {}):
            shown = json.dumps(_stable(redact.document(value, secrets)), indent=1, sort_keys=True, ensure_ascii=False)
            made[f"{top}/{name}"] = _lines(shown)
    if not made:
        raise Failed(f"{host}: nothing to keep of {service}: the host's reply is empty")
    return dict(sorted(made.items()))


def _texts(collected: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    unit = collected.get("unit")
    if isinstance(unit, Mapping):
        unit = unit.get("text")
    if unit is not None:
        unit = _text(unit, "unit")
        texts["process.json" if unit.lstrip().startswith("{") else "unit.service"] = unit
    if collected.get("env") is not None:
        texts["env"] = _text(collected["env"], "env")
    dropins = collected.get("dropins") or {}
    if not isinstance(dropins, Mapping) or len(dropins) > MAX_DROPINS:
        raise Failed(f"the host's reply: dropins is not a mapping of at most {MAX_DROPINS} files")
    for path, value in sorted(dropins.items()):
        name = _dropin_name(str(path))
        unique, number = name, 2
        while f"dropins/{unique}.conf" in texts:
            unique, number = f"{name}-{number}", number + 1
        texts[f"dropins/{unique}.conf"] = _text(value, f"drop-in {name}")
    return texts


def _parsed(value: str, host: str) -> Any:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Failed(f"{host}: the reply's process.json is not JSON") from error
    if _size(parsed, 0) > MAX_ITEMS:
        raise Failed(f"{host}: the reply's process.json is too large or too deep to keep")
    return parsed


def _dropin_name(path: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", path.rsplit("/", 1)[-1].removesuffix(".conf"))
    return name.lstrip(".-")[:80] or "unnamed"


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Failed(f"the host's reply: {what} is not a text")
    if len(value) > MAX_TEXT:
        raise Failed(f"the host's reply: {what} is longer than {MAX_TEXT} characters")
    return value


def _lines(value: str) -> str:
    """With LF line ends, one at the end, and without control characters: a terminal may show it later."""
    unified = value.replace("\r\n", "\n").replace("\r", "\n")
    kept = "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in unified)
    return kept.rstrip("\n") + "\n"


def _document(collected: Mapping[str, Any], keys: tuple[str, ...], host: str) -> Any:
    found = {key: collected[key] for key in keys if collected.get(key) is not None}
    if not found:
        return None
    value = found if len(keys) > 1 else found[keys[0]]
    if _size(value, 0) > MAX_ITEMS:
        raise Failed(f"{host}: the reply's {keys[0]} is too large or too deep to keep")
    return value


def _size(value: Any, depth: int) -> int:
    if depth > 20:
        return MAX_ITEMS + 1
    if isinstance(value, Mapping):
        return 1 + sum(_size(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple):
        return 1 + sum(_size(item, depth + 1) for item in value)
    return 1 + (len(value) // 1000 if isinstance(value, str) else 0)


def _stable(value: Any) -> Any:
    """Without what changes by itself; keys are sorted when written."""
    if isinstance(value, Mapping):
        return {k: _stable(v) for k, v in value.items() if k in _KEPT_TIMES or not _VOLATILE.fullmatch(k.lower())}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    return value
