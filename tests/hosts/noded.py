"""``python -m tests.hosts.noded`` (root): one service over two hosts, the reference engine's two ranks over gloo.

Tokens are compared with one rank's; then whatever can be killed or cut during a deploy is, each to its declared end.
Prints a row for each and exits 1 when one ended otherwise.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from ddtree_ops.errors import DdtreeError
from ddtree_ops.exactness import builtin_prompts
from ddtree_ops.model import load_workspace, resolve
from ddtree_ops.remote.transport import connect

from ..unit.engine.process import REPOSITORY, Engine
from .harness import Lab, TestHost, laboratory
from .machine import HarnessError, wait_for
from .test_main_job import PORT, SERVICE, Workspace

LEAD, OTHER = "ct200", "b300"
MEETING = 20000
PAIR = REPOSITORY / "ddtree_ops" / "engine" / "pair"
LOCK = f"/opt/ddtree/services/{SERVICE}/lock"
APPLIER = f"""python3 -c 'import json; print(json.load(open("{LOCK}"))["pid"])'"""
PROMPTS, TOKENS = 12, 48
RECOVERS_S = 200
Asked = dict[str, Any]
WHAT: Asked = {"input_ids": [1, 2, 3]}
DEPLOY = ("deploy", "--host", LEAD, "--yes", "--no-snapshot", "--profile")


@dataclass
class Run:
    """Two hosts, the workspace with the service over both, and the rows so far."""

    lab: Lab
    hosts: dict[str, TestHost]
    made: Workspace
    rows: list[bool] = field(default_factory=list)
    earlier: str | None = None

    @property
    def lead(self) -> TestHost:
        return self.hosts[LEAD]

    @property
    def other(self) -> TestHost:
        return self.hosts[OTHER]

    def tell(self, what: str, how: str, right: bool) -> None:
        self.rows.append(right)
        print(f"{'ok   ' if right else 'WRONG'} {what}: {how}", flush=True)

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = self.made.json("status", "--host", LEAD)["hosts"][0]["status"]
        return told

    def stands(self) -> tuple[list[str], bool]:
        """(the generation of each node, whether they stand on one deploy)."""
        told = self.status()
        every = [told, *told["others"]]
        return [one["generation"] for one in every], "mixed" not in str(told["unproven"])

    def answers(self, prompts: Sequence[Asked]) -> list[list[int]]:
        """What the service generates, greedily."""
        with connect(resolve(load_workspace(self.made.path), LEAD).host) as transport, transport.forward(PORT) as url:
            return generated(url, prompts)

    def settled(self, generations: list[str]) -> bool:
        """Whether both nodes come to stand on these, proven and with nothing under way, and rank 0 answers."""

        def there() -> bool:
            told = self.status()
            every = [told, *told["others"]]
            proven = all(one["unproven"] is None and one["state"] == "active" for one in every)
            stand = [one["generation"] for one in every] == generations
            return proven and stand and generated_or_none(self, [WHAT]) is not None

        with contextlib.suppress(HarnessError):
            wait_for("the service to stand", there, RECOVERS_S)
            return True
        return False

    def journal(self, host: TestHost) -> tuple[str | None, list[tuple[str, str]]]:
        """The newest transaction that was accepted, and the steps and events of its entries."""
        lines = host.sh(f"cat /opt/ddtree/services/{SERVICE}/journal.jsonl 2>/dev/null || true").splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        txn = next((one["txn"] for one in reversed(entries) if one["step"] == "accept"), None)
        return txn, [(one["step"], one["event"]) for one in entries if one["txn"] == txn]

    def deploying(self, profile: str) -> subprocess.Popen[str]:
        """A deploy that goes on beside us."""
        self.earlier = self.journal(self.lead)[0]
        return subprocess.Popen(
            [*self.made.program, *DEPLOY, profile],
            cwd=self.made.path,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.made.environment,
        )

    def at(self, host: TestHost, step: str, event: str = "begin") -> None:
        """Wait until the deploy that was begun last is there."""

        def there() -> bool:
            txn, entries = self.journal(host)
            return txn != self.earlier and (step, event) in entries

        wait_for(f"{step} {event} on {host.name}", there, 300)


def generated(url: str, prompts: Sequence[Asked]) -> list[list[int]]:
    found = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for ids in prompts:
            asked = {**ids, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS}}
            answer = client.post("/generate", json=asked)
            answer.raise_for_status()
            found.append(answer.json()["output_ids"])
    return found


def generated_or_none(run: Run, prompts: Sequence[Asked]) -> list[list[int]] | None:
    try:
        return run.answers(prompts)
    except (DdtreeError, httpx.HTTPError):
        return None


def prepare(folder: Path, hosts: dict[str, TestHost]) -> Workspace:
    """The workspace: one service over both hosts."""
    made = Workspace(folder, dict.fromkeys(hosts.values(), "root"), base="short")
    gate = {"max_new_tokens": 16, "concurrency": [1, 4], "prompts": "gate.jsonl"}
    (folder / "gate.jsonl").write_text("".join(f'{{"input_ids": [{n}, 7, 300, {n}]}}\n' for n in range(20, 40)))
    made.profile("short", extends="tiny", tp=2, context_length=512, min_accept_length=None, exactness=gate,
                 load_timeout_s=90, stop_timeout_s=20)  # fmt: skip
    made.profile("narrow", extends="b8k4", budget=4)
    made.profile("wide", extends="b16k4")
    made.profile("broken", extends="b8k4", extra_args=["--no-such-argument"])
    file = folder / "inventories" / f"{LEAD}.yaml"
    inventory = yaml.safe_load(file.read_text())
    ranks = [{"host": name, "address": host.address} for name, host in hosts.items()]
    inventory["services"][SERVICE]["nodes"] = {"port": MEETING, "ranks": ranks}
    file.write_text(yaml.safe_dump(inventory))
    file = folder / "inventories" / f"{OTHER}.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "services": {}}))
    made.git("add", "-A")
    made.git("commit", "-qm", "One service over two hosts")
    return made


def main_job(run: Run) -> None:
    """Deploy from nothing, compare with one rank, look from outside, change, go back."""
    began = time.monotonic()
    told = run.made.json(*DEPLOY, "b8k4")["hosts"][0]["outcome"]
    run.tell("deploy from nothing", f"{told['result']}, {told['verdict']['kind']}, {time.monotonic() - began:.0f} s",
             told["verdict"]["kind"] == "EXACT" and run.settled(["1", "1"]))  # fmt: skip

    texts = [prompt.text for prompt in builtin_prompts() if prompt.text is not None][:PROMPTS]
    prompts: list[Asked] = [{"text": text} for text in texts]
    shape = ("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(PAIR / "draft"),
             "--speculative-ddtree-budget", "8", "--speculative-ddtree-topk", "4")  # fmt: skip
    with tempfile.TemporaryDirectory() as log:
        alone = Engine(Path(log, "log"), "--model-path", str(PAIR / "target"), *shape)
        try:
            expected = generated(str(alone.wait_ready().client.base_url), prompts)
        finally:
            alone.close()
    same = sum(one == other for one, other in zip(run.answers(prompts), expected, strict=True))
    run.tell(
        "tokens of two ranks and of one",
        f"{same} of {len(prompts)} answers are the same",
        same == len(prompts) == PROMPTS,
    )

    ports = {"its own": PORT, "the ranks' meeting": MEETING}
    outside = run.lab.host("elsewhere")
    run.lab.join()
    for name, port in ports.items():
        reached = outside.run(["timeout", "3", "bash", "-c", f"</dev/tcp/{run.lead.address}/{port}"]).returncode == 0
        near = run.other.run(["timeout", "3", "bash", "-c", f"</dev/tcp/{run.lead.address}/{port}"]).returncode == 0
        run.tell(f"{name} port from a host that is no node", "reached" if reached else "not reached", not reached)
        if name != "its own":
            run.tell(f"{name} port from the other node", "reached" if near else "not reached", near)
    outside.down()

    told = run.made.json(*DEPLOY, "b8k4")["hosts"][0]["outcome"]
    run.tell("the same again", told["result"], told["result"] == "unchanged")
    told = run.made.json(*DEPLOY, "narrow")["hosts"][0]["outcome"]
    run.tell("another shape", told["result"], told["result"] == "confirmed" and run.settled(["2", "2"]))
    told = run.made.json("rollback", "--host", OTHER, "--service", SERVICE, "--yes")["hosts"][0]["outcome"]
    run.tell("rollback, named by the other node", told["result"], run.settled(["1", "1"]))
    lines = run.made.ddtree("logs", "--host", LEAD, "-n", "3").stdout.splitlines()
    named = {line.partition(":")[0] for line in lines}
    run.tell("logs", f"lines of {' and '.join(sorted(named))}", named == {LEAD, OTHER})


def failing(run: Run) -> None:
    """Each way to fail before the confirm brings both back."""
    code = run.made.ddtree(*DEPLOY, "broken", code=5).returncode
    run.tell("an engine that does not start", f"exit {code}", run.settled(["1", "1"]))

    def killed(what: str, host: TestHost, script: str) -> None:
        deploy = run.deploying("wide")
        run.at(host, "gate")
        host.sh(script)
        said = deploy.communicate(timeout=600)[0]
        right = deploy.returncode == 5 and run.settled(["1", "1"])
        run.tell(what, f"exit {deploy.returncode}", right)
        if not right:
            print(said)

    for host in (run.lead, run.other):
        rank = int(host is run.other)
        engine = f"systemctl show -p MainPID --value {SERVICE}"
        killed(f"rank {rank}'s engine killed during the gate", host, f"kill -9 $({engine})")
        killed(f"rank {rank}'s applier killed during the gate", host, f"kill -9 $({APPLIER})")

    deploy = run.deploying("wide")
    run.at(run.other, "gate")
    deploy.kill()
    deploy.communicate()
    run.tell("the client killed during the gate", "its leases ended", run.settled(["1", "1"]))

    deploy = run.deploying("wide")
    run.at(run.other, "gate")
    run.other.powerloss()
    time.sleep(2)
    run.other.up()
    run.lab.join()
    deploy.communicate(timeout=600)
    run.tell("power loss of rank 1 during the gate", f"exit {deploy.returncode}",
             deploy.returncode in (5, 6) and run.settled(["1", "1"]))  # fmt: skip

    deploy = run.deploying("wide")
    run.at(run.other, "start")
    run.other.cut()
    with uncut_later(run, run.other, 90):
        deploy.communicate(timeout=600)
    run.tell("rank 1 cut off from the client and the other rank for 90 s", f"exit {deploy.returncode}",
             deploy.returncode in (5, 6) and run.settled(["1", "1"]))  # fmt: skip


@contextlib.contextmanager
def uncut_later(run: Run, host: TestHost, seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    try:
        yield
    finally:
        time.sleep(max(0.0, until - time.monotonic()))
        host.uncut()
        run.lab.join()  # its routes went with the link


def mixed(run: Run) -> None:
    """The one window: rank 0 out of reach after rank 1 has confirmed. Said, seen, never served, mended."""
    deploy = run.deploying("wide")
    run.at(run.other, "gate")
    run.other.sh(f"kill -STOP $({APPLIER})")
    verdict = f"ls /opt/ddtree/services/{SERVICE}/txn/*/verdict.json 2>/dev/null | wc -l"
    before = run.other.sh(verdict)
    wait_for("the verdict to reach rank 1", lambda: run.other.sh(verdict) != before, 300)
    run.lead.cut()
    run.other.sh(f"kill -CONT $({APPLIER})")
    said = deploy.communicate(timeout=600)[0]
    run.lead.uncut()
    run.lab.join()
    right = deploy.returncode == 9 and "is mixed" in said
    run.tell("rank 0 cut off after rank 1 confirmed", f"exit {deploy.returncode}", right)
    if not right:
        print(said)
    stood, whole = run.stands()
    served = generated_or_none(run, [WHAT])
    run.tell("status then", f"generations {' and '.join(stood)}, {'one deploy' if whole else 'mixed'}", not whole)
    run.tell("requests then", "answered" if served else "not answered", served is None)
    refused = run.made.ddtree("verify-exactness", "--host", LEAD, code=1)
    run.tell("verify-exactness then", "refused", "mixed" in refused.stderr)
    told = run.made.json(*DEPLOY, "wide")["hosts"][0]["outcome"]
    run.tell(
        "the next deploy",
        f"{told['result']}, {told['verdict']['kind']}",
        run.stands()[1] and bool(run.answers([WHAT])),
    )


def later(run: Run) -> None:
    """In peace: a reboot, stop and start, a sweep."""
    stood = run.stands()[0]
    run.other.powerloss()
    run.other.up()
    run.lab.join()
    run.tell("rank 1 restarts in peace", "the service is back by itself", run.settled(stood))
    run.made.ddtree("stop", "--host", LEAD, "--yes")
    told = run.status()
    states = [told["state"], told["others"][0]["state"]]
    run.tell("stop", " and ".join(states), states == ["inactive", "inactive"])
    run.made.ddtree("start", "--host", LEAD, "--yes")
    run.tell("start", "both", run.settled(stood))
    run.made.ddtree(
        "sweep", "--host", LEAD, "--pair", "8/4", "-c", "1", "--max-tokens", "32", "--no-chain", "--repeats", "3",
        "--run", "sweep", "--yes", timeout=1200,
    )  # fmt: skip
    cells = [json.loads(line) for line in (run.made.path / "sweep" / "records.jsonl").read_text().splitlines()]
    ended = [one["status"] for one in cells if one.get("type") == "measured" or "status" in one]
    run.tell("a sweep over AR and 8/4", f"{ended.count('ok')} of {len(ended)} cells measured",
             bool(ended) and set(ended) == {"ok"} and run.settled(stood))  # fmt: skip
    checks = run.made.ddtree("doctor", "--host", LEAD, "--profile", "wide", "--json", code=0)
    seen = [one["host"] for one in json.loads(checks.stdout)["hosts"]]
    run.tell("doctor", f"looks at {' and '.join(seen)}", seen == [LEAD, OTHER])


def main() -> int:
    chosen = sys.argv[1:] or ["failing", "mixed", "later"]
    with laboratory() as lab, tempfile.TemporaryDirectory() as folder:
        hosts = {name: lab.host(name) for name in (LEAD, OTHER)}
        lab.join()
        run = Run(lab, hosts, prepare(Path(folder), hosts))
        main_job(run)
        for name in chosen:
            {"failing": failing, "mixed": mixed, "later": later}[name](run)
    print(f"{sum(run.rows)} of {len(run.rows)} rows as declared")
    return 0 if all(run.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
