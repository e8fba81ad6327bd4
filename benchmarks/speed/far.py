"""A no-op over a link of 80 ms: how many round trips it waits for beyond those of TCP and of SSH's own set-up.

The link is a relay that holds every byte for 40 ms either way. It loses nothing: the kernel here has no netem, and what
a relay could lose is a connection and no packet.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ship import Far

from . import rows
from .fleet import Fleet
from .timing import Case, Measured, race, spread

ONE_WAY_S = 0.04
NAME = "plan-far"
#: Of ``ssh host true``, which is set-up and these: the channel is opened, the command is run.
OF_A_COMMAND = 2
BOUND = 5.0


def far(fleet: Fleet, rounds: int) -> dict[str, Any]:
    """The row, as `report.told` makes one: its ratio is a number of round trips."""
    host = fleet.hosts[0]
    relay = Far(host, ONE_WAY_S)
    try:
        there = Path(shutil.copytree(fleet.directory, fleet.directory.parent / "far"))
        file = there / f"inventories/{host.name}.yaml"
        inventory = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**inventory, "address": "127.0.0.1", "port": relay.port}))
        near = rows.ddtree(fleet, "plan", "--host", host.name)
        afar = Case("plan, far", near.argvs, there, near.environment, near.check)
        alias = ["-o", f"HostKeyAlias={host.address}", "-p", str(relay.port)]
        ssh = ["ssh", *fleet.ssh_options(host), *alias, "root@127.0.0.1", "true"]
        plain = Case("ssh host true", [rows.ssh_true(fleet, 0)])
        cases = [near, afar, plain, Case("ssh host true, far", [ssh])]
        return _row(race(cases, rounds), [case.name for case in cases])
    finally:
        relay.close()


def _row(found: Mapping[str, Measured], names: list[str]) -> dict[str, Any]:
    near, afar, plain, plain_far = (found[name].seconds for name in names)
    trip = 2 * ONE_WAY_S
    of_ssh = (statistics.median(plain_far) - statistics.median(plain)) / trip
    least, middle, most = spread([(late - statistics.median(near)) / trip - of_ssh + OF_A_COMMAND for late in afar])
    beside = "round trips beyond TCP and SSH set-up"
    return {
        "what": "`ddtree plan`, nothing to change, over a link of 80 ms",
        "ours": names[1],
        "seconds": {name: found[name].as_json() for name in names},
        "ratios": {beside: {"ratio": middle, "least": least, "most": most, "bound": BOUND}},
    }
