"""``python -m tests.hosts.matrix``: all rows on several hosts at once, resumable.

Ends with ``P of Q rows ended as declared; S stray objects`` and exit 0 only for P = Q and S = 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import queue
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

from ..harness import Lab, laboratory
from .all import every_row
from .row import Result, Row, run_row
from .world import CHECKOUT, World

RESULTS = CHECKOUT / ".local" / "fault-matrix.jsonl"
CODE = ("ddtree_ops", "templates", "inventories", "tests/hosts")


def code_hash() -> str:
    """Of all that decides how a row ends: a result of other code is not resumed from."""
    state = hashlib.sha256()
    for top in CODE:
        for path in sorted((CHECKOUT / top).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".j2", ".yaml"):
                state.update(str(path.relative_to(CHECKOUT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def known_results(path: Path, key: str) -> dict[str, Result]:
    """Rows of this very code that ended as declared, by name; the others run again."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry.pop("key") == key and entry["ended"] and not entry["strays"]:
            found[entry["row"]] = Result(**entry)
    return found


class Runner:
    """Takes rows from a queue; one thread and one host (of its own slot) for each worker."""

    def __init__(self, lab: Lab, folder: Path, results: Path, key: str, until: float) -> None:
        self.lab, self.folder, self.results, self.key, self.until = lab, folder, results, key, until
        self.done: list[Result] = []
        self._lock = threading.Lock()
        self._made = 0

    def work(self, rows: queue.SimpleQueue[Row], kind: str) -> None:
        with self._lock:  # disks and links are made one after the other
            hosts = []
            for _ in range(3 if kind == "fleet" else 1):
                self._made += 1
                hosts.append(self.lab.host(f"m{self._made:02}"))  # in this order by name, too
        base = "reference" if kind == "reference" else "scripted"
        world = World(hosts[0], self.folder / hosts[0].name, base=base, others=hosts[1:])
        while time.monotonic() < self.until:
            try:
                row = rows.get_nowait()
            except queue.Empty:
                return
            self._keep(run_row(row, world))

    def _keep(self, result: Result) -> None:
        with self._lock:
            self.done.append(result)
            with self.results.open("a") as file:
                file.write(json.dumps({"key": self.key, **dataclasses.asdict(result)}) + "\n")
            good = result.ended and not result.strays
            print(f"{'ok  ' if good else 'FAIL'} {result.seconds:6.1f} s  {result.row}", flush=True)
            if not good:
                print(f"     {result.why}\n     strays: {result.strays}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.matrix", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name matches this pattern")
    parser.add_argument("--workers", type=int, default=6, help="hosts at once")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("--minutes", type=float, default=600, help="take no new row after that; run again to go on")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    given = parser.parse_args()
    rows = [row for row in every_row() if re.search(given.only, row.name)]
    if given.list:
        print(*(f"{row.name}: {row.end}, exit {row.code}" for row in rows), sep="\n")
        return 0
    os.environ.setdefault("XDG_CACHE_HOME", str(CHECKOUT / ".local" / "cache"))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if given.fresh:
        RESULTS.unlink(missing_ok=True)
    key = code_hash()
    known = known_results(RESULTS, key)
    left = [row for row in rows if row.name not in known]
    print(f"{len(rows)} rows, {len(rows) - len(left)} done before", flush=True)
    until = time.monotonic() + given.minutes * 60
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as folder, laboratory() as lab:
        runner = Runner(lab, Path(folder), RESULTS, key, until)
        threads = []
        for kind, workers in (("scripted", given.workers), ("reference", 1), ("fleet", 1)):
            waiting: queue.SimpleQueue[Row] = queue.SimpleQueue()
            mine = [row for row in left if row.world == kind]
            for row in mine:
                waiting.put(row)
            for _ in range(min(workers, len(mine))):
                threads.append(threading.Thread(target=runner.work, args=(waiting, kind), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results = [*(known[row.name] for row in rows if row.name in known), *runner.done]
    ended, strays = sum(result.ended for result in results), sum(len(result.strays) for result in results)
    if len(results) < len(rows):
        print(f"{len(rows) - len(results)} rows are left; run again to go on")
    print(f"{ended} of {len(rows)} rows ended as declared; {strays} stray objects")
    return 0 if ended == len(rows) and strays == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
