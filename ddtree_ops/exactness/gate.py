"""The gate: preflight, the methods, the verdict, all inside one time limit."""

from __future__ import annotations

import asyncio
import contextlib
import time

import httpx

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness import judge, namespaces, structure
from ddtree_ops.exactness.against import BASELINE
from ddtree_ops.exactness.client import Server, Trouble, plain
from ddtree_ops.exactness.conclude import conclude
from ddtree_ops.exactness.evidence import Evidence, Tally, differing_arguments
from ddtree_ops.exactness.golden import Recording
from ddtree_ops.exactness.plan import METHODS, GatePlan, check_plan
from ddtree_ops.exactness.prompts import PROMPT_SET, builtin_prompts
from ddtree_ops.exactness.rounds import Rounds
from ddtree_ops.exactness.verdict import Verdict
from ddtree_ops.exactness.work import Facts, Progress, TooMuchTrouble

SHAPE_KEYS = (
    "speculative_algorithm",
    "speculative_ddtree_budget",
    "speculative_ddtree_ladder",
    "speculative_ddtree_topk",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "dtype",
    "tp_size",
    "max_running_requests",
    "version",
)
LARGEST_PAGE = 64
"""Of a cache that does not tell its page size: a multiple of the usual ones."""


def run_gate(plan: GatePlan, progress: Progress | None = None, recording: Recording | None = None) -> Verdict:
    """Asks the server at ``plan.url`` and judges its answers. Blocks up to ``plan.time_limit_s``.

    Whatever the server does ends in a verdict, never an exception. Raises UsageError for a plan that could not give a
    verdict on any server. ``progress(what, done, total)`` is called after every step; ``recording`` collects the
    outputs. Not to be called from inside a running event loop.
    """
    check_plan(plan)
    for url in (plan.url, plan.baseline or plan.url):
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(f"exactness: url {url!r}: {error}") from error
    return asyncio.run(_gate(plan, progress, recording))


async def _gate(plan: GatePlan, progress: Progress | None, recording: Recording | None) -> Verdict:
    begun = time.monotonic()
    eps = judge.epsilon(plan.dtype, plan.epsilon_roundings, plan.logit_scale)
    evidence = Evidence(plan=plan, epsilon=eps, tallies={load: Tally() for load in plan.loads})
    evidence.methods = plan.greedy_methods or METHODS[:1]
    packaged = list(plan.prompts) == builtin_prompts()
    evidence.prompt_set = plan.prompt_set or (PROMPT_SET if packaged else "own prompts")
    if plan.dtype == "auto":
        evidence.reason("note", "dtype-auto", "dtype auto is judged with bfloat16's epsilon")
    connections = max(plan.concurrency)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(plan.url, api_key=plan.api_key, connections=connections))
        try:
            async with asyncio.timeout(plan.time_limit_s):
                facts = await _preflight(server, plan, evidence)
                baseline = None
                if plan.baseline is not None:
                    baseline = Server(plan.baseline, api_key=None, connections=connections)
                    await _check_baseline(await stack.enter_async_context(baseline), evidence)
                await Rounds(server, evidence, facts, progress, baseline, recording).run()
        except TimeoutError:
            message = f"no verdict within the time limit of {plan.time_limit_s:g} s"
            evidence.reason("inconclusive", "time-limit", message)
        except Trouble as trouble:
            evidence.reason("inconclusive", trouble.code, trouble.message)
        except TooMuchTrouble:
            evidence.reason("inconclusive", "given-up", f"given up after {evidence.troubles} requests that failed")
        return conclude(
            evidence,
            seconds=time.monotonic() - begun,
            requests=server.requests,
            generated=server.generated,
            prefilled=server.prefilled,
        )


async def _check_baseline(baseline: Server, evidence: Evidence) -> None:
    """A baseline that speculates is one more suspect and no reference. Raises Trouble."""
    info = await baseline.info("server_info")
    if info.get("speculative_algorithm") not in (None, "", "NONE"):
        algorithm = plain(str(info["speculative_algorithm"]))
        raise Trouble("baseline-speculates", f"the baseline speculates itself ({algorithm}): it proves nothing")
    evidence.methods = (*evidence.methods, BASELINE)


async def _preflight(server: Server, plan: GatePlan, evidence: Evidence) -> Facts:
    """Compares the resolved arguments and learns what the method needs to know. Raises Trouble."""
    info = await server.info("server_info")
    for line in differing_arguments(plan.expect, info):
        evidence.reason("fail", f"argument:{line.split(' ', 1)[0]}", f"resolved arguments differ: {line}")
    for key in SHAPE_KEYS:
        value = info.get(key)
        if isinstance(value, str | int):
            evidence.shape[key] = plain(value) if isinstance(value, str) else value
    evidence.executed_told = structure.told(info)
    running = _size(info.get("max_running_requests"))
    if running is not None and running < max(plan.concurrency):
        message = f"the server runs at most {running} requests at once, so C={max(plan.concurrency)} was not reached"
        evidence.reason("note", "concurrency-capped", message)
    vocab = plan.vocab_size or _size(info.get("vocab_size"))
    if vocab is None:
        vocab = await _vocabulary(server)
    refused = await server.scores()
    if refused is not None:
        evidence.methods = _without_logprobs(plan, evidence, refused)
    contexts = [_size(info.get(key)) for key in ("context_length", "max_req_input_len", "max_total_num_tokens")]
    facts = Facts(
        vocab_size=vocab,
        context=min((c for c in contexts if c), default=None),
        tokenizer=await _tokenizer(server, plan, evidence, info, refused is None),
        logprobs=refused is None,
        methods=evidence.methods,
        page=_size(info.get("page_size")) or LARGEST_PAGE,
    )
    await namespaces.judge(server, evidence, facts)
    return facts


def _without_logprobs(plan: GatePlan, evidence: Evidence, refused: str) -> tuple[str, ...]:
    """The methods on a server that refuses logprobs: the default falls back, one that needs them raises Trouble."""
    for method in plan.methods:
        if method in ("self-score", "distribution"):
            raise Trouble("logprobs-refused", f"{method} needs logprobs, and the server refuses them: {refused}")
    if not plan.greedy_methods:
        message = f"judged by replay: the server refuses logprobs ({refused})"
        evidence.reason("note", "logprobs-refused", message)
    if plan.dtype != "float32":
        message = "replay tells no gaps: a difference counts as a near-tie, and more of them than rounding makes fail"
        evidence.reason("note", "no-gaps", message)
    return plan.greedy_methods or ("replay",)


async def _tokenizer(
    server: Server, plan: GatePlan, evidence: Evidence, info: dict[str, object], logprobs: bool
) -> bool:
    """Whether the server turns texts into ids; without, prompts are stand-ins and a note says so."""
    why = "the server skips its tokenizer" if info.get("skip_tokenizer_init") is True else None
    if all(prompt.input_ids is not None for prompt in plan.prompts):
        return why is None
    if why is None and not logprobs:
        try:
            await server.encode("a", by_scoring=False)
        except Trouble as trouble:
            if not trouble.code.startswith("http-4"):
                raise
            why = "the server has no /tokenize"
    if why is not None:
        evidence.prompt_set += ", as pseudo-random ids"
        message = f"{why}: prompts are pseudo-random ids below its vocabulary, not their texts"
        evidence.reason("note", "no-tokenizer", message)
    return why is None


async def _vocabulary(server: Server) -> int | None:
    """From /model_info, which not every server has: without it the vocabulary stays unknown."""
    try:
        return _size((await server.info("model_info")).get("vocab_size"))
    except Trouble as trouble:
        if trouble.code == "http-404":
            return None
        raise


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
