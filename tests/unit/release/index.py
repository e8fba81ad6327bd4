"""A simple index (PEP 503) on this machine, for pip."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Index(ThreadingHTTPServer):
    """Over a directory. ``cuts``: how many replies with a wheel end in the middle."""

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
