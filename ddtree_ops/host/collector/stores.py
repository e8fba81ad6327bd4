"""Disks, and the models on them: present, whole, and what their configurations say."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from ..agent.base import JSON, read_json, safe
from .tools import Box, line_of

#: Keys of a config.json that leave the host: all that two models must agree on, and nothing else.
NUMBERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "block_size",
    "num_target_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts",
)
LFS_POINTER = b"version https://git-lfs"


def disks(box: Box) -> JSON:
    """{path asked for: what holds it}; a path that is not there yet is judged by the nearest directory above it."""
    return {path: disk(path) for path in [str(each) for each in box.request.get("paths", [])][:16]}


def disk(path: str) -> JSON:
    there = Path(path)
    while not there.exists() and there != there.parent:
        there = there.parent
    held = os.statvfs(there)
    mount = mount_of(str(there.resolve()))
    return {
        "exists": str(there) == path,
        "free_bytes": held.f_bavail * held.f_frsize,
        "total_bytes": held.f_blocks * held.f_frsize,
        "free_inodes": held.f_favail if held.f_files else None,
        "writable": os.access(there, os.W_OK),
        "owner": there.stat().st_uid,
        **mount,
    }


def mount_of(path: str) -> JSON:
    """The file system that holds a path: kind, read-only, noexec (proc(5), mountinfo)."""
    best: JSON = {"mount": None, "fs": None, "read_only": False, "noexec": False}
    for line in line_of("/proc/self/mountinfo", 1 << 20).splitlines():
        left, _, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(more) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best["mount"] or ""):
            options = set(fields[5].split(",")) | set(more[2].split(","))
            best = {
                "mount": point,
                "fs": more[0],
                "read_only": "ro" in fields[5].split(","),
                "noexec": "noexec" in options,
            }
    return best


def model(box: Box, path: str) -> JSON:
    """A model's directory. ``problems`` say what of its weights is missing, cut short or still being fetched."""
    base = Path(path)
    if not base.is_dir():
        return {"present": False, "problems": []}
    config = read_json(base / "config.json", 4 << 20)
    problems: list[str] = []
    unreadable: list[str] = []
    size = 0
    names = sorted(each.name for each in base.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    for name in shards:
        size += (base / name).stat().st_size
        problem = shard_problem(base / name)
        if problem:
            problems.append(f"{name}: {problem}")
        if not (base / name).stat().st_mode & 0o004:
            unreadable.append(name)
    index = read_json(base / "model.safetensors.index.json", 64 << 20)
    weights = (index or {}).get("weight_map")
    wanted = sorted(set(map(str, weights.values()))) if isinstance(weights, dict) else []
    missing = [name for name in wanted if name not in shards]
    total = ((index or {}).get("metadata") or {}).get("total_size")
    fetching = [name for name in names if re.search(r"\.(incomplete|part|tmp|aria2|crdownload)$|^\.cache$", name)]
    return {
        "present": True,
        "config": None if config is None else shape(config),
        "shards": len(shards),
        "other_weights": sorted(name for name in names if name.endswith((".bin", ".pt", ".gguf")))[:20],
        "bytes": size,
        "index_bytes": total if isinstance(total, int) else None,
        "missing": [safe(name) for name in missing[:20]],
        "missing_count": len(missing),
        "fetching": [safe(name) for name in fetching[:20]],
        "problems": [safe(problem) for problem in problems[:20]],
        "unreadable": [safe(name) for name in unreadable[:20]],
        "fs": mount_of(str(base.resolve()))["fs"],
    }


def shard_problem(path: Path) -> str | None:
    """Why a safetensors file is not whole: its header says where the last tensor ends."""
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if not path.is_file():  # a pipe would be waited for
            return "no regular file"
        with path.open("rb") as file:
            start = file.read(8)
            if start.startswith(LFS_POINTER[:8]):
                return "a pointer of git-lfs, not weights"
            length = int.from_bytes(start, "little")
            if size < 8 or length > min(size - 8, 256 << 20):
                return f"cut short: {size} bytes"
            try:
                header = json.loads(file.read(length))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                return "its header is damaged"
        if size != 8 + length + max(ends, default=0):
            return f"{size} bytes, its header says {8 + length + max(ends, default=0)}"
        return None
    return "cannot be read"


def shape(config: JSON) -> JSON:
    """The parts of a configuration that are compared. A multimodal model's text part counts."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    found: JSON = {key: merged[key] for key in NUMBERS if isinstance(merged.get(key), int)}
    names = config.get("architectures")
    found["architectures"] = [safe(str(name), cap=100) for name in names[:4]] if isinstance(names, list) else []
    section = config.get("dflash_config")
    if isinstance(section, dict):
        layers = section.get("target_layer_ids")
        found["dflash"] = {
            "target_layer_ids": [each for each in layers[:64] if isinstance(each, int)]
            if isinstance(layers, list)
            else None,
            **{
                key: section[key]
                for key in ("block_size", "num_target_layers", "mask_token_id")
                if isinstance(section.get(key), int)
            },
        }
    quantised = config.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None
    )
    if isinstance(quantised, dict):
        found["quantization"] = safe(str(quantised.get("quant_method") or quantised.get("quant_algo")), cap=60)
    return found


def release_facts(box: Box) -> JSON:
    """Releases that are installed under the root, newest last."""
    base = Path(box.text("root", "/opt/ddtree")) / "releases"
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if entry.is_dir() and (Path(entry.path) / "installed.json").exists():
                found.append((entry.stat().st_mtime, entry.name))
    return {"installed": [safe(name) for _, name in sorted(found)][-20:]}
