"""The exactness gate's own memory and time.

python -m benchmarks.gate memory        peak memory of the gate by the number of prompts (a scripted server answers)
python -m benchmarks.gate default       a profile's default gate against the reference engine at 16/4 (one thread)
"""

from __future__ import annotations

import json
import os
import platform
import random
import resource
import socket
import subprocess
import sys
import time

from ddtree_ops.exactness import GatePlan, Kind, Prompt, run_gate

COUNTS = (10, 100, 1000)
PROMPT_TOKENS, NEW_TOKENS, VOCABULARY, SEED = 64, 8, 2048, 20261130


def one(count: int, url: str) -> None:
    """A gate of ``count`` prompts in this process; prints its own peak."""
    draw = random.Random(SEED)
    ids = [tuple(draw.choices(range(VOCABULARY), k=PROMPT_TOKENS)) for _ in range(count)]
    prompts = [Prompt(id=f"p{n}", kind="random", input_ids=one) for n, one in enumerate(ids)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = GatePlan(
        url=url,
        algorithm="ddtree",
        dtype="float32",
        policy="exact",
        epsilon_roundings=2,
        concurrency=(1, 8),
        prompts=prompts,
        max_new_tokens=NEW_TOKENS,
        vocab_size=VOCABULARY,
        time_limit_s=3600,
    )
    verdict = run_gate(plan)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"kind": str(verdict.kind), "judged": verdict.counts.judged, "before": before, "after": after}))
    if verdict.kind is not Kind.EXACT:
        raise SystemExit("\n".join(verdict.lines()))


def memory() -> None:
    """One process a count, so that no peak hides in an earlier one's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "tests.hosts.matrix.scripted", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", "float32", "--speculative-algorithm", "DDTREE"]
    argv += ["--speculative-ddtree-budget", "8", "--speculative-ddtree-topk", "4"]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        print("| prompts | judged tokens | peak before, MiB | peak after, MiB | verdict |\n|---|---|---|---|---|")
        for count in COUNTS:
            child = [sys.executable, "-m", "benchmarks.gate", "one", str(count), f"http://127.0.0.1:{port}"]
            told = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout)
            mib = {key: f"{told[key] / 1024:.1f}" for key in ("before", "after")}
            print(f"| {count} | {told['judged']} | {mib['before']} | {mib['after']} | {told['kind']} |", flush=True)
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    """Until something listens there; raises TimeoutError."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError("the server does not listen")


def default() -> None:
    """What a deploy pays: the default methods, loads and prompts; the engine is up already."""
    from ddtree_ops.deploy.gate import gate_plan
    from tests.detector.cases import TREE
    from tests.detector.run import engine, profile

    chosen = profile(TREE, "float32")
    with engine(TREE, "float32") as url:
        plan = gate_plan(chosen, url, {}, None)
        verdict = run_gate(plan)
    counts = verdict.counts
    loads = f"C = {', '.join(map(str, plan.concurrency))} and a mix"
    tokens = f"{counts.generated} tokens generated, {counts.prefilled} prefilled"
    time_ = f"{verdict.seconds:.1f} s on {os.cpu_count()} cores, the engine on one of them"
    print(f"{verdict.kind}: {len(plan.prompts)} prompts, {loads}, {tokens}, {time_}")


def main() -> None:
    what = sys.argv[1:2]
    print(f"python -m benchmarks.gate {' '.join(what)}: Python {platform.python_version()}\n", end="", file=sys.stderr)
    if what == ["one"]:
        one(int(sys.argv[2]), sys.argv[3])
    elif what == ["memory"]:
        memory()
    elif what == ["default"]:
        default()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
