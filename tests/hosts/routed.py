"""``python -m tests.hosts.routed`` (root): the real sglang-router and two engines on three hosts of their own.

A rolling deploy, a failing deploy and the power loss of one backend, each under steady load from our client. Prints
what was asked, what was lost and why, and exits 1 when anything is not as it has to be.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import yaml

from ddtree_ops.model import load_workspace, resolve
from ddtree_ops.remote.metrics import parse_metrics, total
from ddtree_ops.sweep.load import Kept

from ..unit.router.fleet import CONCURRENCY, LIMIT_S, answers, load, serving
from .harness import TestHost, laboratory
from .machine import wait_for
from .test_main_job import PORT, SERVICE, Workspace

BACKENDS = ("ct200", "b300")
OPEN = {"bind": "0.0.0.0", "open": "a test range of its own"}
DETECTED_S = 120


def prepare(folder: Path, hosts: dict[str, TestHost]) -> Workspace:
    """The workspace: two engines that their router reaches, and the router."""
    made = Workspace(folder, dict.fromkeys(hosts.values(), "root"), base="short")
    gate = {"max_new_tokens": 8, "concurrency": [1], "prompts": "gate.jsonl"}
    (folder / "gate.jsonl").write_text("".join(f'{{"input_ids": [{n}, 7, 300, {n}]}}\n' for n in range(20, 30)))
    made.profile("short", extends="tiny", min_accept_length=None, context_length=512, exactness=gate, **OPEN)
    made.profile("narrow", extends="b8k4", budget=4)
    made.profile("faulty", extends="b8k4", extra_args=["--fault", "mask-all-blocked"])
    router = {
        "backends": [f"{name}/{SERVICE}" for name in BACKENDS],
        "policy": "round_robin",
        "health_interval_s": 1,
        "health_timeout_s": 2,
        **OPEN,
    }
    file = folder / "inventories" / "front.yaml"
    inventory = yaml.safe_load(file.read_text())
    inventory["services"] = {"door": {"port": PORT, "router": router}}
    file.write_text(yaml.safe_dump(inventory))
    (folder / "inventories" / "workspace.yaml").write_text(
        yaml.safe_dump({"order": [*BACKENDS, "front"], "groups": {"engines": list(BACKENDS)}})
    )
    made.git("add", "-A")
    made.git("commit", "-qm", "A router before two engines")
    return made


def tell(what: str, kept: Kept) -> None:
    why = "; ".join(f"{count} x {text}" for text, count in Counter(kept.failed).items())
    wrong = sum(len(different) - 1 for different in answers(kept).values())
    lost = f"{len(kept.failed)} lost" + (f" ({why})" if why else "")
    print(f"{what}: {len(kept.samples)} answered, {lost}, {wrong} wrong", flush=True)


def running(host: TestHost) -> int:
    """Requests that the host's engine runs."""
    told = parse_metrics(httpx.get(f"http://{host.address}:{PORT}/metrics", timeout=5, trust_env=False).text)
    return int((total(told, "sglang:num_running_reqs") or 0) + (total(told, "sglang:num_queue_reqs") or 0))


def main() -> int:
    with laboratory() as lab, tempfile.TemporaryDirectory() as folder:
        hosts = {name: lab.host(name) for name in (*BACKENDS, "front")}
        lab.join()
        made = prepare(Path(folder), hosts)
        began = time.monotonic()
        made.ddtree("deploy", "--host", "all", "--yes", "--no-snapshot", timeout=1200)
        workspace = load_workspace(made.path)
        assert serving(workspace) == {*BACKENDS}
        print(f"deployed: {', '.join(BACKENDS)} and the router, in {time.monotonic() - began:.0f} s", flush=True)
        deploy = ("deploy", "--host", "engines", "--yes", "--no-snapshot", "--profile")

        with load(workspace) as rolling:
            made.ddtree(*deploy, "narrow")
        tell("rolling deploy", rolling)
        assert serving(workspace) == {*BACKENDS}

        with load(workspace) as failing:
            told = made.json(*deploy, "faulty", code=5)
        tell("failing deploy", failing)
        assert told["hosts"][1].get("skipped") and serving(workspace) == {*BACKENDS}

        with load(workspace) as dark:
            in_flight = wait_for("requests on b300", lambda: running(hosts["b300"]), 30)
            hosts["b300"].powerloss()
            wait_for("the router to know", lambda: serving(workspace) == {"ct200"}, DETECTED_S)
            # what it was answering is given up by its client at the latest
            time.sleep(LIMIT_S)
        tell(f"power loss of b300 with {in_flight} requests on it of {CONCURRENCY} in flight", dark)
        refused = made.json("deploy", "--host", "ct200", "--yes", "--no-snapshot", "--profile", "b8k4", code=1)
        print(f"meanwhile, a deploy of ct200: {refused['hosts'][0]['error']['message']}", flush=True)

        hosts["b300"].up()
        lab.join()
        wait_for("b300 to serve again", lambda: serving(workspace) == {*BACKENDS}, DETECTED_S)
        with load(workspace) as after:
            pass
        tell("b300 is back", after)
        assert resolve(workspace, "front").fronts == []
    sound = not rolling.failed and not failing.failed and not after.failed and len(dark.failed) <= CONCURRENCY
    right = all(len(different) == 1 for kept in (rolling, failing, dark, after) for different in answers(kept).values())
    print("as it has to be" if sound and right else "NOT as it has to be")
    return 0 if sound and right else 1


if __name__ == "__main__":
    sys.exit(main())
