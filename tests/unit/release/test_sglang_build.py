"""Releases of a patched engine, made of small wheels that are named like SGLang's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release import Cache, Release, Target, build
from ddtree_ops.release.lock import Lock, Pin
from ddtree_ops.release.patchset import load_patchset

from .patchwright import F2, HEADER, PATCHES, STOCK, make_patch, write_series
from .wheelwright import lock_of, make_wheel

SITE = "venv/lib/python3.12/site-packages"
SHIP = Target("sglang-1.0", "3.12", "sm_90")
KERNEL = {
    "sgl_kernel/__init__.py": b"",
    "sgl_kernel/sm90/common_ops.abi3.so": b"90",
    "sgl_kernel/sm100/common_ops.abi3.so": b"100",
    "sgl_kernel/flash_ops.abi3.so": b"big",
    "sgl_kernel/types.pyi": b"",
}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(tmp_path / "cache")
    made.wheels.mkdir(parents=True)
    return made


@pytest.fixture
def lock(cache: Cache) -> Lock:
    """sglang, its kernels, torch with a CUDA library, and something that sm_90 never imports."""
    wheels = {
        "sglang": STOCK,
        "sglang_kernel": KERNEL,
        "torch": {"torch/__init__.py": b"", "torch/include/a.h": b"h", "torch/lib/x.a": b"a"},
        "cublas": {"nvidia/cublas.so": b"c"},
        "tilelang": {"tilelang/__init__.py": b""},
    }
    made = lock_of(*(make_wheel(cache.wheels, name, files) for name, files in wheels.items()), python="3.12")
    via = {"sglang_kernel": ("sglang",), "torch": ("sglang",), "cublas": ("torch",), "tilelang": ("sglang",)}
    pins = tuple(Pin(pin.name.replace("_", "-"), pin.version, pin.sha256, via.get(pin.name, ())) for pin in made.pins)
    return replace(made, pins=pins, driver="580", resolve="sglang==1.0")


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    return write_series(tmp_path / "patches")


def paths(release: Release) -> set[str]:
    return {file["path"].removeprefix(f"{SITE}/") for file in release.manifest["files"]}


def content(release: Release, path: str) -> bytes:
    (sha256,) = [file["sha256"] for file in release.manifest["files"] if file["path"] == f"{SITE}/{path}"]
    return release.blob(sha256).read_bytes()


def test_the_patched_wheel_is_shipped_with_the_rest(cache: Cache, lock: Lock, patches: Path) -> None:
    made = build(SHIP, cache=cache, lock=lock, patches=patches)
    patchset = load_patchset(patches)
    info = f"sglang-1.0+ddtree.{patchset.hash8}.dist-info"
    assert content(made, "pkg/f.py") == F2
    assert content(made, "pkg/sub/new.py") == b"value = 5\n"
    assert f"Version: 1.0+ddtree.{patchset.hash8}\n".encode() in content(made, f"{info}/METADATA")
    assert b"pkg/sub/new.py,sha256=" in content(made, f"{info}/RECORD")
    assert {"torch/include/a.h", "torch/lib/x.a", "sgl_kernel/types.pyi", "sgl_kernel/flash_ops.abi3.so"} <= paths(made)
    told = made.manifest
    assert (told["format"], told["base"], told["engine"], told["arch"]) == (2, "sglang-1.0", "sglang", "sm_90")
    assert told["patches"] == patchset.listing
    assert f"sglang==1.0+ddtree.{patchset.hash8}" in told["pins"]
    assert told["requires"]["driver"] == "580"
    assert (told["wheels"], told["index_requirements"]) == ("ship", [])
    assert told["smoke"][:2] == ["import torch", "import triton"]


def test_the_index_gives_all_but_the_patched_wheel(cache: Cache, lock: Lock, patches: Path) -> None:
    made = build(replace(SHIP, wheels="index", provided=("torch==1.0+cu1",)), cache=cache, lock=lock, patches=patches)
    assert {path.partition("/")[0] for path in paths(made)} == {
        "pkg",
        *(p.split("/")[0] for p in paths(made) if "dist-info" in p),
    }
    assert made.manifest["requires"]["provided"] == {"torch": "1.0+cu1"}
    hashes = {pin.name: [pin.sha256] for pin in lock.pins}
    assert made.manifest["index_requirements"] == [
        {"name": name, "version": "1.0", "hashes": hashes[name]} for name in ("sglang-kernel", "tilelang")
    ]


def test_the_index_gives_all_of_a_stock_engine(cache: Cache, lock: Lock, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    made = build(replace(SHIP, wheels="index"), cache=cache, lock=lock, patches=tmp_path / "none")
    assert made.manifest["files"] == made.manifest["patches"] == []
    assert len(made.manifest["index_requirements"]) == 5


def test_slim_leaves_out_and_says_so(cache: Cache, lock: Lock, patches: Path) -> None:
    made = build(replace(SHIP, slim=True), cache=cache, lock=lock, patches=patches)
    there = paths(made)
    assert {"sgl_kernel/sm90/common_ops.abi3.so", "torch/include/a.h"} <= there
    for gone in ("flash_ops", "sm100", ".pyi", "tilelang", "x.a"):
        assert not [path for path in there if gone in path], gone
    record = content(made, "sglang_kernel-1.0.dist-info/RECORD").decode()
    assert "sm90/common_ops" in record
    assert "flash_ops" not in record
    told = {rule["what"]: (rule["files"], rule["bytes"], rule["proven"]) for rule in made.manifest["left_out"]}
    assert told["sgl_kernel/flash_ops*"] == (1, 3, True)
    assert told["tilelang"] == (None, None, True)
    other = build(replace(SHIP, arch="sm_120", slim=True), cache=cache, lock=lock, patches=patches)
    assert {"sgl_kernel/sm100/common_ops.abi3.so", "tilelang/__init__.py"} <= paths(other)
    assert "sgl_kernel/sm90/common_ops.abi3.so" not in paths(other)
    assert not any(rule["proven"] for rule in other.manifest["left_out"] if rule["what"].startswith("sgl_kernel"))


def test_every_choice_and_every_patch_changes_the_id(cache: Cache, lock: Lock, patches: Path, tmp_path: Path) -> None:
    changes = (
        {},
        {"arch": "sm_100"},
        {"slim": True},
        {"wheels": "index"},
        {"provided": ("torch",)},
        {"provided": ("torch==2",)},
    )
    ids = [build(replace(SHIP, **change), cache=cache, lock=lock, patches=patches).id for change in changes]
    fewer = write_series(tmp_path / "fewer", {"0001-first.patch": PATCHES["0001-first.patch"]})
    smoke = write_series(tmp_path / "smoke")
    (smoke / "smoke").write_text("algorithm DDTREE\n")
    said = build(SHIP, cache=cache, lock=lock, patches=smoke)
    ids += [build(SHIP, cache=cache, lock=lock, patches=fewer).id, said.id]
    assert len(set(ids)) == len(ids)
    assert said.manifest["smoke"][-1] == "algorithm DDTREE"


def test_a_one_line_patch_changes_the_patched_files_only(cache: Cache, lock: Lock, patches: Path) -> None:
    before = {
        file["path"]: file["sha256"] for file in build(SHIP, cache=cache, lock=lock, patches=patches).manifest["files"]
    }
    (patches / "0003.patch").write_bytes(make_patch({"pkg/g.py": (b"g = 1\nh = 3\n", b"g = 1\nh = 4\n")}, HEADER))
    (patches / "series").write_text("0001-first.patch\n0002-second.patch\n0003.patch\n")
    after = build(SHIP, cache=cache, lock=lock, patches=patches).manifest["files"]
    new = {Path(file["path"]).name for file in after if file["sha256"] not in before.values()}
    assert new == {"g.py", "METADATA", "RECORD"}


def test_a_patch_that_does_not_fit_leaves_nothing_half_made(cache: Cache, lock: Lock, patches: Path) -> None:
    bad = make_patch({"pkg/g.py": (b"other\n", b"new\n")})
    (patches / "0001-first.patch").write_bytes(bad)
    with pytest.raises(Failed, match=r"^0001-first\.patch: pkg/g\.py: hunk 1: rejected"):
        build(SHIP, cache=cache, lock=lock, patches=patches)
    assert sorted(path.name for path in cache.directory.iterdir()) == ["wheels"]


@pytest.mark.parametrize("name", ["/etc/x", "../x", "pkg/../../x"])
def test_a_patch_that_leads_elsewhere_is_refused(cache: Cache, lock: Lock, patches: Path, name: str) -> None:
    (patches / "0001-first.patch").write_bytes(make_patch({name: (b"a\n", b"b\n")}))
    with pytest.raises(Failed, match=r"0001-first\.patch: line 1 of the diff: .* a path below site-packages"):
        build(SHIP, cache=cache, lock=lock, patches=patches)


def test_the_manifest_is_plain_json(cache: Cache, lock: Lock, patches: Path) -> None:
    made = build(SHIP, cache=cache, lock=lock, patches=patches).manifest
    assert json.loads(json.dumps(made)) == made
