"""Wheels that are sound, and wheels that are not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release.cache import Cache
from ddtree_ops.release.fetch import fetch, target_options
from ddtree_ops.release.lock import Lock, Pin
from ddtree_ops.release.wheels import PROGRAMS, installed, members, unpack

from .wheelwright import LINK, PROGRAM, lock_of, make_wheel


def test_members_are_what_belongs_into_site_packages(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        "pkg",
        {
            "pkg/a.py": b"1",
            "pkg/tool": b"2",
            "pkg-1.0.data/purelib/pure.py": b"3",
            "pkg-1.0.data/platlib/plat/x.so": b"4",
            "pkg-1.0.data/scripts/run": b"5",
            "pkg-1.0.data/headers/h.h": b"6",
            "pkg-1.0.data/data/share/x": b"7",
        },
        modes={"pkg/tool": PROGRAM},
    )
    found = {member.path: member for member in members(wheel)}
    assert sorted(found) == [
        "pkg-1.0.dist-info/METADATA",
        "pkg-1.0.dist-info/WHEEL",
        "pkg/a.py",
        "pkg/tool",
        "plat/x.so",
        "pure.py",
    ]
    assert [name for name, member in found.items() if member.executable] == ["pkg/tool"]


def test_programs_are_what_belongs_into_bin_but_no_scripts(tmp_path: Path) -> None:
    """Whatever their mode says: zip files made on other systems have none."""
    files = {"scripts/ninja": b"\x7fELF", "scripts/cli": b"#!python\n", "scripts/deep/er": b"\x7fELF", "data/x": b"x"}
    wheel = make_wheel(tmp_path, "pkg", {f"pkg-1.0.data/{name}": content for name, content in files.items()})
    found = [member for member in installed(wheel) if member not in members(wheel)]
    assert [member.path for member in found] == [f"{PROGRAMS}ninja"]
    assert found[0].executable


def test_a_program_that_record_does_not_have_is_refused(tmp_path: Path) -> None:
    name = "pkg-1.0.data/scripts/ninja"
    wheel = make_wheel(tmp_path, "pkg", {name: b"1"}, record={name: b"2"})
    with pytest.raises(Failed):
        list(unpack(installed(wheel), Cache(tmp_path / "cache")))


def test_content_comes_out_as_recorded(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    cache = Cache(tmp_path / "cache")
    wheel = make_wheel(tmp_path, "pkg", {"pkg/a": content, "pkg/empty": b""})
    for member in unpack(members(wheel), cache):
        assert cache.blob(member.sha256).stat().st_size == member.size
    assert {m.path: cache.blob(m.sha256).read_bytes() for m in members(wheel)}["pkg/a"] == content
    assert not list(cache.directory.glob("tmp-*"))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a\\..\\x",
        "C:x",
        "a//b",
        "./a",
        "a/./b",
        "new\nline",
        "pkg-1.0.data/purelib/../x",
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Failed, match="refused the name"):
        members(make_wheel(tmp_path, "pkg", {name: b"x"}))


def test_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="no regular file"):
        members(make_wheel(tmp_path, "pkg", {"pkg/l": b"/etc/passwd"}, modes={"pkg/l": LINK}))


def test_a_content_that_is_not_what_record_says_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "pkg", {"pkg/a.py": b"evil"}, record={"pkg/a.py": b"good"})
    with pytest.raises(Failed, match=r"'pkg/a\.py' does not match its hash in RECORD"):
        list(unpack(members(wheel), Cache(tmp_path / "cache")))


def test_a_size_that_is_not_what_record_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="RECORD says 9"):
        members(make_wheel(tmp_path, "pkg", {"pkg/a.py": b"evil"}, record={"pkg/a.py": b"different"}))


def test_a_file_without_a_hash_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "pkg", {"pkg/a.py": b"x"})
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("pkg/added.py", b"x")
    with pytest.raises(Failed, match=r"'pkg/added\.py' is not in RECORD"):
        members(wheel)


def test_two_records_and_no_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="2 RECORD"):
        members(make_wheel(tmp_path, "pkg", {}, record_twice=True))
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"not a zip")
    with pytest.raises(Failed, match="not a zip file"):
        members(broken)


def test_damaged_compressed_data_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "pkg", {"pkg/a.py": b"some text that deflates " * 100})
    data = bytearray(wheel.read_bytes())
    data[60:64] = b"\xff\xff\xff\xff"
    wheel.write_bytes(data)
    with pytest.raises(Failed):
        list(unpack(members(wheel), Cache(tmp_path / "cache")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only source of wheels."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return directory


def test_wheels_are_fetched_by_pip_once(folder: Path, tmp_path: Path) -> None:
    cache, lock = Cache(tmp_path / "cache"), lock_of(make_wheel(folder, "some_pkg", {"a.py": b"1"}))
    (wheel,) = fetch(lock, cache)
    assert wheel.parent == cache.wheels
    for file in folder.iterdir():
        file.unlink()
    assert fetch(lock, cache) == [wheel]
    # Damaged in the cache: it is not used, and pip no longer has it.
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(Failed, match="pip cannot get"):
        fetch(lock, cache)


def test_a_wheel_with_another_hash_is_refused(folder: Path, tmp_path: Path) -> None:
    make_wheel(folder, "pkg", {"a.py": b"1"})
    lock = Lock("3.11", "x86_64", "2.28", None, (Pin("pkg", "1.0", "0" * 64),), "")
    with pytest.raises(Failed, match="DO NOT MATCH THE HASHES"):
        fetch(lock, Cache(tmp_path / "cache"))


def test_the_clients_own_python_does_not_matter() -> None:
    lock = Lock("3.13", "aarch64", "2.28", None, (), "")
    shown = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "debug",
            "--verbose",
            *(o for o in target_options(lock) if "only-binary" not in o),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for tag in ("cp313-cp313-manylinux_2_28_aarch64", "cp39-abi3-manylinux_2_17_aarch64", "py3-none-any"):
        assert f"  {tag}\n" in shown
    assert "x86_64" not in shown.partition("Compatible tags")[2]
