"""What the documents say is there is there, and their figures are those of the committed runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
DOCUMENTS = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
TOPS = (
    "ddtree_ops/",
    "templates/",
    "inventories/",
    "patches/",
    "tests/",
    "docs/",
    "results/",
    "benchmarks/",
    "training/",
)


def text(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def test_the_gates_table_is_that_of_its_last_full_run() -> None:
    report = text("results/gate/report.md")
    table = report[report.index("## ") :].replace("\n## ", "\n### ").strip()
    shown = re.search(r"<!-- results/gate/report\.md -->\n(.*)<!-- end -->", text("docs/exactness.md"), re.DOTALL)
    assert shown is not None and shown[1].strip() == f"#{table}"


def test_the_gates_closing_line_is_what_the_readme_says() -> None:
    closing = text("results/gate/report.md").strip().splitlines()[-1]
    found = re.fullmatch(
        r"caught (\d+) of (\d+) faults; (\d+) false alarms in (\d+) healthy runs; [\d.]+ s a run", closing
    )
    assert found is not None, closing
    caught, planted, alarms, healthy = found.groups()
    assert caught == planted and alarms == "0"
    assert f"catches each of {planted} planted engine faults and refuses {alarms} of {healthy} healthy runs" in text(
        "README.md"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_files_that_a_document_names_are_there(document: Path) -> None:
    said = document.read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w./*-]+)`", said) if name.startswith(TOPS)}
    missing = [name for name in sorted(named) if not any(CHECKOUT.glob(name))]
    missing += [name for name in re.findall(r"\]\(([^)#:]+)\)", said) if not (document.parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_make_targets_that_a_document_names_are_there(document: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`(?:HOSTS=1 )?make ([a-z-]+)", document.read_text(encoding="utf-8"))) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_that_a_document_names_are_there(document: Path) -> None:
    said = document.read_text(encoding="utf-8")
    words = set(re.findall(r"(?:^\$ |`)ddtree ([a-z][a-z-]*)\b(?!<)", said, re.MULTILINE))
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_ops.cli", "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"^\W*([a-z-]+)  ", done.stdout, re.MULTILINE))
    assert words <= known, words - known


def test_the_documents_are_a_site_whose_links_lead_somewhere(tmp_path: Path) -> None:
    """Strict: a link, an anchor or an entry of the list of documents that leads nowhere is an error."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (CHECKOUT / "docs").glob("*.md")} <= pages
    listed = set(re.findall(r"[\w.-]+\.md", text("mkdocs.yml")))
    assert listed == {path.name for path in (CHECKOUT / "docs").glob("*.md")}
