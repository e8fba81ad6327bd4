"""A sweep killed at random moments ends with the same cells as one that nobody disturbed.

``python -m benchmarks.sweep_kills --kills 20 --out results/sweep/kills.txt``: the reference engine under the process
supervisor, no root. The client gets SIGKILL; the same command is started again until all kills have come and the sweep
is complete. Then: the same cells, statuses, tokens and verify steps; the host on the generation on which it began. At
last one more client is killed and nobody comes back: the host has to go back by itself when the lease is over.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ddtree_ops.deploy.session import open_session
from ddtree_ops.model import resolve
from ddtree_ops.sweep.records import JOURNAL, Attempt, Ended, cells, read
from tests.unit.sweep.place import confirmed, workspace_in

WISHES = ["--pair", "8/4", "--no-chain", "-c", "1,2", "--max-tokens", "16", "--rows", "4", "--yes"]
LEASE_S = 60


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


def lived(process: subprocess.Popen[bytes], folder: Path, chance: random.Random) -> bool:
    """Wait for a random moment: some records more, then some seconds. False when the process ended before.

    Counted in records, so that the moments lie all over the sweep however slow the machine is.
    """
    until = len(read(folder / JOURNAL)) + chance.choice((0, 0, 1, 1, 2, 3))
    while process.poll() is None and len(read(folder / JOURNAL)) < until:
        time.sleep(0.1)
    try:
        process.wait(chance.uniform(0, 12))
    except subprocess.TimeoutExpired:
        return True
    return False


def main() -> int:
    """Exit status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chance, lines, good = random.Random(options.seed), [], True

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    with tempfile.TemporaryDirectory() as scratch, workspace_in(Path(scratch)) as workspace:
        top = workspace.path
        assert ddtree(top, "deploy", "--yes", "--no-snapshot").wait() == 0
        first = confirmed(workspace)
        began = time.monotonic()
        code = ddtree(top, "sweep", *WISHES, "--run", str(top / "calm")).wait()
        took, calm = time.monotonic() - began, what(top / "calm")
        say(f"undisturbed: exit {code}, {len(calm)} cells in {took:.0f} s, host on generation {confirmed(workspace)}")
        kills = rounds = 0
        while kills < options.kills:
            rounds += 1
            folder = top / f"killed-{rounds}"
            while True:
                process = ddtree(top, "sweep", *WISHES, "--run", str(folder))
                if kills == options.kills or not lived(process, folder, chance):
                    code = process.wait()
                    break
                process.kill()
                process.wait()
                kills += 1
                records = read(folder / JOURNAL)
                last = type(records[-1]).__name__.lower() if records else "nothing"
                say(f"kill {kills}: {len(cells(records))} of {len(calm)} cells were there, last written: {last}")
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
    say("all as it has to be" if good else "NOT as it has to be")
    command = f"python -m benchmarks.sweep_kills --kills {options.kills} --seed {options.seed}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(f"$ {command}\n" + "\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
