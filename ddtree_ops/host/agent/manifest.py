"""A release's manifest, every word of it checked: it comes from a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .base import JSON, RELEASE, SHA256, HostError, integer, member, named, pattern
from .fitting import PACKAGE, RELEASED

if TYPE_CHECKING:
    from typing import Any

FORMAT = 2
# What a line of a manifest's "smoke" asks of the release's own interpreter.
SMOKE = {
    pattern(r"import ([A-Za-z_][A-Za-z0-9_.]*)"): "import {0}",
    pattern(r"algorithm ([A-Z0-9_]+)"): (
        "from sglang.srt.speculative.spec_info import SpeculativeAlgorithm; SpeculativeAlgorithm.from_string('{0}')"
    ),
    pattern(r"flag (--[a-z0-9-]+)"): (
        "import argparse; from sglang.srt.server_args import ServerArgs; parser = argparse.ArgumentParser()\n"
        "ServerArgs.add_cli_args(parser)\n"
        "if '{0}' not in parser._option_string_actions: raise SystemExit('sglang does not know the flag {0}')"
    ),
}


#: Names in venv/bin that ``python -m venv`` and pip make, or may make one day.
VENVS_OWN = pattern(r"(?i)[.]|python|pip|activate|deactivate")


class Manifest:
    """A manifest whose every word was checked. ``files``: path -> (sha256, size, mode); ``blobs``: sha256 -> size."""

    def __init__(
        self,
        id: str,
        text: JSON,
        files: Mapping[str, tuple[str, int, int]],
        smoke: list[str],
        requirements: list[str],
    ) -> None:
        self.id, self.text, self.files, self.smoke, self.requirements = id, text, files, smoke, requirements
        self.blobs = {sha: size for sha, size, _ in files.values()}

    @classmethod
    def of(cls, given: JSON) -> Manifest:
        release, version = named(RELEASE, given.get("id"), "release"), member(given, "requires", dict).get("python")
        if given.get("format") != FORMAT:
            raise HostError("usage", f"manifest format {given.get('format')!r} is not known here")
        files: dict[str, tuple[str, int, int]] = {}
        for entry in member(given, "files", list):
            path, mode = release_path(entry.get("path"), str(version)), integer(entry.get("mode", 0o644), "mode")
            if path in files:
                raise HostError("usage", f"{path} is named twice")
            size = integer(entry.get("size"), f"size of {path}", 0, 1 << 50)
            files[path] = (named(SHA256, entry.get("sha256"), "sha256"), size, 0o755 if mode & 0o111 else 0o644)
        smoke = [smoke_code(line) for line in member(given, "smoke", list)]
        wheels, listed = given.get("wheels", "ship"), member(given, "index_requirements", list, [])
        if wheels not in ("ship", "index") or (wheels == "ship" and listed):
            raise HostError("usage", f"wheels: {wheels!r} with {len(listed)} requirements is not known here")
        return cls(release, given, files, smoke, [requirement(entry) for entry in listed])

    @property
    def python(self) -> str:
        return str(self.text["requires"]["python"])


def release_path(path: Any, python: str) -> str:
    """Where a manifest's file goes below the release; usage error for anything but a plain path of ours."""
    inner = path.split("/") if isinstance(path, str) else []
    plain = all(part not in ("", ".", "..") and part.isprintable() and len(part) < 255 for part in inner)
    if plain and path.startswith((f"venv/lib/python{python}/site-packages/", "share/")):
        return str(path)
    if plain and len(inner) == 3 and path.startswith("venv/bin/") and not VENVS_OWN.match(inner[2]):
        return str(path)
    raise HostError("usage", f"manifest path {path!r} is neither below site-packages/ nor share/, nor a program's")


def smoke_code(line: Any) -> str:
    for form, code in SMOKE.items():
        if isinstance(line, str) and (found := form.fullmatch(line)):
            return code.format(*found.groups())
    raise HostError("usage", f"smoke: {line!r} is not known here")


def requirement(entry: Any) -> str:
    """A line for pip: a name, one version, its hashes, and no option, URL or path."""
    if not isinstance(entry, dict) or not member(entry, "hashes", list):
        raise HostError("usage", f"index_requirements: {entry!r} has no hashes")
    name, version = named(PACKAGE, entry.get("name"), "name"), named(RELEASED, entry.get("version"), "version")
    return " ".join([f"{name}=={version}", *(f"--hash=sha256:{named(SHA256, sha, 'hash')}" for sha in entry["hashes"])])
