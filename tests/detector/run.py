"""One gate run against one engine, through the plan that the CLI makes of a profile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from ddtree_ops.deploy.gate import gate_plan
from ddtree_ops.engine.faults import Fault
from ddtree_ops.exactness import Prompt, Verdict, builtin_prompts, run_gate
from ddtree_ops.exactness.golden import Golden, Identity, Recording
from ddtree_ops.model import Profile, load_workspace, resolve
from ddtree_ops.units import expectations
from tests.detector.cases import AR, Shape
from tests.unit.engine.process import REPOSITORY, Engine

PAIR = REPOSITORY / "ddtree_ops" / "engine" / "pair"
TIME_LIMIT_S = 900
BATCHES = 12
REPLAY_PROMPTS, REPLAY_TOKENS = 8, 32

Prompts = Sequence[Prompt]


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: on which engine, by which methods; ``batch`` names the prompts (0: the packaged set)."""

    shape: Shape
    dtype: str
    fault: Fault | None = None
    methods: tuple[str, ...] = ()
    batch: int = 0

    def __str__(self) -> str:
        return f"{self.fault or 'healthy'} at {self.shape} {self.dtype} {'+'.join(self.methods)} batch {self.batch}"


@contextmanager
def engine(shape: Shape, dtype: str, fault: Fault | None = None) -> Iterator[str]:
    """The URL of an engine with the shipped pair."""
    arguments = ["--model-path", str(PAIR / "target"), "--dtype", dtype]
    if shape.drafts:
        arguments += ["--speculative-algorithm", shape.algorithm.upper()]
        arguments += ["--speculative-draft-model-path", str(PAIR / "draft")]
    if shape.budget is not None:
        arguments += ["--speculative-ddtree-budget", str(shape.budget), "--speculative-ddtree-topk", str(shape.topk)]
    if fault is not None:
        arguments += ["--fault", fault]
    with TemporaryDirectory() as folder:
        running = Engine(Path(folder, "log"), *arguments)
        try:
            yield str(running.wait_ready().client.base_url)
        finally:
            running.close()


def profile(shape: Shape, dtype: str) -> Profile:
    """The profile `tiny` of this workspace in that shape; in 16 bits judged as `kimi-k26` is."""
    workspace = load_workspace(REPOSITORY)
    tiny = resolve(workspace, "local", None, "b16k4" if shape.budget else "chain" if shape.drafts else "ar").profile
    exactness = tiny.exactness
    if dtype != "float32":
        other = resolve(workspace, "b300").profile.exactness
        exactness = msgspec.structs.replace(exactness, policy=other.policy, epsilon_roundings=other.epsilon_roundings)
    changed = {"budget": shape.budget, "topk": shape.topk} if shape.budget else {}
    floor = None if shape.budget == 1 else tiny.min_accept_length  # one node cannot reach it
    return msgspec.structs.replace(tiny, dtype=dtype, exactness=exactness, min_accept_length=floor, **changed)


def prompts(batch: int) -> Prompts:
    """Batch 0 is the packaged set; in 1 to BATCHES it and the pair's 50 held-out texts are dealt out."""
    if batch == 0:
        return builtin_prompts()
    held_out = json.loads((PAIR / "held_out.json").read_bytes())
    every = builtin_prompts()
    every += [
        Prompt(id=f"held-out-{one['i']}", kind="held-out", input_ids=tuple(one["prompt_ids"])) for one in held_out
    ]
    return every[batch - 1 :: BATCHES]


def record_tokens(dtype: str, batch: int) -> Golden:
    """What the healthy engine answers without speculation, as `verify-exactness --record` has it."""
    recording = _record(AR, dtype, batch)
    return Golden(
        format=1,
        identity=Identity(model={}, dtype=dtype, arch="", tp=1, engine_base="", prompts="", max_new_tokens=64),
        prompts=recording.prompts,
        sampling=recording.sampling,
        sampled=recording.sampled,
    )


def record_counts(shape: Shape, batch: int) -> dict[str, int]:
    """Verify steps of the healthy engine's answers in that shape, float32, by prompt."""
    return _record(shape, "float32", batch).verify_counts


def _record(shape: Shape, dtype: str, batch: int) -> Recording:
    """Raises RuntimeError where the healthy engine does not pass."""
    recording = Recording()
    with engine(shape, dtype) as url:
        plan = gate_plan(profile(shape, dtype), url, {}, None)
        plan = dataclasses.replace(plan, prompts=prompts(batch), mixed=False, concurrency=(1,))
        verdict = run_gate(dataclasses.replace(plan, time_limit_s=TIME_LIMIT_S), recording=recording)
    if not verdict.passed():
        raise RuntimeError(f"{shape} {dtype} is no reference:\n" + "\n".join(verdict.lines()))
    return recording


def run(case: Case, url: str, golden: Golden | None) -> Verdict:
    """The gate's verdict on the engine at ``url``."""
    chosen = profile(case.shape, case.dtype)
    plan = gate_plan(chosen, url, expectations(chosen), None)
    plan = dataclasses.replace(
        plan, prompts=prompts(case.batch), methods=case.methods, golden=golden, time_limit_s=TIME_LIMIT_S
    )
    if case.methods == ("replay",):
        few = prompts(case.batch)[:REPLAY_PROMPTS]
        plan = dataclasses.replace(plan, prompts=few, max_new_tokens=REPLAY_TOKENS, mixed=False)
    return run_gate(plan)
