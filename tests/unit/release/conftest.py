"""Fixtures that several files share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .index import Index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Index]:
    (tmp_path / "index").mkdir()
    server = Index(tmp_path / "index", getattr(request, "param", 0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    yield server
    server.shutdown()
