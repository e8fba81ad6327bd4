"""From an archive of tests/gpu/bundle or tests/gpu/pack, or a directory, to trees that servers can start with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).parents[1] / "faults"
PATCHES = Path(__file__).parents[3] / "patches" / "sglang-0.5.17"


@dataclass(frozen=True)
class Trees:
    """PYTHONPATH of SGLang as patched here and, where the archive has it, as released. ``work``: for more of them.

    ``cache``: what ``ddtree build`` left behind, where the tree is that release's.
    """

    patched: str
    stock: str | None
    work: Path
    cache: Path | None = None

    def release(self) -> dict[str, Any]:
        """The manifest of the cache's one release."""
        assert self.cache is not None
        (manifest,) = self.cache.glob("releases/*/manifest.json")
        text: dict[str, Any] = json.loads(manifest.read_text())
        return text

    def planted(self, faults: tuple[str, ...]) -> str:
        """PYTHONPATH of SGLang as patched here, and with these faults. Raises Failed for one that does not fit."""
        if not faults:
            return self.patched
        from ddtree_ops.release.udiff import apply_diff, parse_diff, split_patch

        first, *rest = self.patched.split(os.pathsep)
        site = self.work / "-and-".join(faults)
        if not site.is_dir():
            kept = shutil.ignore_patterns("__pycache__")
            shutil.copytree(Path(first) / "sglang", site / "sglang", copy_function=os.link, ignore=kept)
            for fault in faults:
                for diff in parse_diff(split_patch((FAULTS / f"{fault}.patch").read_bytes())[1], fault):
                    file = site / diff.path
                    changed = apply_diff(diff, file.read_bytes(), fault)
                    # the name is a link to the tree's own file
                    file.unlink()
                    file.write_bytes(changed)
        return os.pathsep.join([str(site), *(rest or [first])])


def unpack(engine: Path, work: Path) -> Trees:
    """``engine``: an archive of tests/gpu/bundle or tests/gpu/pack, or the site-packages of a release.

    Only tests/gpu/bundle has a stock tree; it is patched here, by this checkout's series. What the tree has becomes
    importable: the client's half needs what the machine may lack (msgspec, httpx's own needs). Raises Failed for a
    patch that does not fit exactly.
    """
    work.mkdir(parents=True, exist_ok=True)
    if engine.is_dir():
        trees = Trees(str(engine), None, work)
    else:
        subprocess.run(["tar", "-C", str(work), "-xJf", str(engine)], check=True)
        trees = _of_release(work) if (work / "releases").is_dir() else Trees("", str(work / "site"), work)
    sys.path.append(trees.stock or trees.patched)
    return trees if trees.patched else _patched(trees, work / "site", work / "merged")


def _patched(trees: Trees, site: Path, merged: Path) -> Trees:
    """With this checkout's series over the stock tree ``site``."""
    from ddtree_ops.release.patchset import load_patchset

    def read(path: str) -> bytes | None:
        file = site / path
        return file.read_bytes() if file.is_file() else None

    changed = load_patchset(PATCHES).apply(read)
    shutil.copytree(site / "sglang", merged / "sglang", copy_function=os.link)
    for path, content in changed.items():
        target = merged / path
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return replace(trees, patched=f"{merged}:{site}")


def _of_release(work: Path) -> Trees:
    """The files of a packed release at their places, as its installation would have them."""
    trees = Trees(str(work / "site"), None, work, work)
    for entry in trees.release()["files"]:
        _, found, path = entry["path"].partition("site-packages/")
        if found:
            target = work / "site" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(work / "blobs" / entry["sha256"][:2] / entry["sha256"], target)
    return trees
