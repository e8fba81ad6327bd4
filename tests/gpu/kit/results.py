"""Rows of results: kept as they come, so that a run that is cut short has shown what it saw."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One thing that was seen. ``ok`` None: a figure, neither right nor wrong."""

    selection: str
    server: str
    case: str
    ok: bool | None
    figures: dict[str, object] = field(default_factory=dict)
    second: float = 0.0


class Results:
    """Prints every row and rewrites ``out/results.json`` with it. ``facts``: what all rows share.

    What is too much for that (logs, verdicts, tokens) lies in ``evidence`` and is packed into one archive, since a
    machine may hand back only a few files.
    """

    def __init__(self, out: Path, evidence: Path) -> None:
        self.out, self.evidence = out, evidence
        evidence.mkdir(parents=True)
        self.rows: list[Row] = []
        self.facts: dict[str, object] = {}
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def add(self, selection: str, server: str, case: str, ok: bool | None, **figures: object) -> None:
        row = Row(selection, server, case, ok, figures, round(self.seconds, 1))
        self.rows.append(row)
        print(line(row), flush=True)
        self.save()

    def save(self) -> None:
        document = {"facts": self.facts, "seconds": round(self.seconds, 1), "rows": [asdict(row) for row in self.rows]}
        self.out.joinpath("results.json").write_text(json.dumps(document, indent=1) + "\n")

    def pack(self) -> None:
        """``out/evidence.tar.gz``, anew."""
        fresh = self.out / "evidence.tmp"
        subprocess.run(["tar", "-C", str(self.evidence.parent), "-czf", str(fresh), self.evidence.name], check=False)
        fresh.replace(self.out / "evidence.tar.gz")

    def table(self) -> str:
        """All rows by selection and server."""
        return "\n".join(
            line(row) for row in sorted(self.rows, key=lambda row: (row.selection, row.server, row.second))
        )

    def summary(self) -> str:
        """The failed rows and the counts."""
        failed = [row for row in self.rows if row.ok is False]
        counts = f"{len(self.rows)} rows, {sum(row.ok is True for row in self.rows)} right, {len(failed)} wrong"
        return "\n".join([*(line(row) for row in failed), counts])


def line(row: Row) -> str:
    mark = {True: "ok  ", False: "FAIL", None: "    "}[row.ok]
    shown = " ".join(f"{key}={_short(value)}" for key, value in row.figures.items())
    return f"{mark} {row.second:5.0f}s {row.selection:9s} {row.server:18s} {row.case:34s} {shown}"


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"
