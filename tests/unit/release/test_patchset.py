"""A series and an overlay over the files of a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release.patchset import Patch, PatchSet, load_patchset

from .patchwright import F1, F2, G2, HEADER, OVERLAY, PATCHES, STOCK, make_patch, write_series


def test_overlay_then_series(tmp_path: Path) -> None:
    made = load_patchset(write_series(tmp_path))
    assert made.apply(STOCK.get) == {**OVERLAY, "pkg/f.py": F2, "pkg/g.py": G2}
    assert [entry["name"] for entry in made.listing] == ["overlay/pkg/sub/new.py", *PATCHES]
    assert not [fault for patch in made.patches for fault in patch.faults]


def test_no_directory_and_an_empty_series_are_the_stock_engine(tmp_path: Path) -> None:
    assert not load_patchset(tmp_path / "absent")
    (tmp_path / "series").write_text("# nothing yet\n")
    assert not load_patchset(tmp_path)


def test_the_hash_knows_content_names_and_order(tmp_path: Path) -> None:
    one, two = (Patch(name, data) for name, data in PATCHES.items())
    sets = [
        PatchSet((one, two), OVERLAY),
        PatchSet((two, one), OVERLAY),
        PatchSet((one, two), {}),
        PatchSet((one, two), {"pkg/sub/new.py": b""}),
        PatchSet((one, Patch("0003-second.patch", two.data)), OVERLAY),
        PatchSet((one, Patch(two.name, two.data + b"\n")), OVERLAY),
    ]
    assert len({made.hash8 for made in sets}) == len(sets)
    assert load_patchset(write_series(tmp_path)).hash8 == sets[0].hash8


def test_what_does_not_fit_names_patch_file_and_hunk() -> None:
    later = Patch("0002-second.patch", PATCHES["0002-second.patch"])
    with pytest.raises(Failed, match=r"^0002-second\.patch: pkg/f\.py: hunk 1: rejected: line 12 "):
        PatchSet((later,)).apply({**STOCK, "pkg/f.py": F1.replace(b"f12", b"f_12")}.get)
    with pytest.raises(Failed, match=r"^0002-second\.patch: pkg/f\.py: the wheel has no such file"):
        PatchSet((later,)).apply({}.get)


def test_an_overlay_over_a_stock_file_and_a_patch_over_the_overlay_are_refused() -> None:
    with pytest.raises(Failed, match=r"overlay/pkg/g\.py: the wheel has this file"):
        PatchSet((), {"pkg/g.py": b"x"}).apply(STOCK.get)
    patch = Patch("1.patch", make_patch({"pkg/sub/new.py": (b"value = 5\n", b"value = 6\n")}))
    with pytest.raises(Failed, match=r"1\.patch: pkg/sub/new\.py is a file of the overlay"):
        PatchSet((patch,), OVERLAY).apply(STOCK.get)


@pytest.mark.parametrize(
    ("header", "faults"),
    [
        (HEADER, []),
        (HEADER.replace("What: it does now\n", "What:\n  it does now,\n  over lines\n"), []),
        (HEADER.replace("Upstream: none\n", ""), ["lacks 'Upstream:'"]),
        (HEADER.replace("Tests: tests/unit/release\n", "Tests:\n"), ["'Tests:' says nothing"]),
        (HEADER + "Why: again\n", ["has 'Why:' twice"]),
        ("", [f"lacks '{field}:'" for field in ("Why", "What", "Tests", "Upstream")]),
        (" Why: x\nwhat: y\n", [f"lacks '{field}:'" for field in ("Why", "What", "Tests", "Upstream")]),
    ],
)
def test_a_header_says_four_things(header: str, faults: list[str]) -> None:
    patch = Patch("x.patch", make_patch({"pkg/g.py": (b"a\n", b"b\n")}, header))
    assert len(patch.faults) == len(faults)
    for fault, end in zip(patch.faults, faults, strict=True):
        assert fault.startswith("x.patch: ")
        assert fault.endswith(end)


@pytest.mark.parametrize(
    ("series", "complaint"),
    [
        ("../x.patch\n", "line 1: '../x.patch' is no NAME"),
        ("/etc/x.patch\n", "no NAME"),
        ("0001-first.patch\n0001-first.patch\n", "line 2: '0001-first.patch' is there twice"),
        ("0001-first.patch\n", "does not name 0002-second.patch"),
        ("0001-first.patch\n0002-second.patch\n0003-x.patch # soon\n", "there is no such file"),
        ("0001-first.patch -p0\n", "no NAME"),
    ],
)
def test_a_series_names_what_is_there(tmp_path: Path, series: str, complaint: str) -> None:
    write_series(tmp_path)
    (tmp_path / "series").write_text(series)
    with pytest.raises(Failed, match=complaint):
        load_patchset(tmp_path)


def test_links_are_refused_and_caches_are_no_part_of_it(tmp_path: Path) -> None:
    write_series(tmp_path)
    cache = tmp_path / "overlay/pkg/__pycache__/new.cpython-311.pyc"
    cache.parent.mkdir()
    cache.write_bytes(b"x")
    (tmp_path / "overlay/.hidden").write_bytes(b"x")
    assert load_patchset(tmp_path).overlay == OVERLAY
    for link, target in (("overlay/pkg/l.py", "/etc/passwd"), ("overlay/up", "/"), ("0003-l.patch", "/etc/passwd")):
        (tmp_path / link).symlink_to(target)
        with pytest.raises(Failed, match=r"link|does not name"):
            load_patchset(tmp_path)
        (tmp_path / link).unlink()


def test_an_overlay_of_another_base_is_taken_but_for_files_of_its_own(tmp_path: Path) -> None:
    write_series(tmp_path / "old")
    new = tmp_path / "new"
    (new / "overlay/pkg").mkdir(parents=True)
    (new / "overlay-of").write_text("old\n")
    assert load_patchset(new).overlay == OVERLAY
    (new / "overlay/pkg/more.py").write_bytes(b"x = 1\n")
    assert load_patchset(new).overlay == {**OVERLAY, "pkg/more.py": b"x = 1\n"}
    (path,) = OVERLAY
    (new / "overlay" / path).parent.mkdir(exist_ok=True)
    (new / "overlay" / path).write_bytes(b"mine = 1\n")
    assert load_patchset(new).overlay[path] == b"mine = 1\n"
    assert load_patchset(tmp_path / "old").overlay == OVERLAY


@pytest.mark.parametrize("name", ["absent", "../old", "new", ""])
def test_an_overlay_of_nobody_is_refused(name: str, tmp_path: Path) -> None:
    write_series(tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "overlay-of").write_text(name)
    with pytest.raises(Failed, match="there is no overlay of"):
        load_patchset(tmp_path / "new")


def test_smoke_lines_are_of_three_kinds(tmp_path: Path) -> None:
    write_series(tmp_path)
    (tmp_path / "smoke").write_text("# tried on the host\nimport pkg.sub.new\nalgorithm DDTREE\nflag --x-y\n")
    assert load_patchset(tmp_path).smoke == ("import pkg.sub.new", "algorithm DDTREE", "flag --x-y")
    (tmp_path / "smoke").write_text("import os; os.unlink('x')\n")
    with pytest.raises(Failed, match="none of"):
        load_patchset(tmp_path)
