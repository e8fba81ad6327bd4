"""Fetching, from an index that breaks connections, has the wrong thing, or has it late. pip is the real one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release.cache import Cache
from ddtree_ops.release.fetch import fetch
from ddtree_ops.release.lock import Lock

from .wheelwright import lock_of, make_wheel

PIP = tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2])
CHECKOUT = Path(__file__).parents[3]
NOISE = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(60_000))  # 1.9 MB that do not deflate


class Index(ThreadingHTTPServer):
    """A simple index (PEP 503) over a directory. ``cuts``: how many replies with a wheel end in the middle."""

    daemon_threads = True

    def __init__(self, directory: Path, cuts: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.directory, self.cuts, self.delay = directory, cuts, 0.0
        self.ranges: list[str | None] = []
        self.most = self.now = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            with self.server.lock:
                self.server.now += 1
                self.server.most = max(self.server.most, self.server.now)
            time.sleep(self.server.delay)
            self._wheel((self.server.directory / self.path.rpartition("/")[2]).read_bytes())
            with self.server.lock:
                self.server.now -= 1
            return
        name = self.path.strip("/").rpartition("/")[2]
        wheels = [path for path in self.server.directory.glob("*.whl") if path.name.startswith(f"{name}-")]
        links = "".join(
            f'<a href="/files/{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
            for path in wheels
        )
        self._reply(200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), {"Content-Type": "text/html"})

    def _wheel(self, content: bytes) -> None:
        wanted = self.headers.get("Range")
        with self.server.lock:
            self.server.ranges.append(wanted)
            cut = self.server.cuts > 0
            self.server.cuts -= cut
        match = re.fullmatch(r"bytes=(\d+)-", wanted or "")
        start = int(match[1]) if match else 0
        headers = {"ETag": '"1"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if match:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._reply(206 if match else 200, content[start:], headers, cut)

    def _reply(self, code: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = True


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


@pytest.mark.skipif(PIP < (25, 1), reason="pip resumes downloads since 25.1")
@pytest.mark.parametrize("index", [3], indirect=True)
def test_a_broken_connection_goes_on_at_its_byte(index: Index, tmp_path: Path) -> None:
    lock = lock_of(make_wheel(index.directory, "big", {"big/noise": NOISE}))
    (wheel,) = fetch(lock, Cache(tmp_path / "cache"))
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == lock.pins[0].sha256
    starts = [int(re.sub(r"\D", "", wanted or "0")) for wanted in index.ranges]
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    assert starts[0] == 0 < starts[1]


def test_wheels_come_in_parallel_and_the_bar_ends_full(index: Index, tmp_path: Path) -> None:
    wheels = [make_wheel(index.directory, f"p{n}", {f"p{n}/x": NOISE[: 1000 * n]}) for n in range(1, 16)]
    seen: list[tuple[str, int, int]] = []
    index.delay = 0.3
    found = fetch(lock_of(*wheels), Cache(tmp_path / "cache"), lambda *said: seen.append(said))
    assert [path.name for path in found] == [path.name for path in wheels]
    assert index.most > 1
    assert seen == sorted(seen)
    assert seen[-1] == ("fetching the wheels", 15_000, 15_000)


def test_only_what_is_missing_is_asked_for(index: Index, tmp_path: Path) -> None:
    wheels = [make_wheel(index.directory, name, {f"{name}/x": b"1"}) for name in ("one", "two")]
    cache = Cache(tmp_path / "cache")
    fetch(lock_of(wheels[0]), cache)
    fetch(lock_of(*wheels), cache)
    assert len(index.ranges) == 2
    assert not list(cache.directory.glob("tmp-*"))


def test_a_damaged_wheel_in_the_cache_is_fetched_again(index: Index, tmp_path: Path) -> None:
    lock, cache = lock_of(make_wheel(index.directory, "pkg", {"pkg/x": b"1"})), Cache(tmp_path / "cache")
    (wheel,) = fetch(lock, cache)
    sound = wheel.read_bytes()
    for damage in (sound[:-1], b"", sound[:50] + b"X" + sound[51:]):
        wheel.write_bytes(damage)
        assert fetch(lock, cache) == [wheel]
        assert wheel.read_bytes() == sound


def test_what_the_index_does_not_have_as_pinned_is_refused(index: Index, tmp_path: Path) -> None:
    lock = lock_of(make_wheel(index.directory, "pkg", {"pkg/x": b"1"}))
    make_wheel(index.directory, "pkg", {"pkg/x": b"2"})
    with pytest.raises(Failed, match=r"pip cannot get .* DO NOT MATCH THE HASHES"):
        fetch(lock, Cache(tmp_path / "cache"))
    (index.directory / "pkg-1.0-py3-none-any.whl").unlink()
    with pytest.raises(Failed, match=r"No matching distribution found for pkg==1\.0"):
        fetch(lock, Cache(tmp_path / "cache"))
    assert not list((tmp_path / "cache/wheels").iterdir())


def test_an_interrupted_fetch_ends_its_pips_and_leaves_nothing_half_made(index: Index, tmp_path: Path) -> None:
    wheel = make_wheel(index.directory, "pkg", {"pkg/x": b"1"})
    index.delay = 60
    program = (
        "import sys; from pathlib import Path; from ddtree_ops.release.cache import Cache\n"
        "from ddtree_ops.release.fetch import fetch; from tests.unit.release.wheelwright import lock_of\n"
        "fetch(lock_of(Path(sys.argv[1])), Cache(Path(sys.argv[2])))\n"
    )
    cache = tmp_path / "cache"
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(wheel), str(cache)], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not index.now and time.monotonic() < until:
        time.sleep(0.05)
    assert index.now, "pip has not asked for the wheel"
    client.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in client.communicate(timeout=30)[1]
    assert not list(cache.glob("tmp-*"))
    assert not list((cache / "wheels").iterdir())


def test_no_pins_need_no_pip(tmp_path: Path) -> None:
    assert fetch(Lock("3.11", "x86_64", "2.28", None, (), ""), Cache(tmp_path)) == []
