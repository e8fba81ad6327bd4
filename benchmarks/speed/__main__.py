"""python -m benchmarks.speed [--rounds N] [ROW ...]

Rows: start (help, version, completion), profiles, one (plan, deploy on one host), ten (plan, deploy, status on ten),
far (plan over 80 ms), ship (a release of 500 MB, and one of 10,000 small files). Without names: all.
Everything but start and profiles needs root (tests/hosts/install-needs). Each contestant gets an environment of its own
below .local/bench, made by the first run. Writes benchmarks/results.json and the README's table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from . import rows
from .far import NAME, far
from .fleet import fleet
from .report import keep, told
from .rows import Row
from .shipping import shipping
from .timing import race
from .venvs import venv, versions

LOCAL = {"start": rows.start, "profiles": rows.render}
HOSTS = {"one": rows.one, "ten": rows.ten, "ship": shipping}
COUNT = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", choices=[*LOCAL, *HOSTS, "far", []])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    wanted = given.rows or [*LOCAL, *HOSTS, "far"]
    for name in LOCAL:
        if name in wanted:
            run(LOCAL[name](), given.rounds)
    if {*HOSTS, "far"} & set(wanted):
        with fleet(COUNT if "ten" in wanted else 1, str(venv("ddtree") / "python")) as made:
            for name in HOSTS:
                if name in wanted:
                    run(HOSTS[name](made), given.rounds)
            if "far" in wanted:
                show(NAME, {**far(made, given.rounds), "context": context(given.rounds)})


def run(all_rows: Iterable[Row], rounds: int) -> None:
    for row in all_rows:
        found = race([row.ours, *row.theirs], rounds)
        show(row.name, told(row, found, context(rounds)))
        print(f"{'':12} peak memory {found[row.ours.name].peak_mb:.0f} MB", flush=True)


def context(rounds: int) -> dict[str, Any]:
    return {**rows.manifest(), "rounds": rounds, "peers": versions()}


def show(name: str, result: dict[str, Any]) -> None:
    """A row, kept and said."""
    keep(name, result)
    for other, said in result["ratios"].items():
        print(f"{name:12} {said['ratio']:6.2f} of {other} ({said['least']:.2f} to {said['most']:.2f})", end="")
        print(f", bound {said['bound']:.2f}" if said["bound"] else "", flush=True)


if __name__ == "__main__":
    main()
