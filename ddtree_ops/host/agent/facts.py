"""What a host says of itself. Nothing here writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .base import (
    JSON,
    LOG_CAP,
    REDACTED,
    RELEASE,
    SECRET_NAME,
    TEXT_CAP,
    HostError,
    absolute,
    digest,
    integer,
    member,
    named,
    read_bytes,
    read_json,
    run,
    safe,
    safe_json,
)
from .releases import installed
from .service import Service
from .system import glibc, port_owner, server_info

if TYPE_CHECKING:
    from typing import Any


def systemd_version() -> str | None:
    """Asking costs as much as the rest of a probe's children together: only a snapshot has it."""
    version = run(["systemctl", "--version"]).stdout.split("\n")[0].split()
    return version[1] if len(version) > 1 else None


def system_facts() -> JSON:
    machine = os.uname()  # platform says the same; loading it takes longer than asking
    return {
        "hostname": machine.nodename,
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "uid": os.geteuid(),
        "python": python_version(),
        "pythons": pythons(),
        "glibc": glibc(),
        "machine": machine.machine,
        "kernel": machine.release,
        "driver": (read_bytes(Path("/sys/module/nvidia/version")) or b"").decode(errors="replace").strip() or None,
        "time": time.time(),
        "pid1": (read_bytes(Path("/proc/1/comm")) or b"").decode(errors="replace").strip(),
    }


def python_version() -> str:
    """Of the interpreter that runs this, such as 3.12.1 or 3.13.0rc2."""
    return sys.version.split()[0]


def pythons() -> list[str]:
    """The versions, such as 3.12, of the interpreters that `releases.fitting_python` would find."""
    names = [path.name for base in ("/usr/bin", "/usr/local/bin") for path in Path(base).glob("python3.*")]
    own = ".".join(python_version().split(".")[:2])
    return sorted({own, *(name[6:] for name in names if name[8:].isdigit())}, key=lambda version: int(version[2:]))


def dropin_hashes(service: Service) -> dict[str, str]:
    """{path: sha256} of every drop-in systemd applies, and of those in unit_dir it has not loaded yet."""
    paths = {*service.sup.show()["dropin_paths"], *map(str, service.dropin_dir.glob("*.conf"))}
    if service.sup.name == "process":
        return {}
    found = {path: digest(read_bytes(Path(path))) for path in sorted(paths)}
    return {path: sha for path, sha in found.items() if sha is not None}


def unit_facts(service: Service, show: JSON) -> JSON:
    form = service.sup.now()
    known = service.secret_values(service.state()["confirmed"])
    dropins = dropin_hashes(service)
    texts = {path: safe((read_bytes(Path(path)) or b"").decode(errors="replace"), known) for path in dropins}
    shown = form.data if form.kind == "file" else read_bytes(Path(show["fragment"])) if show["fragment"] else None
    return {
        "path": str(service.unit_path),
        "kind": form.kind,
        "sha256": digest(form.data) if form.kind == "file" else None,
        "text": None if shown is None else safe(shown.decode(errors="replace"), known),
        "dropins": dropins,
        "dropin_texts": texts,
        "links": dict(form.links),
        "enabled": show["enabled"],
        "masked": form.masked or show["load"] == "masked",
        "fragment": show["fragment"],
    }


def generation_facts(service: Service, n: int | None) -> JSON | None:
    if n is None:
        return None
    base = service.generation(n)
    found = {path.name: digest(read_bytes(path, 8 << 20)) for path in sorted(base.iterdir()) if path.is_file()}
    return {"n": n, "meta": service.meta(n), "files": {name: sha for name, sha in found.items() if sha is not None}}


def journal_tail(service: Service, limit: int = 20) -> list[JSON]:
    entries = service.journal.entries()[-limit:]
    return [safe_json(entry) for entry in entries if len(json.dumps(entry)) < LOG_CAP]


def last_downtime(service: Service) -> float | None:
    """Seconds that the last change of this service that stopped it took it away for."""
    downs = [entry.get("downtime_s") for entry in service.journal.entries() if entry.get("step") == "end"]
    return next((float(down) for down in reversed(downs) if isinstance(down, (int, float))), None)


def identity(path: Path) -> JSON:
    """What identifies weights without reading them: the config, the tensors' headers, the shards' sizes."""
    shards, headers = [], hashlib.sha256()
    for shard in sorted(path.glob("*.safetensors")):
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            headers.update(shard.name.encode() + file.read(min(length, 64 << 20)))
        shards.append([shard.name, shard.stat().st_size])
    return {
        "config_sha256": digest(read_bytes(path / "config.json", 8 << 20)),
        "headers_sha256": headers.hexdigest(),
        "shards": shards,
    }


def models_facts(paths: list[Any]) -> JSON:
    found = {}
    for given in paths[:16]:
        path = absolute(given, "model_paths")
        found[given] = {"present": path.is_dir(), "identity": identity(path) if path.is_dir() else None}
    return found


ARGUMENTS = frozenset(
    """model_path tokenizer_path served_model_name dtype quantization kv_cache_dtype context_length mem_fraction_static
    max_running_requests max_total_tokens max_total_num_tokens chunked_prefill_size max_prefill_tokens schedule_policy
    page_size tp_size pp_size dp_size ep_size nnodes node_rank dist_init_addr device load_format host port
    random_seed version
    attention_backend prefill_attention_backend decode_attention_backend sampling_backend grammar_backend
    moe_runner_backend moe_a2a_backend mm_attention_backend speculative_algorithm speculative_draft_model_path
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens speculative_ddtree_budget
    speculative_ddtree_topk speculative_ddtree_ladder speculative_dflash_block_size speculative_attention_mode
    disable_cuda_graph
    cuda_graph_bs cuda_graph_max_bs disable_radix_cache disable_overlap_schedule disable_custom_all_reduce
    enable_nccl_nvls enable_torch_compile enable_deterministic_inference enable_metrics skip_tokenizer_init
    trust_remote_code reasoning_parser tool_call_parser stream_interval watchdog_timeout numa_node engine block_size
    avg_spec_accept_length router_manager workers_count""".split()  # noqa: SIM905
)


def arguments(service: Service, port: int, n: int | None, timeout: float = 2) -> JSON | None:
    """The running server's resolved arguments, by allow-list, secrets removed by value; None when it does not tell."""
    try:
        info = server_info(port, service.api_key(n), timeout)
    except HostError:
        return None
    inner = info.get("internal_states")
    if isinstance(inner, list) and inner and isinstance(inner[0], dict):
        info = {**info, "avg_spec_accept_length": inner[0].get("avg_spec_accept_length")}
    known, kept = service.secret_values(n), {}
    for key in sorted(ARGUMENTS & set(info)):
        text = json.dumps(info[key])
        kept[key] = info[key] if len(text) < 4096 and safe(text, known) == text else REDACTED
    return kept


def gpus() -> list[JSON]:
    """Name, driver and memory of each GPU as nvidia-smi tells; empty where there is none."""
    done = run(
        ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader"], 20
    )
    keys = ("index", "name", "driver_version", "memory_total", "memory_used")
    rows = [safe(line).split(", ") for line in done.stdout.splitlines()[:64]] if done.returncode == 0 else []
    return [dict(zip(keys, row)) for row in rows if len(row) == len(keys)]  # noqa: B905 (strict= is 3.10)


def status(service: Service, request: JSON) -> JSON:
    """What runs, what is confirmed, what is unfinished, who holds the lock. Writes nothing, works without root."""
    state, show = service.state(), service.sup.show()
    confirmed = state["confirmed"]
    generation = None
    with contextlib.suppress(HostError):
        generation = generation_facts(service, confirmed)
    port = (((generation or {}).get("meta") or {}).get("health") or {}).get("port") or request.get("port")
    port = integer(request.get("port", port), "port", 1, 65535) if port is not None else None
    active = show["state"] == "active"
    verdict = None if confirmed is None else read_json(service.generation(confirmed) / "verdict.json")
    return {
        "state": {"confirmed": confirmed, "pending": state["pending"]},
        "journal_tail": journal_tail(service),
        "unfinished": (state["pending"] or {}).get("txn"),
        "lock": service.holder(),
        "last_downtime_s": last_downtime(service),
        "generation": generation,
        "active": {key: show[key] for key in ("state", "sub", "pid", "since_unix", "restarts", "result")},
        "port_owner": port_owner(port, service.sup.members()) if port is not None else None,
        "verdict": verdict,
        "verified": None if confirmed is None else read_json(service.generation(confirmed) / "verified.json"),
        "server_info": arguments(service, port, confirmed) if active and port is not None else None,
    }


def probe(service: Service, request: JSON) -> JSON:
    """All a plan needs, in one reply, systemd asked once. Writes nothing, works without root with less detail."""
    with service.sup.one_look():
        return _probe(service, request)


def _probe(service: Service, request: JSON) -> JSON:
    root = service.root
    asked = [named(RELEASE, release, "release") for release in member(request, "releases", list, [])]
    disk = os.statvfs(next(path for path in (root, *root.parents) if path.exists()))
    return {
        "system": system_facts(),
        "agent_sha256": digest(read_bytes(service.agent, 8 << 20)),
        "disk_free": disk.f_bavail * disk.f_frsize,
        "releases_installed": [release for release in asked if installed(root, release)],
        **status(service, request),
        "next_generation": service.next_generation(),
        "adopt_generation": service.adopt_generation(),
        "drift": service.drift(),
        "unit": unit_facts(service, service.sup.show()),
        "models": models_facts(member(request, "model_paths", list, [])),
    }


def collect(service: Service, request: JSON) -> JSON:
    """What a snapshot keeps: texts with secrets removed, and the resolved arguments by allow-list."""
    state, show = service.state(), service.sup.show()
    n = state["confirmed"]
    known, base = service.secret_values(n), service.generation(n or 0)
    lines = (read_bytes(base / "env") or b"").decode(errors="replace").splitlines() if n is not None else []
    hidden = [
        f"{key}={REDACTED}" if SECRET_NAME.search(key) else f"{key}{eq}{value}"
        for key, eq, value in (line.partition("=") for line in lines)
    ]
    meta = service.meta(n) if n is not None else None
    manifest = None
    if meta and meta.get("release"):
        found = read_json(
            service.root / "releases" / named(RELEASE, meta["release"], "release") / "manifest.json", 256 << 20
        )
        if found is not None:
            manifest = {
                **{key: value for key, value in found.items() if key != "files"},
                "files": len(found.get("files", [])),
            }
    port = ((meta or {}).get("health") or {}).get("port") or request.get("port")
    unit, cards = unit_facts(service, show), gpus()
    told = arguments(service, integer(port, "port", 1, 65535), n, 5) if port and show["state"] == "active" else None
    return {
        "unit": unit,
        "dropins": unit["dropin_texts"],
        "env": safe("\n".join(hidden), known) if hidden else None,
        "state": {"confirmed": n, "pending": state["pending"]},
        "generation": generation_facts(service, n),
        "manifest": manifest,
        "server_info": told,
        "gpus": cards,
        "driver": cards[0]["driver_version"] if cards else None,
        "verdict": read_json(base / "verdict.json") if n is not None else None,
        "system": {**system_facts(), "systemd": systemd_version()},
    }


def history(service: Service, request: JSON) -> JSON:
    """Transactions, newest first, and all generations, each with whether it was ever confirmed."""
    limit = integer(request.get("limit", 50), "limit", 1, 1000)
    found: dict[str, JSON] = {}
    for entry in service.journal.entries():
        txn = str(entry.get("txn"))
        row = found.setdefault(txn, {"txn": txn, "t": entry.get("t"), "end": None})
        if (entry.get("step"), entry.get("event")) == ("accept", "begin"):
            row.update({key: entry.get(key) for key in ("who", "client", "action", "from", "target", "release")})
        elif entry.get("step") == "end":
            row.update(
                end=entry.get("event"), **{key: entry.get(key) for key in ("generation", "reason", "downtime_s")}
            )
        elif entry.get("event") == "note":
            row.update(note=entry.get("step"), reason=entry.get("reason"))
            row.setdefault("who", entry.get("who"))
    confirmed = {row.get("generation") for row in found.values() if row["end"] == "confirmed"}
    generations = []
    for n in service.generations():
        meta = read_json(service.generation(n) / "generation.json") or {}
        row = {key: meta.get(key) for key in ("created", "release", "txn", "who", "workspace_commit")}
        row["profile"] = (meta.get("profile") or {}).get("name")
        row["verdict"] = last_verdict_kind(service, n)
        adopted = meta.get("adopted") is not None
        generations.append({"n": n, "confirmed": n in confirmed or adopted, "adopted": adopted, **row})
    current = service.state()["confirmed"]
    return {"history": list(found.values())[::-1][:limit], "generations": generations, "current": current}


def last_verdict_kind(service: Service, n: int) -> str | None:
    """What the gate last said of a generation: the verdict it was confirmed by, else that of its last failed try."""
    home = service.generation(n)
    tries = sorted(home.glob("evidence/*/verdict.json"))
    for path in [home / "verdict.json", *reversed(tries)]:
        kind = (read_json(path) or {}).get("kind")
        if kind is not None:
            return safe(str(kind), cap=40)
    return None


def generation(service: Service, request: JSON) -> JSON:
    """One generation: its meta and its texts, without the environment's secrets."""
    n = integer(request.get("n"), "n")
    meta, base, known = service.meta(n), service.generation(n), service.secret_values(n)
    texts = {
        path.name: read_bytes(path) or b""
        for path in base.iterdir()
        if path.is_file() and path.name != "generation.json"
    }
    return {
        "n": n,
        "meta": meta,
        "files": {name: safe(text.decode(errors="replace"), known) for name, text in texts.items()},
    }


def logs(service: Service, request: JSON) -> JSON:
    lines = service.sup.log_tail(integer(request.get("lines", 100), "lines", 1, 5000))
    known = service.secret_values(service.state()["confirmed"])
    return {"lines": safe("\n".join(lines)[-4 * TEXT_CAP :], known, 4 * TEXT_CAP).splitlines()}
