"""``ddtree report``: a sweep's records as Markdown, one HTML page, charts, and a block of the README."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli import complete
from ddtree_ops.cli.app import JsonOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.sweep.records import Record


@command("report")
def report(
    run: Annotated[
        Path, typer.Argument(help="A run's directory (sweeps/...), or its records.jsonl.", autocompletion=complete.runs)
    ],
    other: Annotated[
        Path | None, typer.Argument(help="A second run to compare the first with.", autocompletion=complete.runs)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Directory for the files. Default: report/ in the run's.")
    ] = None,
    readme: Annotated[
        bool, typer.Option("--readme", help="Also put a short table into the workspace's README.md, between markers.")
    ] = False,
    png: Annotated[bool, typer.Option("--png", help="Also write each chart as PNG; needs ddtree-ops[png].")] = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Write report.md, report.html (self-contained) and the charts of a run; with two runs, their comparison.

    The same records give the same bytes. A README.md whose block is of this very report is kept up to date.

    Examples: ddtree report sweeps/ct200-k26-1a2b3c4d --readme; ddtree report sweeps/before sweeps/after -o compared
    """
    from ddtree_ops.report.compare import comparison
    from ddtree_ops.report.content import headline
    from ddtree_ops.report.png import with_png
    from ddtree_ops.report.write import files_of, load_run, report_files, write

    screen = Screen(json_=json_)
    folder, records, sha256 = load_run(run)
    if other is None:
        files = report_files(records, sha256)
        place = output or folder / "report"
    else:
        folder_b, records_b, sha256_b = load_run(other)
        names = (folder.name, folder_b.name)
        files = files_of(comparison(records, records_b, names, (sha256, sha256_b)))
        place = output or folder / f"against-{folder_b.name}"
    made = with_png(files) if png else files
    write(place, made)
    touched = other is None and _readme(workspace, readme, records, place)
    said = headline(records)
    if screen.json:
        document = {"ok": True, "folder": str(place), "files": sorted(made), "headline": said, "sha256": sha256}
        screen.document({**document, "readme": touched})
        return 0
    screen.say(said)
    screen.say(f"{len(made)} files in {place}" + (", README.md updated" if touched else ""))
    return 0


def _readme(workspace: Path | None, wanted: bool, records: list[Record], place: Path) -> bool:
    """Put the block into the workspace's README.md where it was asked for, or that of this very report stands there."""
    from ddtree_ops.cli.output import write_whole
    from ddtree_ops.errors import UsageError
    from ddtree_ops.model import find_workspace
    from ddtree_ops.report.write import link, readme_block, with_block

    try:
        top = find_workspace(workspace)
    except UsageError:
        if wanted:
            raise
        return False
    file = top / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    report_file = (place / "report.md").resolve()
    inside = report_file.is_relative_to(top.resolve())
    where = str(report_file.relative_to(top.resolve())) if inside else str(report_file)
    if not wanted and link(where) not in text:
        return False
    write_whole(file, with_block(text, readme_block(records, where)), "README.md")
    return True
