"""python -m tests.mutants [--count N] [PART ...]: what the tests would not notice, by mutmut.

Takes a seeded sample of the mutants of each part (deploy, exactness, units), tries each with those tests of these parts
and of the model that run the changed function, and writes results/tests/mutants.txt: the score of each part, and the
difference that each survivor is. It happens in a copy, .local/mutants. Only what a test runs in its own process is
tried: the program as a process, the hosts' half, real hosts and tests marked slow are not, so the score is a lower
bound. 50 of each part take two cores about half an hour.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
COPY = CHECKOUT / ".local" / "mutants"
STATS = COPY / "mutants" / "mutmut-stats.json"
TABLE = CHECKOUT / "results" / "tests" / "mutants.txt"
PARTS = ("deploy", "exactness", "units")
TESTS = (*PARTS, "model")
SEED = "20261201"
#: mutmut's words for what the tests noticed.
NOTICED = frozenset({"killed", "timeout", "segfault", "caught by type check"})

CONFIG = """\
[mutmut]
source_paths=
    ddtree_ops
only_mutate=
{mutate}
also_copy=
{copied}
pytest_add_cli_args_test_selection=
{tests}
pytest_add_cli_args=
    -q
use_git_change_detection=false
process_isolation=forkserver
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=", ".join(PARTS))
    parser.add_argument("--count", type=int, default=50, help="mutants of each part (default 50)")
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    copy()
    # A name that fits no mutant: mutmut makes them, learns which test runs which function, and stops there.
    mutmut("run", "none.*", check=False)
    if not STATS.exists():
        raise SystemExit("without any mutant the tests fail, or mutmut cannot learn what they run: see above")
    names = {part: sample(part, given.count) for part in parts}
    mutmut("run", "--max-children", "2", *[name for chosen in names.values() for name in chosen])
    status = dict(
        line.strip().rsplit(": ", 1) for line in said("results", "--all", "true").splitlines() if ": " in line
    )
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(told(names, status)) + "\n")
    print(TABLE.read_text())
    return 0


def copy() -> None:
    """The checkout's files as they are now, where mutmut may write; what it made of them before stays."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        source, target = CHECKOUT / name, COPY / name
        if not source.exists() or (target.exists() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    tops = sorted({name.split("/")[0] for name in filter(None, listed)} - {"ddtree_ops", "tests", "pyproject.toml"})
    lines = {
        "mutate": [f"ddtree_ops/{part}/*" for part in PARTS],
        "copied": tops,
        "tests": [f"tests/unit/{folder}" for folder in TESTS],
    }
    text = CONFIG.format(**{key: "\n".join(f"    {word}" for word in words) for key, words in lines.items()})
    (COPY / "setup.cfg").write_text(text)


def mutmut(*words: str, check: bool = True) -> None:
    subprocess.run([sys.executable, "-m", "mutmut", *words], cwd=COPY, check=check)


def said(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *words], cwd=COPY, check=True, capture_output=True, text=True
    )
    return done.stdout


def sample(part: str, count: int) -> list[str]:
    """So many of the part's mutants, the same for the same sources."""
    metas = (COPY / "mutants" / "ddtree_ops" / part).rglob("*.meta")
    every = sorted(name for meta in metas for name in json.loads(meta.read_text())["exit_code_by_key"])
    return sorted(random.Random(f"{part} {SEED}").sample(every, min(count, len(every))))


def told(names: Mapping[str, Sequence[str]], status: Mapping[str, str]) -> Iterable[str]:
    """The table, then each survivor with its difference."""
    yield "python -m tests.mutants: a sample of each part's mutants, tried by tests/unit/{" + ",".join(TESTS) + "}"
    yield ""
    yield f"{'part':10} {'mutants':>8} {'run by a test':>14} {'noticed':>8} {'score':>6}"
    for part, chosen in names.items():
        found = Counter(status.get(name, "not checked") for name in chosen)
        run = len(chosen) - found["no tests"] - found["not checked"]
        noticed = sum(count for word, count in found.items() if word in NOTICED)
        words = ", ".join(f"{count} {word}" for word, count in sorted(found.items()))
        yield f"{part:10} {len(chosen):8} {run:14} {noticed:8} {noticed / max(1, run):6.0%}  {words}"
    for chosen in names.values():
        for name in chosen:
            if status.get(name) in ("survived", "suspicious"):
                yield ""
                yield f"# {name}"
                yield from (line for line in said("show", name).splitlines() if not line.startswith("# "))


if __name__ == "__main__":
    sys.exit(main())
