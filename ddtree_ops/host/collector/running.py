"""The service: unit, state, port, the server's own word, its log, its caches."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ..agent.base import JSON, NAME, read_bytes, read_json, safe
from ..agent.causes import cause
from ..agent.system import port_owner, server_info
from .tools import Box, properties, whole

UNIT_KEYS = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "NRestarts",
    "MainPID",
    "UnitFileState",
    "ExecMainStatus",
    "NeedDaemonReload",
    "LimitMEMLOCK",
    "LimitNOFILE",
)
SERVER_KEYS = (
    "version",
    "dtype",
    "max_running_requests",
    "context_length",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_ddtree_budget",
    "speculative_ddtree_ladder",
    "speculative_ddtree_topk",
    "attention_backend",
    "disable_cuda_graph",
    "tp_size",
)
#: What a log says before a server dies, beside the causes that an install knows.
LOG_CAUSES = (
    (r"CUDA error: an illegal memory access", "illegal-access"),
    (r"(?:system not yet initialized|[Ee]rror 802)", "fabric"),
    (r"CUDA out of memory|torch\.OutOfMemoryError|Not enough memory", "out-of-memory"),
    (r"device-side assert", "device-assert"),
    (r"\[Errno 98\]|address already in use", "port"),
    (r"No such file or directory: '(?:ninja|[\w/.+-]*nvcc)'|Could not find nvcc|(?:nvcc|c\+\+): (?:not found|No such)",
     "compiler"),
    (r"NCCL.{0,80}(?:timeout|timed out)|Watchdog caught collective", "collective-timeout"),
)  # fmt: skip


def service(box: Box) -> JSON:
    """systemd's word on the unit, and what ddtree keeps of the service under its root."""
    name = box.text("service")
    if not NAME.fullmatch(name):
        return {"name": None}
    found: JSON = {"name": name}
    if box.text("supervisor", "systemd") == "systemd":
        said = box.ask(
            "systemctl", "show", f"{name}.service", f"--property={','.join(UNIT_KEYS)}", quiet=not box.has("systemctl")
        )
        shown = properties(said.text, UNIT_KEYS) if not said.problem else {}
        found |= {
            "load": shown.get("LoadState"),
            "state": shown.get("ActiveState"),
            "sub": shown.get("SubState"),
            "result": shown.get("Result"),
            "restarts": whole(shown.get("NRestarts")),
            "pid": whole(shown.get("MainPID")) or None,
            "enabled": shown.get("UnitFileState"),
            "needs_reload": shown.get("NeedDaemonReload") == "yes",
            "memlock": shown.get("LimitMEMLOCK"),
            "nofile": whole(shown.get("LimitNOFILE")),
        }
    base = Path(box.text("root", "/opt/ddtree")) / "services" / name
    state = read_json(base / "state.json") or {}
    n = state.get("confirmed")
    if isinstance(n, int):
        here = base / "generations" / str(n)
        meta = read_json(here / "generation.json") or {}
        verdict, at = last_verdict(here)
        found |= {
            "generation": n,
            "release": safe(str(meta.get("release") or ""), cap=80) or None,
            "unit_proven": {
                "kind": safe(str(verdict.get("kind")), cap=40) if verdict else None,
                "at": at,
                "driver": safe(str((verdict.get("binds") or {}).get("driver") or ""), cap=40) or None,
            },
        }
    return found


def last_verdict(generation: Path) -> tuple[JSON, float | None]:
    """The verdict that counts and when it was written: verify-exactness's where it decided, else the deploy's."""
    for name in ("verified.json", "verdict.json"):
        verdict = read_json(generation / name)
        if verdict is not None and (name == "verdict.json" or verdict.get("kind") != "INCONCLUSIVE"):
            with contextlib.suppress(OSError):
                return verdict, (generation / name).stat().st_mtime
    return {}, None


def members(name: str) -> list[int]:
    """Processes of the unit's control group, by /proc: also those that a scheduler re-parented."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"/{name}.service" in Path(entry.path, "cgroup").read_text(encoding="utf-8", errors="replace"):
                    found.append(int(entry.name))
    return found


def port(box: Box) -> JSON:
    """Who listens on the service's port; ``ours``: the unit's own processes."""
    number = box.request.get("port")
    if not isinstance(number, int):
        return {"number": None}
    name = box.text("service")
    ours = members(name) if NAME.fullmatch(name) else []
    home = f"{box.text('root', '/opt/ddtree')}/"
    owner = port_owner(number, ours)
    if owner and not owner["ours"] and owner["pid"]:
        with contextlib.suppress(OSError):
            # Without systemd the service is known by the release it runs from.
            words = Path(f"/proc/{owner['pid']}/cmdline").read_bytes().decode("utf-8", errors="replace")
            owner["ours"] = words.startswith(home)
    return {"number": number, "owner": owner}


def server(box: Box) -> JSON:
    """The running server's resolved arguments by allow-list, when it answers without a key."""
    number = box.request.get("port")
    if not isinstance(number, int) or box.request.get("key"):
        return {"answers": None}
    try:
        info = server_info(number, None, min(1.5, box.left() * 0.7))
    except Exception as error:  # whatever a server does is a fact about it
        return {"answers": False, "problem": safe(str(error), cap=300)}
    inner = info.get("internal_states")
    first = inner[0] if isinstance(inner, list) and inner and isinstance(inner[0], dict) else {}
    told = {
        key: info[key]
        for key in SERVER_KEYS
        if isinstance(info.get(key), (int, float, str, bool, type(None))) and key in info
    }
    told = {key: safe(value, cap=200) if isinstance(value, str) else value for key, value in told.items()}
    for key in ("avg_spec_accept_length", "effective_max_running_requests_per_dp", "max_running_requests"):
        value = first.get(key, info.get(key))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            told[key] = value
    return {"answers": True, "info": told}


def log(box: Box) -> JSON:
    """Known causes in the end of the service's log: [{"cause", "line"}], each cause once, the newest line."""
    name = box.text("service")
    if not NAME.fullmatch(name):
        return {"readable": False, "causes": []}
    if box.text("supervisor", "systemd") == "systemd":
        said = box.ask(
            "journalctl",
            "-u",
            f"{name}.service",
            "-q",
            "--no-pager",
            "-o",
            "cat",
            "-n",
            "2000",
            "--since=-24h",
            quiet=True,
        )
        text, readable = said.text, not said.problem and (os.geteuid() == 0 or bool(said.text))
    else:
        path = Path(box.text("root")) / "services" / name / "run" / "log"
        text = (read_bytes(path, 1 << 18, tail=True) or b"").decode("utf-8", errors="replace")
        readable = os.access(path, os.R_OK) or not path.exists()
    return {"readable": readable, "causes": log_causes(text)}


def log_causes(text: str) -> list[JSON]:
    found: dict[str, str] = {}
    for line in text.splitlines()[-2000:]:
        line = line[:2000]
        named = next((name for pattern, name in LOG_CAUSES if re.search(pattern, line)), None) or cause(line)
        if named:
            found[named] = safe(line.strip(), cap=400)
    return [{"cause": name, "line": line} for name, line in list(found.items())[:20]]
