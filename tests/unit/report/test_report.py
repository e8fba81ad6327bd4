"""Given a stored run, its report is the same bytes anywhere, and says what the figures bear and no more."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ddtree_ops.cli.root import app
from ddtree_ops.errors import UsageError
from ddtree_ops.report.blocks import Heading, Table, Text, html, markdown
from ddtree_ops.report.compare import comparison
from ddtree_ops.report.content import headline
from ddtree_ops.report.png import with_png
from ddtree_ops.report.svg import HEIGHT, WIDTH, nice
from ddtree_ops.report.write import BEGIN, END, load_run, readme_block, report_files, with_block, write
from ddtree_ops.sweep.grid import AR

from ..sweep.made import B8K4, made_run

STORED = Path(__file__).parent / "stored"
EXPECTED = STORED / "expected"
CHECKOUT, GPU = Path(__file__).resolve().parents[3], "results/sweep/h200"
#: To make them anew after a wanted change: python -m ddtree_ops.cli report tests/unit/report/stored -o .../expected


def test_the_stored_runs_report_is_what_it_was() -> None:
    _, records, sha256 = load_run(STORED)
    made = report_files(records, sha256)
    assert sorted(made) == sorted(path.name for path in EXPECTED.iterdir())
    for name, text in made.items():
        assert text == (EXPECTED / name).read_text(encoding="utf-8"), name


def test_the_report_of_the_sweep_on_a_gpu_and_the_readmes_table_are_what_its_records_give() -> None:
    """No figure of theirs was typed: python -m ddtree_ops.cli report results/sweep/h200 --readme."""
    _, records, sha256 = load_run(CHECKOUT / GPU)
    made = report_files(records, sha256)
    folder = CHECKOUT / GPU / "report"
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == made
    block = readme_block(records, f"{GPU}/report/report.md")
    assert block in (CHECKOUT / "README.md").read_text(encoding="utf-8")


def test_neither_time_zone_nor_hash_seed_nor_language_changes_a_byte(tmp_path: Path) -> None:
    for number, zone in enumerate(("UTC", "Asia/Tokyo")):
        env = {**os.environ, "TZ": zone, "PYTHONHASHSEED": str(number), "LC_ALL": "C", "PYTHONUTF8": "0"}
        argv = [sys.executable, "-m", "ddtree_ops.cli", "report", str(STORED), "-o", str(tmp_path / zone), "--json"]
        subprocess.run(argv, env=env, check=True, capture_output=True, cwd=tmp_path)
        for path in EXPECTED.iterdir():
            assert (tmp_path / zone / path.name).read_bytes() == path.read_bytes()


def test_charts_are_well_formed_and_hold_no_script() -> None:
    _, records, sha256 = load_run(STORED)
    drawn = {name: text for name, text in report_files(records, sha256).items() if name.endswith(".svg")}
    assert len(drawn) >= 6
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg") and "script" not in text and "nan" not in text


def test_a_run_on_the_reference_engine_says_that_it_claims_no_crossover() -> None:
    _, records, sha256 = load_run(STORED)
    text = report_files(records, sha256)["report.md"]
    assert "Crossover with ar: not claimed; the reference engine runs in Python" in text


def test_a_crossover_that_is_proven_is_in_the_report_and_its_chart() -> None:
    speeds = {(AR, 1): 98.0, (AR, 8): 260.0, (AR, 32): 700.0, (B8K4, 1): 150.0, (B8K4, 8): 326.0, (B8K4, 32): 610.0}
    files = report_files(made_run(speeds), "0" * 64)
    assert "ar overtakes the best tree between C=8 and C=32." in files["report.md"]
    assert "crossover" in files["throughput-by-c.svg"]


def test_tables_of_two_releases_are_two_and_say_why() -> None:
    files = report_files(made_run({(AR, 1): 98.0, (B8K4, 1): 150.0}, identities={AR: {"release": "r2", "tp": 4}}), "0")
    text = files["report.md"]
    assert "Why there are several tables" in text and "release: release r2 and r1" in text and "parallelism: tp" in text
    assert "Table 1: " in text and "Table 2: " in text and " x AR" not in headline(made_run({(AR, 1): 98.0}))


def test_a_cell_that_is_not_exact_has_no_throughput() -> None:
    failed = {(B8K4, 1): ("not-exact", "FAIL: p3 at C=8, position 7 <b>|")}
    text = report_files(made_run({(AR, 1): 98.0, (B8K4, 1): 150.0}, failed=failed), "0")["report.md"]
    assert re.search(r"\| b8k4\\#1 C=1 .* \| not-exact \| FAIL: p3 at C=8, position 7 \\<b\\>\\\| \|", text)
    assert "| b8k4 |" not in text


def test_words_of_a_host_are_never_markup() -> None:
    blocks = [Heading(1, "<script>"), Text("a [b](c) <img>"), Table(["x|y"], [["`1`"]])]
    assert "<script>" not in html("<t>", blocks) and "<img>" not in html("t", blocks)
    assert markdown(blocks) == "# \\<script\\>\n\na \\[b\\](c) \\<img\\>\n\n| x\\|y |\n|---|\n| \\`1\\` |\n"


def test_two_runs_are_compared_and_what_else_differs_is_said() -> None:
    slow = made_run({(AR, 1): 98.0, (B8K4, 1): 150.0}, sigma=0.002)
    fast = made_run({(AR, 1): 98.0, (B8K4, 1): 180.0}, sigma=0.002, identity={"release": "r2"}, seed=2)
    text = markdown(comparison(fast, slow, ("after", "before"), ("a" * 64, "b" * 64)))
    assert "release: release r2 and r1" in text
    assert re.search(r"b8k4 C=1 in A beats itself in B: 1\.\d\d", text) and "ar C=1 in A" not in text


def test_runs_of_other_prompts_are_not_compared() -> None:
    one, other = made_run({(AR, 1): 98.0}), made_run({(AR, 1): 98.0})
    other[0].sets["coding"]["sha256"] = "cd" * 32  # type: ignore[union-attr]
    text = markdown(comparison(one, other, ("a", "b"), ("a", "b")))
    assert "prompt set has changed" in text and "A / B" not in text


def test_the_readmes_block_is_replaced_and_the_rest_stays() -> None:
    block = readme_block(made_run({(AR, 1): 98.0, (B8K4, 1): 150.0}), "sweeps/x/report/report.md")
    first = with_block("# Fleet\n\nOurs.\n", block)
    assert first.startswith("# Fleet\n\nOurs.\n\n" + BEGIN) and first.rstrip().endswith(END)
    assert with_block(first + "\nMore.\n", block.replace("150", "151")).count(BEGIN) == 1
    assert with_block(first, block) == first
    with pytest.raises(UsageError, match="do not pair"):
        with_block(f"{END}\n{BEGIN}", block)


def test_a_chart_that_is_no_more_is_removed(tmp_path: Path) -> None:
    write(tmp_path, {"report.md": "a", "old.svg": "b"})
    write(tmp_path, {"report.md": "c"})
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def png_report(place: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["report", str(STORED), "-o", str(place), "--png", *words])


def test_each_chart_is_there_as_png_too_with_its_letters(tmp_path: Path) -> None:
    done = png_report(tmp_path, "--json")
    assert done.exit_code == 0, done.output
    charts = sorted(path.stem for path in EXPECTED.glob("*.svg"))
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == charts
    assert {f"{name}.png" for name in charts} < set(json.loads(done.stdout)["files"])
    for path in tmp_path.glob("*.png"):
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (2 * WIDTH, 2 * HEIGHT)
    # the same chart without its text is another picture: so the text is drawn
    chart = (EXPECTED / "throughput-by-c.svg").read_text()
    bare = with_png({"a.svg": re.sub("<text.*?</text>", "", chart)})["a.png"]
    assert (tmp_path / "throughput-by-c.png").read_bytes() != bare


def test_a_report_without_png_leaves_no_picture_of_an_earlier_one(tmp_path: Path) -> None:
    assert png_report(tmp_path).exit_code == 0
    (tmp_path / "own.png").touch()
    assert CliRunner().invoke(app, ["report", str(STORED), "-o", str(tmp_path)]).exit_code == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["own.png"]
    assert sorted(p.name for p in tmp_path.glob("*.svg")) == sorted(p.name for p in EXPECTED.glob("*.svg"))


def test_without_the_library_or_a_font_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("ddtree_ops.report.png.FAMILIES", ("No Such Family",))
        fontless = png_report(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    done = png_report(tmp_path / "a")
    assert done.exit_code == 2 and "ddtree-ops[png]" in done.stderr
    assert fontless.exit_code == 1 and "no font" in fontless.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 151.3), (1, 128), (0, 0.0004), (3, 3)])
def test_ticks_hold_all_values(low: float, high: float) -> None:
    found = nice(low, high)
    assert found[0] <= low and found[-1] >= high and len(found) <= 12
