"""The client's cache: wheels, blobs by sha256, and finished releases. Any part of it may be deleted at any time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

BUFFER = 1 << 20


class Cache:
    """``wheels/``, ``blobs/<aa>/<sha256>``, ``releases/<id>/manifest.json`` and ``builds/<input hash>`` in a directory.

    Several processes may use it at once: everything appears by rename.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """``directory``: by default ``$XDG_CACHE_HOME/ddtree``, else ``~/.cache/ddtree``."""
        if directory is None:
            base = os.environ.get("XDG_CACHE_HOME")
            directory = (Path(base) if base else Path.home() / ".cache") / "ddtree"
        self.directory = directory

    @property
    def wheels(self) -> Path:
        return self.directory / "wheels"

    def blob(self, sha256: str) -> Path:
        return self.directory / "blobs" / sha256[:2] / sha256

    def has_blob(self, sha256: str, size: int) -> bool:
        try:
            return self.blob(sha256).stat().st_size == size
        except FileNotFoundError:
            return False

    def add_blob(self, chunks: Iterable[bytes]) -> tuple[str, int]:
        """Stores content of any length in constant memory; returns its sha256 and size."""
        digest, size = hashlib.sha256(), 0
        with self._temporary() as (file, path):
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
            sha256 = digest.hexdigest()
            self._publish(file, path, self.blob(sha256))
        return sha256, size

    def manifest(self, release: str) -> Path:
        return self.directory / "releases" / release / "manifest.json"

    def finished(self, inputs: str) -> dict[str, Any] | None:
        """The manifest once made of these inputs, if every one of its blobs is still here."""
        try:
            release = (self.directory / "builds" / inputs).read_text().strip()
            manifest: dict[str, Any] = json.loads(self.manifest(release).read_text())
        except (FileNotFoundError, ValueError):
            return None
        whole = manifest.get("id") == release and all(self.has_blob(f["sha256"], f["size"]) for f in manifest["files"])
        return manifest if whole else None

    def finish(self, inputs: str, manifest: dict[str, Any]) -> None:
        for path, text in (
            (self.manifest(manifest["id"]), json.dumps(manifest, indent=1, sort_keys=True) + "\n"),
            (self.directory / "builds" / inputs, manifest["id"] + "\n"),
        ):
            with self._temporary() as (file, temporary):
                file.write(text.encode())
                self._publish(file, temporary, path)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory on the cache's own file system, gone afterwards."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=self.directory) as directory:
            yield Path(directory)

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[tuple[IO[bytes], Path]]:
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="tmp-", dir=self.directory)
        try:
            with os.fdopen(handle, "wb", buffering=BUFFER) as file:
                yield file, Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    @staticmethod
    def _publish(file: IO[bytes], temporary: Path, final: Path) -> None:
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(final)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
