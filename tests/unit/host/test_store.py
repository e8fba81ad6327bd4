"""Given a stream of blobs that may be cut, lie or meet links, the host keeps what is right and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.host import receiver
from ddtree_ops.host.agent import staging as stage
from ddtree_ops.host.agent.base import HostError
from ddtree_ops.remote.pack import LEVEL, Packer

from .box import Box, Refused

SMALL = b"answer = 42\n"
BIG = os.urandom(300_000)
JSON = dict[str, Any]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def frame(data: bytes, offset: int = 0, name: str = "") -> bytes:
    """What the stream has for one blob from ``offset`` on."""
    return f"{name or sha(data)} {offset} {len(data) - offset}\n".encode() + data[offset:]


def wire(data: bytes) -> bytes:
    """As the client sends it."""
    packer = Packer()
    return packer.pack(data, LEVEL) + packer.finish()


def begin(staging: Path) -> subprocess.Popen[bytes]:
    """A receiver as the client starts one before anything is installed: the script itself, the stream on stdin."""
    script = staging.with_name("ddtree-host")
    script.write_text(receiver())
    argv = [sys.executable, "-I", str(script), str(staging)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def receive(staging: Path, stream: bytes) -> JSON:
    done = begin(staging).communicate(stream, timeout=60)[0]
    reply: JSON = json.loads(done)
    return reply


def send(staging: Path, *blobs: bytes) -> JSON:
    return receive(staging, wire(b"".join(map(frame, blobs))))


def contents(staging: Path) -> dict[str, bytes]:
    """What is in staging by name, what is in its packs as if it were files."""
    found = {}
    for path in staging.iterdir():
        data = path.read_bytes()
        if stage.PACK.fullmatch(path.name):
            rows = list(stage.entries_of(os.open(path, os.O_RDONLY)))
            found |= {name: data[at : at + length] for name, at, length in rows}
        else:
            found[path.name] = data
    return found


def listing(staging: Path) -> dict[str, int]:
    return {name: len(data) for name, data in contents(staging).items()}


def test_whole_blobs_get_their_names(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    assert send(staging, SMALL, b"", BIG) == {"ok": True, "received": 3, "wrong": []}
    assert listing(staging) == {sha(SMALL): len(SMALL), sha(b""): 0, sha(BIG): len(BIG)}
    assert (staging / sha(BIG)).read_bytes() == BIG
    assert staging.stat().st_mode & 0o777 == 0o700


def test_receivers_that_start_at_once_share_one_staging(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for n in range(50):
            ready = threading.Barrier(8)

            def one(path: Path, ready: threading.Barrier) -> int:
                ready.wait()
                return stage.own_staging(path, create=True)

            for fd in pool.map(one, [tmp_path / str(n)] * 8, [ready] * 8):
                os.close(fd)


def test_a_cut_blob_goes_on_at_its_byte(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    stream = wire(frame(SMALL) + frame(BIG))
    assert "cut" in receive(staging, stream[: len(stream) // 2])["error"]["message"]
    there = stage.staging_facts(staging)
    assert there["complete"] == [sha(SMALL)]
    held = there["partial"][sha(BIG)]
    assert 100_000 < held < len(BIG)
    assert receive(staging, wire(frame(BIG, held)))["received"] == 1
    assert (staging / sha(BIG)).read_bytes() == BIG


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_any_cuts_end_in_the_same_blobs(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """Cut anywhere, any number of times; each try sends what `staging_facts` leaves to be sent."""
    staging = tmp_path_factory.mktemp("cuts") / "staging"
    blobs = {sha(data): data for data in (b"", b"x", BIG[:777], BIG[:70_000])}
    for cut in [*cuts, None]:
        there = stage.staging_facts(staging)
        left = [
            frame(data, there["partial"].get(key, 0)) for key, data in blobs.items() if key not in there["complete"]
        ]
        stream = wire(b"".join(left))
        read, write = os.pipe()
        with contextlib.suppress(HostError), os.fdopen(read, "rb"):
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
            os.write(write, stream if cut is None else stream[: len(stream) * cut // 1000])
            os.close(write)
            stage.receive(staging, read)
    assert contents(staging) == blobs


def test_what_is_longer_or_other_than_it_should_be_is_sent_anew(tmp_path: Path) -> None:
    """A part that grew, shrank or changed since it was listed: wrong by its hash, and gone."""
    staging = tmp_path / "staging"
    part = staging / f"{sha(BIG)}.part"
    send(staging)
    part.write_bytes(BIG[:200_000])
    assert receive(staging, wire(frame(BIG, 100_000)))["received"] == 1
    (staging / sha(BIG)).unlink()
    for content, offset in ((BIG[:99_999], 100_000), (bytes(100_000), 100_000)):
        part.write_bytes(content)
        assert receive(staging, wire(frame(BIG, offset) + frame(SMALL)))["wrong"] == [sha(BIG)]
        assert listing(staging) == {sha(SMALL): len(SMALL)}


def test_a_lie_is_told_and_the_rest_is_kept(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    stream = wire(frame(BIG, name=sha(b"other")) + frame(SMALL))
    assert receive(staging, stream) == {"ok": True, "received": 1, "wrong": [sha(b"other")]}
    assert listing(staging) == {sha(SMALL): len(SMALL)}


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no segment\nend\n", id="no segment"),
        pytest.param(b"x" * 5000, id="no line"),
        pytest.param(b"stored 9" * 5000, id="a segment without an end of its line"),
        pytest.param(b"stored -5\nend\n", id="less than nothing"),
        pytest.param(b"deflated 9\nnot this.end\n", id="not deflated"),
        pytest.param(wire(frame(SMALL))[:-1], id="cut"),
        pytest.param(wire(frame(SMALL))[:-4], id="no end"),
        pytest.param(wire(b"../../etc/passwd 0 1\nx"), id="a path for a name"),
        pytest.param(wire(f"{sha(b'x')} -1 1\nx".encode()), id="begins before it begins"),
        pytest.param(wire(f"{sha(b'x')} 0 999\nx".encode()), id="less than it says"),
        pytest.param(wire(b"x" * 5000), id="a head without end"),
        pytest.param(wire(f"{sha(b'x')}.part 0 1\nx".encode()), id="the name of a part"),
    ],
)
def test_a_damaged_stream_is_refused(tmp_path: Path, stream: bytes) -> None:
    staging = tmp_path / "staging"
    assert not receive(staging, stream)["ok"]
    assert not {name for name in listing(staging) if not name.endswith(".part")} - {sha(SMALL)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ddtree-host", "staging"]


def test_links_planted_in_staging_lead_nowhere(tmp_path: Path) -> None:
    staging, outside = tmp_path / "staging", tmp_path / "outside"
    staging.mkdir(0o700)
    outside.write_bytes(b"precious")
    for plant in (Path.symlink_to, Path.hardlink_to):
        plant(staging / f"{sha(BIG)}.part", outside)
        assert "wrong" not in send(staging, BIG)
        assert outside.read_bytes() == b"precious"
        (staging / f"{sha(BIG)}.part").unlink()
    os.mkfifo(staging / f"{sha(BIG)}.part")
    assert "wrong" not in send(staging, BIG)
    assert stage.staging_facts(staging) == {"complete": [], "partial": {}}
    (tmp_path / "link").symlink_to(staging)
    assert "not a directory" in receive(tmp_path / "link", wire(b""))["error"]["message"]
    assert stage.staging_facts(tmp_path / "nowhere") == {"complete": [], "partial": {}}


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A receiver in the middle of BIG: half of it came, and the link is silent."""
    receiver = begin(tmp_path / "staging")
    assert receiver.stdin is not None
    stream = wire(frame(BIG))
    receiver.stdin.write(stream[: len(stream) // 2])
    receiver.stdin.flush()
    deadline = time.monotonic() + 10
    while not (tmp_path / f"staging/{sha(BIG)}.part").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    yield receiver
    receiver.kill()
    receiver.communicate()


@pytest.mark.alone
def test_the_receiver_of_a_dead_link_is_waited_for(under_way: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """It ends by itself after a silence, and its bytes count."""
    began = time.monotonic()
    held = stage.staging_facts(tmp_path / "staging")["partial"][sha(BIG)]
    assert stage.IDLE_S - 2 < time.monotonic() - began < stage.IDLE_S + 3
    assert held > 100_000
    assert "no byte came" in json.loads(under_way.communicate()[0])["error"]["message"]


def test_an_upload_that_is_fed_is_not_disturbed(under_way: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert under_way.stdin is not None
    rest = wire(frame(BIG))
    rest = rest[len(rest) // 2 :]
    assert send(tmp_path / "staging", BIG)["error"]["kind"] == "locked"
    told: list[str] = []
    reader = subprocess.Popen(
        [sys.executable, "-c", f"from ddtree_ops.host.agent import staging as stage; from pathlib import Path\n"
         f"try: stage.staging_facts(Path({str(tmp_path / 'staging')!r}))\nexcept stage.HostError as e: print(e.kind)"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    while reader.poll() is None and len(rest) > 1000:
        under_way.stdin.write(rest[:1000])
        under_way.stdin.flush()
        rest = rest[1000:]
        time.sleep(0.08)
    told = reader.communicate()[0].split()
    assert told == ["locked"]
    under_way.stdin.write(rest)
    assert json.loads(under_way.communicate()[0])["received"] == 1


def test_a_write_error_gives_back_what_it_took(tmp_path: Path) -> None:
    """A limit on a file's size stands for a full disk here: the same path, without a file system of its own."""
    script = tmp_path / "ddtree-host"
    script.write_text(receiver())
    limited = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        f"sys.argv = ['ddtree-host', {str(tmp_path / 'staging')!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    stream = wire(frame(SMALL) + frame(BIG))
    done = subprocess.run([sys.executable, "-c", limited], input=stream, capture_output=True, check=True)
    assert "File too large" in json.loads(done.stdout)["error"]["message"]
    assert listing(tmp_path / "staging") == {sha(SMALL): len(SMALL)}


# into the store


def install(box: Box, staging: Path, *blobs: bytes, **more: Any) -> JSON:
    """Blobs as a release of files below share/."""
    rows = [{"path": f"share/{n}", "sha256": sha(data), "size": len(data)} for n, data in enumerate(blobs)]
    fit = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    manifest = {"format": 2, "id": "cd" * 8, "files": rows, "requires": fit, "smoke": []}
    return box.call("install", manifest=manifest, staging=str(staging), **more)


def test_only_what_was_hashed_gets_into_the_store(box: Box, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir(0o700)
    secret = tmp_path / "secret"
    secret.write_bytes(SMALL)
    (staging / sha(SMALL)).symlink_to(secret)
    with pytest.raises(Refused, match="symbolic"):
        install(box, staging, SMALL)
    (staging / sha(SMALL)).unlink()
    os.mkfifo(staging / sha(SMALL))
    with pytest.raises(Refused, match="not a regular file"):
        install(box, staging, SMALL)
    (staging / sha(SMALL)).unlink()
    (tmp_path / "link").symlink_to(staging)
    with pytest.raises(Refused, match="not a directory"):
        install(box, tmp_path / "link", SMALL)
    assert install(box, staging, SMALL) == {"installed": None, "missing": [sha(SMALL)], "wrong": []}
    (staging / sha(SMALL)).write_bytes(SMALL + b"#")
    (staging / sha(BIG)).write_bytes(BIG)
    assert install(box, staging, SMALL, BIG) == {"installed": None, "missing": [], "wrong": [sha(SMALL)]}
    assert list(staging.iterdir()) == []
    assert [path.name for path in (box.root / "store").rglob("*") if path.is_file()] == [sha(BIG)]
    (staging / sha(SMALL)).write_bytes(SMALL)
    assert install(box, staging, SMALL, BIG)["installed"]
    assert (box.root / "store" / sha(BIG)[:2] / sha(BIG)).stat().st_nlink == 1


def packed(staging: Path) -> Path:
    """The one pack of a staging directory."""
    (pack,) = (path for path in staging.iterdir() if stage.PACK.fullmatch(path.name))
    return pack


def test_small_blobs_travel_in_a_pack_and_are_hashed_by_root(box: Box, tmp_path: Path) -> None:
    staging, blobs = tmp_path / "staging", [b"%d" % n for n in range(300)]
    assert send(staging, BIG, *blobs)["received"] == 301
    assert len(list(staging.iterdir())) == 2
    pack = packed(staging)
    data = bytearray(pack.read_bytes())
    data[data.index(b" 3\n299") + 3] = ord("x")  # what the SSH user, or its disk, does to it
    pack.write_bytes(data)
    assert install(box, staging, BIG, *blobs) == {"installed": None, "missing": [], "wrong": [sha(b"299")]}
    assert list(staging.iterdir()) == []
    assert send(staging, b"299", b"of another release")["received"] == 2
    assert install(box, staging, BIG, *blobs)["installed"]
    kept = {path.name: path.read_bytes() for path in (box.root / "store").rglob("*") if path.is_file()}
    assert kept == {sha(blob): blob for blob in (BIG, *blobs)}
    assert contents(staging).keys() == {sha(b"299"), sha(b"of another release")}


def test_what_is_cut_off_or_odd_in_a_pack_was_never_there(box: Box, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    send(staging, SMALL, b"other")
    pack = packed(staging)
    whole = pack.read_bytes()
    odd = f"{sha(BIG)} 999999\n".encode(), b"x" * 100, f"../../etc {'0' * 70} 1\n".encode(), b"\n"
    for data in (whole[:-1], *(whole[: -len(f"{sha(b'other')} 5\nother")] + more for more in odd)):
        pack.write_bytes(data)
        assert stage.staging_facts(staging) == {"complete": [sha(SMALL)], "partial": {}}
        assert install(box, staging, SMALL, b"other")["missing"] == [sha(b"other")]
    pack.write_bytes(whole)
    assert install(box, staging, SMALL, b"other")["installed"]


def test_a_pack_that_is_none_of_the_users_is_refused(box: Box, tmp_path: Path) -> None:
    staging, outside = tmp_path / "staging", tmp_path / "outside"
    staging.mkdir(0o700)
    outside.write_bytes(f"{sha(SMALL)} {len(SMALL)}\n".encode() + SMALL)
    pack = staging / "pack.00000000"
    pack.symlink_to(outside)
    with pytest.raises(Refused, match="symbolic"):
        install(box, staging, SMALL)
    pack.unlink()
    os.mkfifo(pack)
    with pytest.raises(Refused, match="not a regular file"):
        install(box, staging, SMALL)
    assert outside.exists()


def test_a_pack_that_is_being_filled_is_left_alone(box: Box, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    send(staging, SMALL)
    with packed(staging).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert install(box, staging, SMALL)["installed"]
        assert packed(staging).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_files_of_somebody_else_are_refused(box: Box, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir(0o700)
    (staging / sha(SMALL)).write_bytes(SMALL)
    os.chown(staging / sha(SMALL), 12345, 12345)
    with pytest.raises(Refused, match="not a regular file of uid 0"):
        install(box, staging, SMALL)
    os.chown(staging, 12345, 12345)
    with pytest.raises(Refused, match="belongs to uid 12345"):
        install(box, staging, SMALL)


@pytest.mark.parametrize("where", ["store", "store/aa", "store/aa/blob"])
def test_links_planted_in_the_store_are_refused(box: Box, tmp_path: Path, where: str) -> None:
    """Before a byte is sent, and nothing is written where they lead to."""
    staging, outside = tmp_path / "staging", tmp_path / "outside"
    send(staging, SMALL)
    shelf = box.root / "store" / sha(SMALL)[:2]
    outside.mkdir()
    if where == "store":
        (box.root / "store").rmdir()
        (box.root / "store").symlink_to(outside)
    elif where == "store/aa":
        shelf.symlink_to(outside)
    else:
        shelf.mkdir()
        (outside / "file").write_bytes(SMALL)
        (shelf / sha(SMALL)).symlink_to(outside / "file")
    before = listing(outside)
    with pytest.raises(Refused, match=r"not a (plain|directory).* of ours"):
        install(box, staging, SMALL)
    assert listing(outside) == before
    assert [path.name for path in (box.root / "releases").iterdir() if path.name != ".lock"] == []
