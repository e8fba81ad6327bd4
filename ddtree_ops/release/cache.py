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

from ..errors import Failed

BUFFER = 1 << 20


class Cache:
    """``wheels/``, ``blobs/<aa>/<sha256>`` and ``releases/<id>/manifest.json`` in one directory.

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

    def finished(self, release: str) -> dict[str, Any] | None:
        """The manifest of a release that was made before, if every one of its blobs is still here."""
        try:
            manifest: dict[str, Any] = json.loads(self._manifest(release).read_text())
        except (OSError, ValueError):
            return None
        return manifest if self._has_all(manifest["files"]) else None

    def _has_all(self, files: list[dict[str, Any]]) -> bool:
        """Without a Path for each of 30,000 files: a release that is there is answered at once."""
        base = f"{self.directory}/blobs/"
        try:
            return all(os.stat(f"{base}{f['sha256'][:2]}/{f['sha256']}").st_size == f["size"] for f in files)  # noqa: PTH116
        except OSError:
            return False

    def finish(self, manifest: dict[str, Any]) -> None:
        """Keeps a manifest. Raises Failed when the same id once had other files: the id would be a lie."""
        path = self._manifest(manifest["id"])
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        if path.exists() and path.read_text() != text:
            raise Failed(f"release {manifest['id']} was built before with other files; compare with {path}")
        with self._temporary() as (file, temporary):
            file.write(text.encode())
            self._publish(file, temporary, path)

    def _manifest(self, release: str) -> Path:
        return self.directory / "releases" / release / "manifest.json"

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
