"""Given blobs and a manifest, a release is installed whole or not at all, and nothing outside it is touched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from .box import Box, Refused

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
PACKAGES = f"venv/lib/python{VERSION}/site-packages"
MODULE = b"answer = 42\n"
WEIGHTS = os.urandom(300_000)
PROGRAM = b"#!/bin/sh\necho works\n"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(files: dict[str, bytes], **more: Any) -> dict[str, Any]:
    rows = [{"path": path, "sha256": sha(data), "size": len(data), "mode": 0o644} for path, data in files.items()]
    fit = {"python": VERSION, "machine": os.uname().machine, "glibc": "2.17"}
    base = {"format": 2, "id": "ab" * 8, "files": rows, "requires": fit, "smoke": ["import thing"]}
    return {**base, **more}


def install(box: Box, tmp_path: Path, wanted: dict[str, Any], *blobs: bytes) -> dict[str, Any]:
    """``install`` with these blobs in staging."""
    staging = tmp_path / "staging"
    staging.mkdir(0o700, exist_ok=True)
    for blob in blobs:
        (staging / sha(blob)).write_bytes(blob)
    return box.call("install", manifest=wanted, staging=str(staging))


def nothing_left(box: Box) -> bool:
    return [path.name for path in (box.root / "releases").iterdir() if path.name != ".lock"] == []


def test_blobs_become_a_release(box: Box, tmp_path: Path) -> None:
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE, "share/pair/model.safetensors": WEIGHTS})
    offer = box.call("missing", manifest=wanted, staging=None)
    assert (offer["installed"], sorted(offer["missing"])) == (False, sorted([sha(MODULE), sha(WEIGHTS)]))
    assert install(box, tmp_path, wanted, MODULE, WEIGHTS)["already"] is False
    assert list((tmp_path / "staging").iterdir()) == []
    assert install(box, tmp_path, wanted) == {"installed": wanted["id"], "already": True, "warnings": []}
    assert box.call("missing", manifest=wanted)["installed"]
    release = box.root / "releases" / wanted["id"]
    assert (release / "share/pair/model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((release / "manifest.json").read_text()) == wanted
    ask = [release / "venv/bin/python", "-I", "-c", "import thing; print(thing.answer, thing.__cached__)"]
    told = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == "42"
    assert Path(told[1]).is_file()
    assert not [path for path in release.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o222]
    assert (release / f"{PACKAGES}/thing.py").stat().st_nlink == 1
    assert not any(b".tmp-" in path.read_bytes() for path in release.rglob("*") if path.is_file())
    asked = ["0" * 16, wanted["id"]]
    assert box.call("probe", releases=asked)["releases_installed"] == [wanted["id"]]
    assert {path.name for path in (box.root / "releases").iterdir()} == {wanted["id"], ".lock"}


def test_a_program_of_a_wheel_runs_out_of_the_venv(box: Box, tmp_path: Path) -> None:
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE, "venv/bin/tool": PROGRAM})
    wanted["files"][1]["mode"] = 0o755
    install(box, tmp_path, wanted, MODULE, PROGRAM)
    tool = box.root / "releases" / wanted["id"] / "venv/bin/tool"
    assert subprocess.run([tool], capture_output=True, text=True, check=True).stdout == "works\n"


def test_installed_json_says_what_the_release_stands_on(box: Box, tmp_path: Path) -> None:
    """Installed again it is the same tree, and another with another byte; the order is counted, not timed."""
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE})
    home = box.root / "releases" / wanted["id"]
    told = []
    for module in (MODULE, MODULE, MODULE + b"#"):
        install(box, tmp_path, manifest({f"{PACKAGES}/thing.py": module}), module)
        told.append(json.loads((home / "installed.json").read_text()))
        home.rename(tmp_path / f"gone{len(told)}")
    assert told[0]["tree"] == told[1]["tree"] != told[2]["tree"]
    assert told[0]["interpreter"]["path"] == os.path.realpath(sys.executable)
    assert told[0]["interpreter"]["sha256"] == sha(Path(os.path.realpath(sys.executable)).read_bytes())
    assert told[0]["bytes"] > len(MODULE)
    for n, release in enumerate(("cd" * 8, "ef" * 8), 1):
        install(box, tmp_path, {**wanted, "id": release})
        assert json.loads((box.root / "releases" / release / "installed.json").read_text())["seq"] == n


@pytest.mark.parametrize(
    "path",
    [
        *("../x", "share/../../x", "/etc/x", "share//x", "share/./x", "share"),
        *("bin/x", "venv/bin/python", "share/a\nb", "share/\x1bx"),
        *("venv/bin/python3.99", "venv/bin/pip", "venv/bin/Activate.ps1", "venv/bin/.x", "venv/bin/a/b", "venv/bin"),
    ],
)
def test_a_manifest_that_leaves_its_release_is_refused(box: Box, tmp_path: Path, path: str) -> None:
    for verb in ("missing", "install"):
        with pytest.raises(Refused) as refused:
            box.call(verb, manifest=manifest({path: MODULE}), staging=str(tmp_path / "staging"))
        assert refused.value.kind == "usage"
    assert nothing_left(box)


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
        ({"smoke": ["flag --x'); import os; ('"]}, "smoke"),
        ({"format": 3}, "format 3"),
        ({"wheels": "pip"}, "wheels"),
        ({"index_requirements": [{"name": "x", "version": "1", "hashes": ["0" * 64]}]}, "wheels: 'ship' with 1"),
        ({"requires": {"python": VERSION, "driver": "9999.1"}}, "needs NVIDIA driver 9999.1 or later, this host has"),
        ({"requires": {"python": VERSION, "provided": {"no-such-thing": "1.0"}}}, "no-such-thing 1.0, .* has none"),
    ],
)
def test_a_release_that_does_not_fit_is_refused(box: Box, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    wanted = manifest({"share/x": MODULE}, **change)
    with pytest.raises(Refused, match=reason):
        install(box, tmp_path, wanted, MODULE)
    assert nothing_left(box)
    if "cannot be imported" not in reason:  # all else is known before a byte is sent
        with pytest.raises(Refused, match=reason):
            box.call("missing", manifest=wanted)


def test_a_damaged_blob_in_the_store_is_found(box: Box, tmp_path: Path) -> None:
    """By its length before anything is sent, by its hash before any of it is run."""
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE})
    install(box, tmp_path, {**wanted, "id": "cd" * 8}, MODULE)
    blob = box.root / "store" / sha(MODULE)[:2] / sha(MODULE)
    blob.write_bytes(MODULE + b"#")
    with pytest.raises(Refused, match="damaged in the store"):
        box.call("missing", manifest=wanted)
    blob.write_bytes(MODULE[:-3] + b"43\n")
    with pytest.raises(Refused, match="damaged in the store"):
        install(box, tmp_path, wanted)
    assert {path.name for path in (box.root / "releases").iterdir()} == {"cd" * 8, ".lock"}


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "numpy", "version": "2.0", "hashes": []},
        {"name": "--index-url=x", "version": "2.0", "hashes": ["0" * 64]},
        {"name": "numpy", "version": "2.0 ; -e .", "hashes": ["0" * 64]},
        {"name": "numpy", "version": "2.0", "hashes": ["md5"]},
        "numpy @ https://x",
    ],
)
def test_a_requirement_is_a_name_a_version_and_hashes(box: Box, entry: Any) -> None:
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE}, wheels="index", index_requirements=[entry])
    with pytest.raises(Refused) as refused:
        box.call("missing", manifest=wanted)
    assert refused.value.kind == "usage"


def test_a_release_that_is_not_whole_is_none(box: Box, tmp_path: Path) -> None:
    """What a kill left (temporary, or under its own name without the marker) neither counts nor stays unseen."""
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE})
    home = box.root / "releases" / wanted["id"]
    (home.parent / f"{wanted['id']}.tmp-0123").mkdir(mode=0o500)
    (home / "venv").mkdir(parents=True)
    assert box.call("probe", releases=[wanted["id"]])["releases_installed"] == []
    with pytest.raises(Refused, match="is no installed release; remove it"):
        install(box, tmp_path, wanted, MODULE)
    (home / "venv").rmdir()
    home.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/installed.json").write_text("{}")
    home.symlink_to(tmp_path / "elsewhere")
    assert box.call("probe", releases=[wanted["id"]])["releases_installed"] == []
    with pytest.raises(Refused, match="is no installed release; remove it"):
        install(box, tmp_path, wanted, MODULE)
    home.unlink()
    assert install(box, tmp_path, wanted, MODULE)["installed"]
    assert {path.name for path in home.parent.iterdir()} == {wanted["id"], ".lock"}


def test_no_room_is_told_before_anything_is_sent(box: Box) -> None:
    huge = manifest({"share/x": MODULE})
    huge["files"][0]["size"] = 1 << 49
    with pytest.raises(Refused, match=r"needs \d+ MiB, \d+ MiB are free at") as refused:
        box.call("missing", manifest=huge, staging="/var/tmp/ddtree-staging-nobody")
    assert refused.value.kind == "disk-full"


def test_what_the_host_provides_comes_after_the_releases_own(box: Box, tmp_path: Path) -> None:
    """By a .pth with the interpreter's directories; installed.json says which."""
    provided = {"msgspec": metadata.version("msgspec")}
    wanted = manifest({f"{PACKAGES}/thing.py": MODULE, f"{PACKAGES}/yaml.py": b"own = True\n"})
    wanted["requires"]["provided"] = provided
    wanted["smoke"] = ["import thing", "import msgspec"]
    assert install(box, tmp_path, wanted, MODULE, b"own = True\n")["installed"]
    home = box.root / "releases" / wanted["id"]
    told = json.loads((home / "installed.json").read_text())
    assert told["provided"] == provided
    assert str(Path(metadata.distribution("msgspec").locate_file(""))) in told["directories"]
    ask = [home / "venv/bin/python", "-I", "-c", "import yaml, msgspec; print(yaml.own)"]
    assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.parametrize(
    ("line", "fails"),
    [
        ("algorithm DDTREE", None),
        ("algorithm DFLASH", "Unknown speculative algorithm name: DFLASH"),
        ("flag --speculative-ddtree-budget", None),
        ("flag --speculative-ddtree", "does not know the flag --speculative-ddtree"),
    ],
)
def test_a_patched_sglang_proves_its_algorithm_and_flags(
    box: Box, tmp_path: Path, line: str, fails: str | None
) -> None:
    """As SGLang 0.5.17 has them: spec_info.SpeculativeAlgorithm.from_string, ServerArgs.add_cli_args."""
    spec = b"""\
class SpeculativeAlgorithm:
    @classmethod
    def from_string(cls, name):
        if name != "DDTREE":
            raise ValueError(f"Unknown speculative algorithm name: {name}")
"""
    args = b"""\
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-ddtree-budget", type=int)
"""
    srt = f"{PACKAGES}/sglang/srt"
    files = {f"{srt}/speculative/spec_info.py": spec, f"{srt}/server_args.py": args}
    wanted = manifest(files, smoke=[line])
    if fails is None:
        assert install(box, tmp_path, wanted, spec, args)["installed"]
        return
    with pytest.raises(Refused, match=fails):
        install(box, tmp_path, wanted, spec, args)
    assert nothing_left(box)
