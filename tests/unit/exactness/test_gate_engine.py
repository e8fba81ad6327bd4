"""The gate against the reference engine with the tiny pair: healthy in every mode, and each planted fault caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddtree_ops.exactness import PROMPT_SET, GatePlan, Kind, builtin_prompts, run_gate
from ddtree_ops.exactness.plan import Tree
from tests.longer import longer

ROOT = Path(__file__).parents[3]
PAIR = ROOT / "ddtree_ops" / "engine" / "pair"
DRAFT = ["--speculative-draft-model-path", str(PAIR / "draft")]
TREE = [
    "--speculative-algorithm",
    "DDTREE",
    "--speculative-ddtree-budget",
    "8",
    "--speculative-ddtree-topk",
    "4",
    *DRAFT,
]

# No limit here is a promise: they end what hangs, also where others work on the same cores.
TIME_LIMIT_S = 500
# The gate prefills a prompt that ends at the context's limit, at every load: most of its work at the pair's own 2,048,
# and the same code at a limit that all prompts stay below. What is healthy runs once at the pair's own in each mode.
SHORT_CONTEXT = ["--context-length", "512"]
pytestmark = [
    pytest.mark.skipif(not PAIR.is_dir(), reason="the tiny pair is not in this checkout"),
    pytest.mark.timeout(600),
]


@contextmanager
def engine(*arguments: str) -> Iterator[str]:
    """The URL of an engine with the tiny pair on a free port."""
    command = [
        sys.executable,
        "-m",
        "ddtree_ops.engine",
        "--model-path",
        str(PAIR / "target"),
        "--port",
        "0",
        *arguments,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        url, seen = None, []
        for line in process.stdout:
            seen.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                url = found.group()
                break
        assert url, "".join(seen)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(url + "/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def plan(url: str, algorithm: str, **changes: Any) -> GatePlan:
    fields: dict[str, Any] = {
        "url": url,
        "algorithm": algorithm,
        "dtype": "float32",
        "policy": "exact",
        "epsilon_roundings": 2,
        "concurrency": (1, 8),
        "max_new_tokens": 32,
        "prompts": builtin_prompts(),
        "prompt_set": PROMPT_SET,
        "time_limit_s": TIME_LIMIT_S,
    }
    return GatePlan(**(fields | changes))


@pytest.mark.parametrize(
    ("algorithm", "arguments", "expect"),
    [
        pytest.param("none", [], {"speculative_algorithm": None}, marks=pytest.mark.slow),
        longer("dflash", ["--speculative-algorithm", "DFLASH", *DRAFT], {"speculative_algorithm": "DFLASH"}),
        ("ddtree", TREE, {"speculative_ddtree_budget": 8, "speculative_ddtree_topk": 4}),
    ],
)
def test_a_healthy_engine_is_exact(algorithm: str, arguments: list[str], expect: dict[str, Any]) -> None:
    with engine(*arguments) as url:
        verdict = run_gate(plan(url, algorithm, expect=expect))
    assert verdict.kind is Kind.EXACT, "\n".join(verdict.lines())
    assert all(run.judged >= 24 * 20 for run in verdict.runs if not run.mixed)
    assert (verdict.accept_length or 9.0) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("budget", [longer(1), longer(7), 8, longer(63), longer(64), 65])
def test_a_healthy_engine_is_exact_at_the_edges_of_the_budget(budget: int) -> None:
    """block_size is 8; 63, 64 and 65 lie about the width of a mask's machine word."""
    arguments = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(budget), *DRAFT]
    with engine(*arguments, "--speculative-ddtree-topk", "4", *SHORT_CONTEXT) as url:
        tree = Tree(block_size=8, budget=budget, topk=4)
        verdict = run_gate(plan(url, "ddtree", tree=tree, prompts=builtin_prompts()[::3], max_new_tokens=24))
    assert verdict.kind is Kind.EXACT, "\n".join(verdict.lines())
    assert verdict.executed is not None and verdict.executed.nodes == budget


LADDER = "2:4,6:0"


@pytest.mark.slow
@pytest.mark.parametrize(("told", "kind"), [(LADDER, Kind.EXACT), ("2:3,6:0", Kind.FAIL)])
def test_an_engine_with_a_ladder_is_exact_and_held_to_its_rungs(told: str, kind: Kind) -> None:
    arguments = [*TREE, "--speculative-ddtree-ladder", LADDER, *SHORT_CONTEXT]
    with engine(*arguments) as url:
        tree = Tree(block_size=8, budget=8, topk=4, ladder=told)
        expect = {"speculative_ddtree_ladder": LADDER}
        prompts = builtin_prompts()[::3]
        verdict = run_gate(plan(url, "ddtree", tree=tree, expect=expect, prompts=prompts, max_new_tokens=24))
    assert verdict.kind is kind, "\n".join(verdict.lines())
    assert {reason.code for reason in verdict.reasons if reason.effect == "fail"} <= {"executed-nodes"}


@pytest.mark.slow
def test_bfloat16_is_at_most_near_ties() -> None:
    with engine("--dtype", "bfloat16", *TREE, *SHORT_CONTEXT) as url:
        verdict = run_gate(plan(url, "ddtree", dtype="bfloat16", policy="near-tie", prompts=builtin_prompts()[::2]))
    assert verdict.kind in (Kind.EXACT, Kind.NEAR_TIE) and verdict.passed(), "\n".join(verdict.lines())


@pytest.mark.parametrize("fault", ["mask-rows-by-block-size", longer("rope-by-index")])
def test_a_planted_fault_fails(fault: str) -> None:
    with engine(*TREE, "--fault", fault, *SHORT_CONTEXT) as url:
        verdict = run_gate(plan(url, "ddtree", prompts=builtin_prompts()[::2]))
    assert verdict.kind is Kind.FAIL and verdict.exit_code() == 4
    assert verdict.findings[0].position < 32 and (verdict.findings[0].gap or 0) > 100 * verdict.epsilon
    assert any(line.strip().startswith("after") for line in verdict.lines())
