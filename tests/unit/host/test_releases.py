"""Given blobs and a manifest, a release is installed whole or not at all, and nothing outside it is touched."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.host import source

from .box import Box, Refused

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
PACKAGES = f"venv/lib/python{VERSION}/site-packages"
MODULE = b"answer = 42\n"
WEIGHTS = os.urandom(300_000)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tar_of(blobs: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as archive:
        for name, data in blobs.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def receive(staging: Path, stream: bytes) -> dict[str, Any]:
    """As the client does before anything is installed: the script itself, its arguments, the stream on stdin."""
    script = staging.with_name("ddtree-host")
    script.write_text(source())
    argv = [sys.executable, "-I", str(script), "receive", "--staging", str(staging)]
    done = subprocess.run(argv, input=stream, capture_output=True, check=True)
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def manifest(files: dict[str, bytes], **more: Any) -> dict[str, Any]:
    rows = [{"path": path, "sha256": sha(data), "size": len(data), "mode": 0o644} for path, data in files.items()]
    fit = {"python": VERSION, "machine": os.uname().machine, "glibc": "2.17"}
    base = {"format": 2, "id": "ab" * 8, "files": rows, "requires": fit, "smoke": ["import thing"]}
    return {**base, **more}


def shipped(box: Box, tmp_path: Path, *blobs: bytes) -> None:
    staging = tmp_path / "staging"
    assert receive(staging, tar_of({sha(blob): blob for blob in blobs}))["ok"]
    box.call("ingest", staging=str(staging), hashes=[sha(blob) for blob in blobs])
    assert list(staging.iterdir()) == []


def test_blobs_become_a_release(box: Box, tmp_path: Path) -> None:
    hashes = [sha(MODULE), sha(WEIGHTS)]
    assert box.call("missing", hashes=hashes) == {"missing": hashes}
    shipped(box, tmp_path, MODULE, WEIGHTS)
    assert box.call("missing", hashes=hashes) == {"missing": []}
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE, "share/pair/model.safetensors": WEIGHTS})
    assert box.call("install", manifest=wanted)["already"] is False
    assert box.call("install", manifest=wanted) == {"installed": wanted["id"], "already": True}
    release = box.root / "releases" / wanted["id"]
    assert (release / "share/pair/model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((release / "manifest.json").read_text()) == wanted
    ask = [release / "venv/bin/python", "-I", "-c", "import thing; print(thing.answer, thing.__cached__)"]
    told = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == "42"
    assert Path(told[1]).is_file()
    assert (release / f"{PACKAGES}/thing.py").stat().st_mode & 0o222 == 0
    assert (release / f"{PACKAGES}/thing.py").stat().st_nlink == 1
    assert not any(b".tmp-" in path.read_bytes() for path in release.rglob("*.pyc"))
    asked = ["0" * 16, wanted["id"]]
    assert box.call("probe", releases=asked)["releases_installed"] == [wanted["id"]]
    assert {path.name for path in (box.root / "releases").iterdir()} == {wanted["id"], ".lock"}


@pytest.mark.parametrize(
    "path",
    [
        *("../x", "share/../../x", "/etc/x", "share//x", "share/./x", "share"),
        *("bin/x", "venv/bin/python", "share/a\nb", "share/\x1bx"),
    ],
)
def test_a_manifest_that_leaves_its_release_is_refused(box: Box, tmp_path: Path, path: str) -> None:
    shipped(box, tmp_path, MODULE)
    with pytest.raises(Refused) as refused:
        box.call("install", manifest=manifest({path: MODULE}))
    assert refused.value.kind == "usage"
    assert list((box.root / "releases").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": "../../etc"}, "release"),
        ({"requires": {"python": "3.7"}}, "needs Python 3.7"),
        ({"requires": {"python": VERSION, "machine": "vax"}}, "is for vax"),
        ({"requires": {"python": VERSION, "glibc": "99.0"}}, "needs glibc 99.0"),
        ({"smoke": ["import os; os.system('x')"]}, "smoke"),
        ({"smoke": ["import nothing_like_it"]}, "cannot be imported"),
        ({"format": 1}, "format 1"),
    ],
)
def test_a_release_that_does_not_fit_is_refused(box: Box, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    shipped(box, tmp_path, MODULE)
    with pytest.raises(Refused, match=reason):
        box.call("install", manifest=manifest({f"{PACKAGES}/thing.py": MODULE}, **change))
    assert [path.name for path in (box.root / "releases").iterdir() if path.name != ".lock"] == []


def test_a_damaged_blob_in_the_store_is_found(box: Box, tmp_path: Path) -> None:
    shipped(box, tmp_path, MODULE)
    (box.root / "store" / sha(MODULE)[:2] / sha(MODULE)).write_bytes(MODULE + b"#")
    with pytest.raises(Refused, match="damaged in the store"):
        box.call("install", manifest=manifest({f"{PACKAGES}/thing.py": MODULE}))


def test_a_stream_that_lies_or_ends_early_leaves_no_blob(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    assert "arrived with sha256" in receive(staging, tar_of({sha(MODULE): WEIGHTS}))["error"]["message"]
    assert "tar member" in receive(staging, tar_of({"../evil": MODULE}))["error"]["message"]
    whole = tar_of({sha(MODULE): MODULE, sha(WEIGHTS): WEIGHTS})
    cut = receive(staging, whole[: len(whole) // 2])
    assert "cut or damaged" in cut["error"]["message"]
    assert [path.name for path in staging.iterdir() if not path.name.endswith(".part")] == [sha(MODULE)]
    assert receive(staging, tar_of({sha(WEIGHTS): WEIGHTS}))["received"] == 1
    assert {path.name for path in staging.iterdir()} == {sha(MODULE), sha(WEIGHTS)}
    link = tarfile.TarInfo(sha(b"x"))
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as archive:
        archive.addfile(link)
    assert "not a regular file" in receive(staging, stream.getvalue())["error"]["message"]


def test_ingest_takes_nothing_but_what_it_hashed(box: Box, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir(0o700)
    name = sha(MODULE)

    def refused(reason: str) -> None:
        with pytest.raises(Refused, match=reason):
            box.call("ingest", staging=str(staging), hashes=[name])
        assert box.call("missing", hashes=[name]) == {"missing": [name]}
        assert list((box.root / "store").rglob("*.tmp")) == []

    refused("No such file")
    secret = tmp_path / "secret"
    secret.write_bytes(MODULE)
    (staging / name).symlink_to(secret)
    refused("symbolic")
    (staging / name).unlink()
    os.mkfifo(staging / name)
    refused("not a regular file")
    (staging / name).unlink()
    (staging / name).write_bytes(MODULE + b"#")
    refused("has sha256")
    (tmp_path / "link").symlink_to(staging)
    with pytest.raises(Refused):
        box.call("ingest", staging=str(tmp_path / "link"), hashes=[name])
    with pytest.raises(Refused, match="hash"):
        box.call("ingest", staging=str(staging), hashes=["../../etc/passwd"])
    (staging / name).write_bytes(MODULE)
    assert box.call("staged", staging=str(staging)) == {"complete": [name]}
    assert box.call("ingest", staging=str(staging), hashes=[name]) == {"ingested": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_ingest_refuses_files_of_somebody_else(box: Box, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir(0o700)
    (staging / sha(MODULE)).write_bytes(MODULE)
    os.chown(staging / sha(MODULE), 12345, 12345)
    with pytest.raises(Refused, match="not a regular file of uid 0"):
        box.call("ingest", staging=str(staging), hashes=[sha(MODULE)])
    os.chown(staging, 12345, 12345)
    with pytest.raises(Refused, match="belongs to uid 12345"):
        box.call("ingest", staging=str(staging), hashes=[sha(MODULE)])
