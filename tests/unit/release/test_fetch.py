"""Fetching, from an index that breaks connections, has the wrong thing, or has it late. pip is the real one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release.cache import Cache
from ddtree_ops.release.fetch import fetch
from ddtree_ops.release.lock import Lock

from .index import Index
from .wheelwright import lock_of, make_wheel

PIP = tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2])
CHECKOUT = Path(__file__).parents[3]
NOISE = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(60_000))  # 1.9 MB that do not deflate


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
