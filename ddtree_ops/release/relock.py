"""Regenerates a lock file: ``python -m ddtree_ops.release.relock sglang-0.5.17-cp312 [NAME==VERSION ...]``.

pip resolves and says the hashes, which it reads from the index: nothing large is downloaded. Versions stay as the lock
has them; ``NAME==VERSION`` changes or adds one, ``--upgrade`` lets all move that ``# resolve`` does not fix.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from ..errors import Failed, UsageError
from .fetch import target_options
from .lock import LOCKS, Lock, normal, parse_lock

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?", re.DOTALL)


def relock(lock: Lock, changes: list[str], *, upgrade: bool = False) -> str:
    """The new text of a lock. Raises Failed with what pip said."""
    versions = {} if upgrade else {pin.name: pin.requirement for pin in lock.pins}
    versions |= {normal(change.partition("==")[0]): change for change in changes}
    report = _report(lock, sorted(versions.values()))
    found = {normal(item["metadata"]["name"]): item for item in report}
    needed = _needed_by(lock, found)
    lines = [line for line in lock.text.splitlines() if line.startswith("#")]
    for name, item in sorted(found.items()):
        sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
        via = f"  # via {', '.join(sorted(needed[name]))}" if needed[name] else ""
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{sha256}{via}")
    return "\n".join(lines) + "\n"


def _report(lock: Lock, versions: list[str]) -> list[dict[str, Any]]:
    """pip's installation report: what it would install for the lock's Python."""
    with tempfile.TemporaryDirectory() as directory:
        wanted = Path(directory) / "versions.txt"
        wanted.write_text("\n".join(versions) + "\n")
        out = Path(directory) / "report.json"
        command = [
            *(sys.executable, "-m", "pip", "--python", _interpreter(lock.python), "install", "--dry-run", "--quiet"),
            *("--ignore-installed", "--no-input", "--disable-pip-version-check", "--report", str(out)),
            *("--target", directory, *target_options(lock)),
            *(["-c", str(wanted), lock.resolve] if lock.resolve else ["--no-deps", "-r", str(wanted)]),
        ]
        extra = ["--extra-index-url", lock.extra_index] if lock.extra_index else []
        for more in ([], extra) if extra else ([],):
            done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found: list[dict[str, Any]] = json.loads(out.read_text())["install"]
                return found
    raise Failed(f"pip cannot resolve it: {done.stderr.strip()[-2000:]}")


def _interpreter(python: str) -> str:
    """pip judges a requirement's ``python_version`` by the interpreter that it runs on, whatever its target is."""
    if python == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    found = shutil.which(f"python{python}")
    if found is None:
        raise UsageError(f"a lock for Python {python} is resolved by python{python}, which is not in PATH")
    return found


def _needed_by(lock: Lock, found: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    """Name -> names of the pins that need it. Of a marker only ``extra`` is judged: a parent too many is harmless."""
    needed: dict[str, set[str]] = defaultdict(set)
    root = normal(lock.resolve.partition("==")[0]) if lock.resolve else None
    extras: dict[str, set[str]] = defaultdict(set)
    waiting = [root] if root else []
    while waiting:
        parent = waiting.pop()
        for text in found[parent]["metadata"].get("requires_dist", []):
            match = _REQUIREMENT.match(text)
            if match is None:
                raise Failed(f"{parent}: cannot read the requirement {text!r}")
            child, wanted, marker = normal(match[1]), set((match[2] or "").replace(" ", "").split(",")), match[3] or ""
            conditions = set(re.findall(r"""extra\s*==\s*['"]([^'"]+)['"]""", marker))
            if child not in found or (conditions and not conditions & extras[parent]):
                continue
            if parent not in needed[child] or not wanted - {""} <= extras[child]:
                extras[child] |= wanted - {""}
                waiting.append(child)
            needed[child].add(parent)
    needed.pop(root or "", None)  # wanted for itself, whoever else names it
    return needed


if __name__ == "__main__":
    file = LOCKS / f"{sys.argv[1]}.txt"
    words = [word for word in sys.argv[2:] if word != "--upgrade"]
    file.write_text(relock(parse_lock(file.read_text(), file.name), words, upgrade="--upgrade" in sys.argv[2:]))
