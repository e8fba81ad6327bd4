"""A sweep killed at moments all over its span ends with the same cells as one that nobody disturbed.

``python -m benchmarks.sweep_kills --kills 20 --out results/sweep/kills.txt``: the reference engine under the process
supervisor, no root. An undisturbed run comes first and tells how long each part of a sweep takes; out of these the
moments are drawn, three of four inside cells, each kind spread evenly over its time. The client then gets SIGKILL at
one after another; the same command is started again until all kills have come and the sweep is complete. Then: the
same cells, statuses, tokens and verify steps; the host on the generation on which it began. At last one more client is
killed and nobody comes back: the host has to go back by itself when the lease is over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddtree_ops.deploy.session import open_session
from ddtree_ops.model import resolve
from ddtree_ops.sweep.grid import Cell
from ddtree_ops.sweep.records import JOURNAL, Attempt, Ended, Measured, Record, Started, cells, read
from tests.unit.sweep.place import confirmed, workspace_in

WISHES = ["--pair", "8/4", "--no-chain", "-c", "1,2", "--max-tokens", "32", "--rows", "8", "--yes"]
LEASE_S = 60
#: Of all kills; the others come while a service starts, is gated or goes back.
IN_CELLS = 0.75
BEGIN = "before the first start"


class Part(NamedTuple):
    """A stretch of an undisturbed sweep: until the service of a start is measured, a cell, or the way back."""

    name: str
    seconds: float
    is_cell: bool


class Moment(NamedTuple):
    """A place on the timeline: in the part of that number, after that many seconds of it."""

    part: int
    after_s: float


def part_now(order: Sequence[Cell], records: Sequence[Record], since: int) -> str:
    """What a sweep is at, by its journal; ``since``: how many records there were when its process began.

    ``order``: all cells as an undisturbed run measures them.
    """
    done = cells(records)
    new = [one for one in records[since:] if isinstance(one, Attempt | Started | Measured | Ended)]
    if not new:
        return BEGIN
    last = new[-1]
    if isinstance(last, Ended):
        left = next((cell for cell in order if cell not in done), None)
        return f"start {left.shape.name}#{left.start}" if left else "end"
    start = next(one for one in reversed(new) if isinstance(one, Attempt))
    name = f"{start.shape.name}#{start.number}"
    if isinstance(last, Attempt):
        return f"start {name}"
    left = next((c for c in order if (c.shape, c.start) == (start.shape, start.number) and c not in done), None)
    return left.name if left else f"way back {name}"


def timeline(records: Sequence[Record], end: float) -> list[Part]:
    """The parts of an undisturbed run that ended at ``end`` (time.time()), in order."""
    order = list(cells(records))
    names = {cell.name for cell in order}
    found: list[Part] = []
    for index, record in enumerate(records):
        until = records[index + 1].t if index + 1 < len(records) else end
        name = part_now(order, records[: index + 1], 0)
        if found and found[-1].name == name:
            found[-1] = found[-1]._replace(seconds=found[-1].seconds + until - record.t)
        else:
            found.append(Part(name, until - record.t, name in names))
    return found


def moments(parts: Sequence[Part], kills: int, chance: random.Random) -> list[Moment]:
    """In the order of the timeline: of each kind as many strata of equal length as kills, one moment in each."""
    inside = round(kills * IN_CELLS)
    found = []
    for is_cell, count in ((True, inside), (False, kills - inside)):
        chosen = [(index, part) for index, part in enumerate(parts) if part.is_cell == is_cell]
        span = sum(part.seconds for _, part in chosen)
        for number in range(count):
            at, place = (number + chance.random()) * span / count, 0
            while at > chosen[place][1].seconds and place + 1 < len(chosen):
                at, place = at - chosen[place][1].seconds, place + 1
            found.append(Moment(chosen[place][0], at))
    return sorted(found)


def ddtree(workspace: Path, *words: str) -> subprocess.Popen[bytes]:
    """The command in that workspace, its words thrown away."""
    argv = [sys.executable, "-m", "ddtree_ops.cli", *words, "--workspace", str(workspace)]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def what(folder: Path) -> dict[str, Any]:
    """Of every cell: its status, and of each repeat the hash of its tokens and the counts of each prompt."""
    found = {}
    for cell, record in cells(read(folder / JOURNAL)).items():
        repeats = [(r.outputs, [(row.prompt, row.tokens, row.steps) for row in r.rows]) for r in record.repeats]
        found[cell.name] = (record.status, repeats)
    return found


def lived(
    process: subprocess.Popen[bytes], journal: Path, since: int, moment: Moment, names: Sequence[str], order: list[Cell]
) -> bool:
    """Wait for the moment; a part that is over is not waited for. False when the process ended before."""
    while process.poll() is None:
        now = part_now(order, read(journal), since)
        if now in names and names.index(now) >= moment.part:
            if now == names[moment.part]:
                time.sleep(moment.after_s)
            return process.poll() is None
        time.sleep(0.1)
    return False


def main() -> int:
    """Exit status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines, good = list[str](), True

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    with tempfile.TemporaryDirectory() as scratch, workspace_in(Path(scratch)) as workspace:
        top = workspace.path
        say(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        assert ddtree(top, "deploy", "--yes", "--no-snapshot").wait() == 0
        first = confirmed(workspace)
        code = ddtree(top, "sweep", *WISHES, "--run", str(top / "calm")).wait()
        ended, calm, undisturbed = time.time(), what(top / "calm"), read(top / "calm" / JOURNAL)
        parts, order = timeline(undisturbed, ended), list(cells(undisturbed))
        in_cells = sum(part.seconds for part in parts if part.is_cell)
        say(
            f"undisturbed: exit {code}, {len(calm)} cells in {sum(part.seconds for part in parts):.0f} s, of which "
            f"{in_cells:.0f} s in cells; host on generation {confirmed(workspace)}"
        )
        names = [part.name for part in parts]
        left = moments(parts, options.kills, random.Random(options.seed))
        kills = rounds = inside = 0
        while left:
            rounds += 1
            folder = top / f"killed-{rounds}"
            while True:
                since = len(read(folder / JOURNAL))
                process = ddtree(top, "sweep", *WISHES, "--run", str(folder))
                if not left or not lived(process, folder / JOURNAL, since, left[0], names, order):
                    code = process.wait()
                    break
                process.kill()
                process.wait()
                kills += 1
                moment, records = left.pop(0), read(folder / JOURNAL)
                now = part_now(order, records, since)
                inside += now in calm
                aimed = "" if now == names[moment.part] else f" (aimed at {names[moment.part]})"
                say(f"kill {kills}: {now}{aimed}; {len(cells(records))} of {len(calm)} cells were there")
            killed, records = what(folder), read(folder / JOURNAL)
            same = killed == calm
            attempts, ends = (sum(isinstance(r, kind) for r in records) for kind in (Attempt, Ended))
            stands = confirmed(workspace)
            good = good and same and stands == first and code == 0
            say(
                f"round {rounds} after {kills} kills: exit {code}, {attempts} starts begun, {ends} seen to end; "
                f"cells, statuses, tokens and verify steps {'the same' if same else 'DIFFERENT'}; "
                f"host on generation {stands}, began on {first}"
            )
            if not same:
                say(json.dumps({"calm": sorted(calm), "killed": sorted(killed)}))
        say(f"{inside} of {kills} kills came inside a cell")
        process = ddtree(top, "sweep", *WISHES, "--run", str(top / "abandoned"))
        deadline = time.monotonic() + 120
        while (
            not any(isinstance(r, Attempt) for r in read(top / "abandoned" / JOURNAL)) and time.monotonic() < deadline
        ):
            time.sleep(0.5)
        time.sleep(4)
        process.kill()
        process.wait()
        gone = time.monotonic()
        while time.monotonic() - gone < LEASE_S + 60:
            time.sleep(2)
            with open_session(resolve(workspace, "local")) as session:
                seen = session.probe()
            if seen.state.pending is None and not (seen.lock and seen.lock.alive):
                break
        back = seen.state.pending is None and seen.state.confirmed == first and seen.active.state == "active"
        good = good and back
        after = time.monotonic() - gone
        say(f"abandoned: {after:.0f} s after the last kill the host is {'back by itself' if back else 'NOT back'}")
        say(f"load average {os.getloadavg()[0]:.1f} at the end")
    say("all as it has to be" if good else "NOT as it has to be")
    command = f"python -m benchmarks.sweep_kills --kills {options.kills} --seed {options.seed}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(f"$ {command}\n" + "\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
