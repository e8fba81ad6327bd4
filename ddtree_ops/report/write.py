"""A report's files, written beside the records; the block in the workspace's README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.report.blocks import Block, Figure, Heading, Items, Table, Text, html, markdown
from ddtree_ops.report.content import by_concurrency, commentary, headline, one_load, report
from ddtree_ops.report.words import moment
from ddtree_ops.sweep.claims import crossover, doubts
from ddtree_ops.sweep.grid import AR, CHAIN
from ddtree_ops.sweep.records import JOURNAL, Record, Run, read, sha256_of
from ddtree_ops.sweep.tables import groups, header

BEGIN, END = "<!-- ddtree report begin -->", "<!-- ddtree report end -->"


def load_run(place: Path) -> tuple[Path, list[Record], str]:
    """A run by its directory or its records: the directory, the records, their sha256. Raises UsageError."""
    path = place / JOURNAL if place.is_dir() else place
    if not path.is_file():
        raise UsageError(f"{place}: no run of a sweep", hint=f"a directory with {JOURNAL}, as ddtree sweep makes it")
    records = read(path)
    if not records or not isinstance(records[0], Run):
        raise UsageError(f"{path}: the run has not begun")
    return path.parent, records, sha256_of(path)


def files_of(blocks: Sequence[Block]) -> dict[str, str]:
    """Name -> text: report.md, report.html and an SVG a figure."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    drawn = {f"{block.name}.svg": block.svg + "\n" for block in blocks if isinstance(block, Figure)}
    return {"report.md": markdown(blocks), "report.html": html(title, blocks), **drawn}


def report_files(records: Sequence[Record], sha256: str) -> dict[str, str]:
    """The files of one run's report. The same records give the same bytes."""
    return files_of(report(records, sha256))


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Replace the files one by one, each as a whole; charts of an earlier report that are no more are removed, with
    the PNG beside them.

    Raises Failed when the disk does not take them.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in folder.glob("*.svg"):
            for old in (chart.with_suffix(".png"), chart):
                if old.name not in files:
                    old.unlink(missing_ok=True)
        for name, content in files.items():
            part = folder / f".{name}.part"
            part.write_bytes(content if isinstance(content, bytes) else content.encode())
            part.replace(folder / name)
    except OSError as error:
        raise Failed(f"{folder}: {error.strerror}; the report is not whole") from error


def readme_block(records: Sequence[Record], where: str) -> str:
    """What stands between the markers: the headline, the commentary, where the whole is."""
    run, blocks = header(records), list[Block]()
    for group in groups(records)[:1]:
        crossings = [crossover(group, against, doubts(records, group)) for against in (AR, CHAIN)]
        table: Table = by_concurrency(group) if len(group.loads) > 1 else one_load(group, group.loads[0])
        blocks += [table, Items(commentary(group, crossings))]
    first = Text(f"{run.service} on {run.host}, {moment(run.t)}. {headline(records)}")
    return f"{BEGIN}\n\n{markdown([first, *blocks])}\n{link(where)}\n\n{END}"


def link(where: str) -> str:
    """The block's last line, which says of which report it is."""
    return f"Method, intervals and charts: [{where}]({where})"


def with_block(readme: str, block: str) -> str:
    """The README with the block in place of what stands between its markers, or at its end. Raises UsageError for
    markers that do not pair.
    """
    begins, ends = readme.count(BEGIN), readme.count(END)
    if (begins, ends) == (0, 0):
        return readme.rstrip("\n") + ("\n\n" if readme.strip() else "") + block + "\n"
    if (begins, ends) != (1, 1) or readme.index(BEGIN) > readme.index(END):
        raise UsageError("README.md: the markers of ddtree report do not pair", hint=f"one {BEGIN}, then one {END}")
    return readme[: readme.index(BEGIN)] + block + readme[readme.index(END) + len(END) :]
