"""From an archive of tests/gpu/bundle, or a directory, to import trees that a server can be started with."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trees:
    """PYTHONPATH of SGLang as patched here and, where the archive has it, as released."""

    patched: str
    stock: str | None


def unpack(engine: Path, work: Path) -> Trees:
    """``engine``: an archive of tests/gpu/bundle, or the site-packages of a release (which has no stock tree)."""
    if engine.is_dir():
        return Trees(str(engine), None)
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-C", str(work), "-xJf", str(engine)], check=True)
    site, changed, merged = work / "site", work / "patched", work / "merged"
    shutil.copytree(site / "sglang", merged / "sglang", copy_function=os.link)
    for file in sorted(path for path in changed.rglob("*") if path.is_file()):
        target = merged / file.relative_to(changed)
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return Trees(f"{merged}:{site}", str(site))
