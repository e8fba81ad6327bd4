"""Shipping and installing, measured on a test host (root; see tests/hosts).

python -m benchmarks.ship cycle         the reference release: list, upload, install; again; after a one-file change
python -m benchmarks.ship cuts          the same over 1 MB/s, cut ten times
python -m benchmarks.ship memory        2 GB: the client's peak memory
python -m benchmarks.ship levels        gzip levels on the reference release (needs no host)
python -m benchmarks.ship connections   one to four connections, near and far
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddtree_ops.host import receiver
from ddtree_ops.release import Cache, Release, build
from ddtree_ops.remote import Transport, connect
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.pack import LEVEL
from ddtree_ops.remote.pieces import remaining, stream
from ddtree_ops.remote.ship import RECEIVE, ship
from tests.hosts.harness import Lab, TestHost, laboratory
from tests.hosts.test_ship import ROOT, Line, hurt, on_the_wire, whole
from tests.unit.release.test_build import REFERENCE

MB = 1_000_000
SEED = 20261129


class Stopwatch(Line):
    """A connection that notes how long each of the agent's commands took."""

    def __init__(self, host: TestHost, user: str) -> None:
        self.laps: list[tuple[str, float]] = []
        super().__init__(host, user)

    def reconnect(self) -> None:
        super().reconnect()
        run = self.transport.run

        def timed(argv: Any, **more: Any) -> Any:
            began = time.monotonic()
            try:
                return run(argv, **more)
            finally:
                self.laps.append(("upload" if "-c" in argv else "call", time.monotonic() - began))

        self.transport.run = timed  # type: ignore[method-assign]


def say(text: str) -> None:
    print(text, flush=True)


def describe(release: Release) -> str:
    files = release.manifest["files"]
    return f"release {release.id}: {len(files)} files, {sum(file['size'] for file in files) / MB:.0f} MB"


def variant(release: Release, path: str, more: bytes) -> Release:
    """The release with something appended to one file, as a patch would make it."""
    (entry,) = (file for file in release.manifest["files"] if file["path"].endswith(path))
    sha256, size = release.cache.add_blob([release.blob(entry["sha256"]).read_bytes(), more])
    changed = {"sha256": sha256, "size": size}
    files = [{**file, **changed} if file["path"].endswith(path) else file for file in release.manifest["files"]]
    release_id = f"{int(release.id, 16) ^ 1:016x}"
    return Release(release_id, {**release.manifest, "id": release_id, "files": files}, release.cache)


def cycle(lab: Lab) -> None:
    host = lab.host("ship")
    release = build(REFERENCE)
    say(describe(release))
    line = Stopwatch(host, "deploy")

    def timed(what: str, made: Release) -> None:
        line.laps.clear()
        before, began = host.bytes_to, time.monotonic()
        report = ship(line, made)
        took, wire = time.monotonic() - began, host.bytes_to - before
        laps = ", ".join(f"{name} {lap:.1f}" for name, lap in line.laps)
        say(f"{what}: {took:.1f} s ({laps}); {report.bytes_sent} bytes sent, {wire} on the wire with all the rest")

    timed("first, ship and install", release)
    timed("the same again", release)
    timed("after a one-line change", variant(release, "ddtree_ops/engine/tree.py", b"# changed\n"))


def cuts(lab: Lab) -> None:
    host = lab.host("ship")
    release = build(REFERENCE)
    plain, dice = on_the_wire(release), random.Random(SEED)
    say(f"{describe(release)}, {plain} bytes as one stream")
    total = sum({file["sha256"]: file["size"] for file in release.manifest["files"]}.values())
    moments = sorted(dice.uniform(0.02, 0.98) for _ in range(10))
    accidents = [dice.choice(["short", "long", "broken"]) for _ in moments]
    done, stop = [0], threading.Event()

    def trouble() -> None:
        for moment, how in zip(moments, accidents, strict=True):
            while done[0] < moment * total:
                if stop.wait(0.02):
                    return
            hurt(host, how)

    host.shape(MB)
    before, began = host.bytes_to, time.monotonic()
    beside = threading.Thread(target=trouble)
    beside.start()
    report = ship(Line(host, "deploy"), release, lambda now, _: done.__setitem__(0, now), say)
    stop.set()
    beside.join()
    wire = host.bytes_to - before
    say(
        f"1 MB/s, cut {len(moments)} times ({', '.join(accidents)}), {report.cuts} connections lost: "
        f"{time.monotonic() - began:.0f} s; {report.bytes_sent} bytes sent = {report.bytes_sent / plain:.2%}; "
        f"{wire} on the wire with headers = {wire / plain:.2%}; whole on the host: {whole(host, release)}"
    )


def big(directory: Path, gigabytes: int = 2) -> Release:
    """A release of files of 64 MiB, half noise and half text, the same at every time."""
    cache, dice = Cache(directory), random.Random(SEED)
    rows = []
    for n in range(gigabytes * 16):
        noise = dice.randbytes(1 << 20)
        sha256, size = cache.add_blob(noise if k % 2 else bytes([n]) * (1 << 20) for k in range(64))
        rows.append({"path": f"share/big/{n}", "sha256": sha256, "size": size, "mode": 0o644})
    fit = {"python": "3.11", "machine": "x86_64", "glibc": "2.17"}
    manifest = {"format": 2, "id": "b16" + "0" * 13, "arch": "none", "requires": fit, "files": rows, "smoke": []}
    return Release(manifest["id"], manifest, cache)  # type: ignore[arg-type]


CLIENT = """\
import json, resource, sys, time
from pathlib import Path
from ddtree_ops.cli import deploy
from ddtree_ops.deploy import run
from ddtree_ops.host import receiver
from ddtree_ops.release import Cache, Release
from ddtree_ops.remote import Agent, connect
from ddtree_ops.remote.openssh import carrier
from ddtree_ops.remote.ship import ship
from tests.unit.remote.endpoint import Entry

class Link:
    transport = connect(Entry(**json.loads(sys.argv[1])))
    agent = Agent(transport, "/opt/ddtree", "svc", "systemd")
    def beside(self):
        return connect(Entry(**json.loads(sys.argv[1])))
    def carrier(self):
        return carrier(Entry(**json.loads(sys.argv[1])))
    def reconnect(self):
        raise AssertionError("nothing cuts this link")

manifest = json.loads(Path(sys.argv[2], "manifest.json").read_text())
idle, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
report = ship(Link(), Release(manifest["id"], manifest, Cache(Path(sys.argv[2]))))
peak, took = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic() - began
print(f"{report.bytes_total} bytes shipped and installed in {took:.0f} s, {report.bytes_sent} sent; peak memory of the "
      f"client {peak / 1024:.0f} MiB, {idle / 1024:.0f} MiB of it before it began (all of ddtree deploy loaded)")
"""


def memory(lab: Lab) -> None:
    """The client in a process of its own, with all loaded that `ddtree deploy` loads."""
    lab.disk_bytes = 16 << 30
    host = lab.host("memory")
    with tempfile.TemporaryDirectory(prefix="ddtree-big-", dir="/var/tmp") as directory:
        release = big(Path(directory))
        say(describe(release))
        Path(directory, "manifest.json").write_text(json.dumps(release.manifest))
        given = json.dumps(asdict(Line(host, "deploy").entry))
        done = subprocess.run([sys.executable, "-c", CLIENT, given, directory], capture_output=True, text=True)
        say(done.stdout.strip() or done.stderr)


def levels(_: Lab | None = None) -> None:
    release = build(REFERENCE)
    say(describe(release))
    pieces = remaining({file["sha256"]: file["size"] for file in release.manifest["files"]}, [], {})
    total = sum(piece.size for piece in pieces)
    say("level  bytes left        CPU s   and so, in s, at 1 MB/s  10 MB/s  100 MB/s  (the slower of CPU and link)")
    for level in (0, 1, 2, 3, 4, 6):
        compressor = zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
        began, left = time.process_time(), 0
        for piece in pieces:
            with release.blob(piece.sha256).open("rb") as file:
                while chunk := file.read(1 << 18):
                    left += len(compressor.compress(chunk))
        left += len(compressor.flush())
        cpu = time.process_time() - began
        at = "".join(f"{max(cpu, left / rate / MB):9.1f}" for rate in (1, 10, 100))
        chosen = "  <- used" if level == LEVEL else ""
        say(f"{level:5}  {left:11} {left / total:4.0%} {cpu:9.1f} {'':22}{at}{chosen}")


# connections


class Far:
    """A relay in front of a host: what goes in comes out ``delay`` seconds later, in either direction."""

    def __init__(self, host: TestHost, delay: float) -> None:
        self._host, self._delay = host, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._host.address, self._host.port))
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._pump(one, other)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        line: queue.Queue[tuple[float, bytes]] = queue.Queue()

        def take() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 17):
                    line.put((time.monotonic() + self._delay, data))
            line.put((0, b""))

        def give() -> None:
            with contextlib.suppress(OSError):
                while (item := line.get())[1]:
                    time.sleep(max(0, item[0] - time.monotonic()))
                    target.sendall(item[1])
                target.shutdown(socket.SHUT_WR)

        for act in (take, give):
            threading.Thread(target=act, daemon=True).start()

    def close(self) -> None:
        self._listener.close()


def parallel(open_: Callable[[], Transport], release: Release, lots: int) -> float:
    """Seconds to upload the release's blobs over so many connections at once, compression included."""
    pieces = remaining({file["sha256"]: file["size"] for file in release.manifest["files"]}, [], {})
    pieces.sort(key=lambda piece: -piece.size)
    transports = [open_() for _ in range(lots)]
    agent = Agent(transports[0], ROOT, "svc", "systemd")
    source = zlib.compress(receiver().encode())

    def send(n: int) -> None:
        def feed() -> Iterator[bytes]:
            yield source
            yield from stream(pieces[n::lots], release.blob, lambda size: None)

        argv = ["python3", "-I", "-c", RECEIVE, str(len(source)), f"/var/tmp/ddtree-staging-{n}"]
        agent.reply("receive", transports[n].run(argv, stdin=feed(), timeout=600))

    began = time.monotonic()
    with ThreadPoolExecutor(lots) as pool:
        list(pool.map(send, range(lots)))
    took = time.monotonic() - began
    transports[0].run(["sh", "-c", "rm -rf /var/tmp/ddtree-staging-*"])
    for transport in transports:
        transport.close()
    return took


def connections(lab: Lab) -> None:
    host = lab.host("ship")
    with tempfile.TemporaryDirectory(prefix="ddtree-noise-", dir="/var/tmp") as directory:
        cache, dice = Cache(Path(directory)), random.Random(SEED)
        rows = []
        for n in range(24):
            sha256, size = cache.add_blob(dice.randbytes(1 << 20) for _ in range(5))
            rows.append({"path": f"share/{n}", "sha256": sha256, "size": size})
        release = Release("0" * 16, {"id": "0" * 16, "files": rows}, cache)
        say(f"{describe(release)}, does not compress; one way delay 0, then 50 ms by a relay (round trip 100 ms)")
        base = Line(host, "deploy").entry
        for title, rate, delay in (
            ("unlimited", None, 0.0), ("12.5 MB/s", 12_500_000, 0.0),
            ("unlimited, 100 ms", None, 0.05), ("12.5 MB/s, 100 ms", 12_500_000, 0.05),
        ):  # fmt: skip
            host.shape(rate)
            far = Far(host, delay) if delay else None
            entry = replace(base, address="127.0.0.1", port=far.port) if far is not None else base
            took = [parallel(lambda entry=entry: connect(entry), release, lots) for lots in (1, 2, 4)]  # type: ignore[misc]
            speeds = ", ".join(f"{lots}: {24 * 5 * 1.048576 / s:5.1f}" for lots, s in zip((1, 2, 4), took, strict=True))
            say(f"{title:20} MB/s by number of connections: {speeds}")
            if far is not None:
                far.close()


def main() -> None:
    what: dict[str, Callable[[Lab], None]] = {
        "cycle": cycle,
        "cuts": cuts,
        "memory": memory,
        "connections": connections,
    }
    if sys.argv[1:] == ["levels"]:
        levels()
        return
    if len(sys.argv) != 2 or sys.argv[1] not in what:
        raise SystemExit(__doc__)
    with laboratory() as lab:
        what[sys.argv[1]](lab)


if __name__ == "__main__":
    main()
