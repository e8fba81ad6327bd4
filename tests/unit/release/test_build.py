"""Releases made of small wheels."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ddtree_ops import release
from ddtree_ops.cli import build as cli_build
from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.release import Cache, Release, Target, build, release_id, untried_base
from ddtree_ops.release.build import PACKAGE, RECIPE
from ddtree_ops.release.trim import KEEP, TRIM, left_out_by

from .wheelwright import lock_of, make_package, make_stub, make_wheel

CHECKOUT = Path(__file__).parents[3]
SITE = "venv/lib/python3.11/site-packages"
REFERENCE = Target("reference", "3.11")


def make(directory: Path) -> Release:
    """A release built below ``directory`` from scratch."""
    cache = Cache(directory / "cache")
    stub = make_stub(cache.wheels)
    return build(REFERENCE, cache=cache, package=make_package(directory / "package"), lock=lock_of(stub))


def test_the_manifest_names_every_file_and_nothing_that_is_trimmed(tmp_path: Path) -> None:
    release = make(tmp_path)
    files = {file["path"]: file for file in release.manifest["files"]}
    assert list(files) == sorted(files)
    assert f"{SITE}/torch/bin/torch_shm_manager" in files
    assert f"{SITE}/functorch/__init__.py" in files
    assert files["share/pair/target/config.json"]["size"] == 2
    assert f"{SITE}/ddtree_ops/engine/walk.py" in files
    for absent in ("test_jit", "ATen.h", ".a", "torchrun", ".hidden", ".pyc", ".orig", "run.py"):
        assert not [path for path in files if path.endswith(absent)], absent
    assert {file["mode"] for file in files.values()} == {0o644, 0o755}
    assert files[f"{SITE}/torch/bin/torch_shm_manager"]["mode"] == 0o755
    for file in files.values():
        assert release.blob(file["sha256"]).stat().st_size == file["size"]
    assert release.manifest["total_size"] == sum(file["size"] for file in files.values())
    requires = {"python": "3.11", "machine": "x86_64", "glibc": "2.17", "driver": None, "provided": {}}
    assert release.manifest["requires"] == requires
    record = release.blob(files[f"{SITE}/stub-1.0.dist-info/RECORD"]["sha256"]).read_text()
    recorded = {line.rpartition(",")[0].rpartition(",")[0] for line in record.splitlines()}
    ours = {path for path in files if not path.startswith((f"{SITE}/ddtree_ops/", "share/"))}
    assert {f"{SITE}/{name}" for name in recorded} == ours
    assert release.manifest["pins"] == ["stub==1.0"]
    assert release.manifest["id"] == release.id
    assert "import ddtree_ops.engine.walk" in release.manifest["smoke"]


def test_same_id_and_manifest_in_another_directory_later_under_another_umask(tmp_path: Path) -> None:
    first = make(tmp_path / "one")
    old = os.umask(0o077)
    try:
        second = make(tmp_path / "two" / "deeper")
    finally:
        os.umask(old)
    for path in (tmp_path / "two").rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o755)
    shutil.copytree(tmp_path / "one/cache/wheels", tmp_path / "three/wheels")
    lock = lock_of(*(tmp_path / "three/wheels").iterdir())
    third = build(REFERENCE, cache=Cache(tmp_path / "three"), package=tmp_path / "two/deeper/package", lock=lock)
    assert first.manifest == second.manifest == third.manifest


def test_a_program_of_a_wheel_is_in_the_venv(tmp_path: Path) -> None:
    """As pip would have put it and recorded it."""
    cache = Cache(tmp_path / "cache")
    stub = make_stub(cache.wheels)
    ninja = make_wheel(cache.wheels, "ninja", {"ninja-1.0.data/scripts/ninja": b"\x7fELF"})
    package = make_package(tmp_path / "package")
    release = build(REFERENCE, cache=cache, package=package, lock=lock_of(stub, ninja))
    files = {file["path"]: file for file in release.manifest["files"]}
    assert files["venv/bin/ninja"]["mode"] == 0o755
    record = release.blob(files[f"{SITE}/ninja-1.0.dist-info/RECORD"]["sha256"]).read_text()
    assert "../../../bin/ninja,sha256=" in record


def test_the_recipe_is_pinned(tmp_path: Path) -> None:
    """When this fails because files or trimming changed, raise RECIPE: an id must never stand for two contents."""
    content = repr([(file["path"], file["sha256"], file["mode"]) for file in make(tmp_path).manifest["files"]])
    assert (RECIPE, hashlib.sha256(content.encode()).hexdigest()[:16]) == (3, "59ad24b92be8578a")


@pytest.mark.parametrize("change", ["engine", "version", "pair", "wheel", "arch"])
def test_any_change_of_what_goes_in_changes_the_id(tmp_path: Path, change: str) -> None:
    before = make(tmp_path)
    package, cache, arch = tmp_path / "package", Cache(tmp_path / "cache"), "none"
    lock = lock_of(make_stub(cache.wheels))
    match change:
        case "engine":
            (package / "engine/walk.py").write_bytes(b"STEPS = 4\n")
        case "version":
            (package / "__init__.py").write_bytes(b"__version__ = '2'\n")
        case "pair":
            (package / "engine/pair/target/more.json").write_bytes(b"{}")
        case "wheel":
            lock = lock_of(make_wheel(cache.wheels, "stub", {"torch/__init__.py": b"# other\n"}))
        case "arch":
            arch = "sm_120"
    assert build(Target("reference", "3.11", arch), cache=cache, package=package, lock=lock).id != before.id


@pytest.mark.alone
def test_what_was_built_is_answered_from_the_cache(tmp_path: Path) -> None:
    release = make(tmp_path)
    lock = lock_of(*Cache(tmp_path / "cache").wheels.iterdir())
    shutil.rmtree(tmp_path / "cache/wheels")
    calls: list[str] = []
    again = build(
        REFERENCE,
        cache=Cache(tmp_path / "cache"),
        package=tmp_path / "package",
        lock=lock,
        progress=lambda what, done, total: calls.append(what),
    )
    assert again.manifest == release.manifest
    assert not calls


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_cache_with_a_damaged_blob_builds_it_again(tmp_path: Path, damage: str) -> None:
    release = make(tmp_path)
    victim = release.blob(next(f["sha256"] for f in release.manifest["files"] if f["path"].endswith("_C.py")))
    victim.write_bytes(b"") if damage == "short" else victim.unlink()
    make(tmp_path)
    assert victim.read_bytes() == b"value = 7\n"


def test_a_cache_that_cannot_be_written_is_a_failure_that_says_where(tmp_path: Path) -> None:
    stub = make_stub(tmp_path / "index")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Failed, match=r"cannot build below .*/file/cache: Not a directory"):
        cache = Cache(tmp_path / "file/cache")
        build(REFERENCE, cache=cache, package=make_package(tmp_path / "package"), lock=lock_of(stub))


def test_a_full_disk_is_a_failure_and_leaves_no_file_behind(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    big = make_wheel_of_noise(cache.wheels)
    program = (
        "import resource, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from ddtree_ops.release import *; from tests.unit.release.wheelwright import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "lock = lock_of(Path(sys.argv[2]))\n"
        "build(Target('reference', '3.11'), cache=Cache(Path(sys.argv[1])), lock=lock, package=Path(sys.argv[4]))\n"
    )
    package = make_package(tmp_path / "package")
    command = [sys.executable, "-c", program, str(cache.directory), str(big), str(CHECKOUT), str(package)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.search(r"Failed: cannot build below .*/cache: File too large", done.stderr), done.stderr
    assert not list(cache.directory.glob("tmp-*"))
    assert not (cache.directory / "releases").exists()


def make_wheel_of_noise(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return make_wheel(directory, "noise", {"noise/x": os.urandom(300_000)})


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    cache = Cache(tmp_path / "cache")
    stub = make_stub(cache.wheels)
    build(
        REFERENCE,
        cache=cache,
        package=make_package(tmp_path / "p"),
        lock=lock_of(stub),
        progress=lambda what, done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def test_two_wheels_that_fight_over_a_file_are_refused(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.wheels.mkdir(parents=True)
    one = make_wheel(cache.wheels, "one", {"shared.py": b"1"})
    two = make_wheel(cache.wheels, "two", {"shared.py": b"2"})
    with pytest.raises(Failed, match=r"different files at .*shared\.py"):
        build(REFERENCE, cache=cache, package=make_package(tmp_path / "p"), lock=lock_of(one, two))


def test_an_engine_without_a_lock_and_an_installation_without_an_engine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no lock file"):
        build(Target("unheard-of", "3.11"), cache=Cache(tmp_path))
    with pytest.raises(Failed, match="no reference engine"):
        build(REFERENCE, cache=Cache(tmp_path), package=tmp_path, lock=lock_of())


def test_every_trim_rule_has_a_reason_and_the_exception_holds() -> None:
    rules = TRIM["reference"]
    assert all(rule.why for rules in TRIM.values() for rule in (*rules, *KEEP))
    assert left_out_by("torch/bin/test_jit", rules) is not None
    for kept in ("bin/torch_shm_manager", "lib/libtorch_cpu.so", "testing/_internal/logging_tensor.py"):
        assert left_out_by(f"torch/{kept}", rules) is None


def test_the_locks_are_packaged() -> None:
    assert (PACKAGE / "release/locks/reference-cp311.txt").is_file()


def test_a_base_that_has_not_served_is_told_of_and_not_slimmed() -> None:
    """What --slim leaves out is what the proven base served without: a later one compiles more while it runs."""
    assert "No GPU has run it" in str(untried_base("sglang-0.5.23")) and untried_base("sglang-0.5.17") is None
    newest = Target("sglang-0.5.23", "3.12", "sm_90", slim=True)
    with pytest.raises(UsageError, match=r"which sglang-0\.5\.23 has not: No GPU has run it"):
        release_id(newest)
    assert release_id(dataclasses.replace(newest, slim=False)) and release_id(
        dataclasses.replace(newest, base="sglang-0.5.17")
    )


def test_building_it_warns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Failed("here")

    monkeypatch.setattr(release, "build", stop)
    for base, words in (("sglang-0.5.23", "! sglang-0.5.23: No GPU has run it"), ("sglang-0.5.17", "")):
        monkeypatch.setattr(cli_build, "_base", lambda _, base=base: base)
        with pytest.raises(typer.Exit):
            cli_build.build("sglang", "sm_120")
        said = capsys.readouterr().err
        assert words in said and ("No GPU" in said) == bool(words)
