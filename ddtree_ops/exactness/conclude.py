"""The step from what a run has seen to its verdict; nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddtree_ops.exactness import judge, structure
from ddtree_ops.exactness.evidence import MIN_DISTINCT_PROMPTS, Evidence
from ddtree_ops.exactness.plan import ROUTED, GatePlan, Load
from ddtree_ops.exactness.verdict import FORMAT, MAX_REASONS, Counts, Finding, Kind, Reason, RunCounts, Shown, Verdict

MIN_STEPS = 32
MIN_SAME_TOKENS = 8


def conclude(evidence: Evidence, *, seconds: float, requests: int, generated: int, prefilled: int) -> Verdict:
    """The verdict on what was seen. FAIL needs proof and then wins; else whatever is missing is INCONCLUSIVE."""
    plan = evidence.plan
    findings = _without_outliers(evidence)
    first = evidence.methods[0] if evidence.methods else ""
    runs = [tally.counts(load, evidence.judged(first, load)) for load, tally in evidence.tallies.items()]
    reasons = (
        evidence.reasons()
        + _of_speculation(plan, runs)
        + _of_structure(evidence)
        + _of_amount(evidence)
        + _of_output(evidence)
    )
    steps = sum(run.verify_steps for run in runs)
    counts = Counts(
        prompts=evidence.prompts,
        requests=requests,
        generated=generated,
        prefilled=prefilled,
        judged=sum(run.judged for run in runs),
        compared=evidence.compared,
        differing=evidence.differing,
        second_turns=evidence.second_turns,
        second_turns_cached=evidence.second_turns_cached,
        second_turns_differing=evidence.second_turns_differing,
        findings=evidence.findings,
        verify_counts=evidence.verify_counts,
    )
    return Verdict(
        format=FORMAT,
        kind=_kind(reasons, findings),
        policy=plan.policy,
        algorithm=plan.algorithm,
        dtype=plan.dtype,
        epsilon=evidence.epsilon,
        shape=evidence.shape,
        prompt_set=evidence.prompt_set,
        max_new_tokens=plan.max_new_tokens,
        accept_length=round(sum(run.generated for run in runs) / steps, 4) if steps else None,
        reasons=sorted(reasons, key=lambda r: ("fail", "inconclusive", "note").index(r.effect))[:MAX_REASONS],
        findings=findings,
        runs=runs,
        counts=counts,
        seconds=round(seconds, 3),
        methods=evidence.method_counts(),
        executed=_shown(evidence),
    )


def _without_outliers(evidence: Evidence) -> list[Finding]:
    """The findings, those of a few tokens beyond epsilon as near-ties where rounding explains them (judge.OUTLIERS)."""
    limit = judge.outlier_limit(evidence.plan.dtype, evidence.plan.logit_scale)
    found = evidence.kept_findings()
    beyond: dict[tuple[str, Load], list[Finding]] = {}
    for one in found:
        if one.severity == "fail":
            beyond.setdefault((one.method, Load(one.concurrency, one.mixed)), []).append(one)
    forgiven: set[int] = set()
    for (method, load), group in beyond.items():
        judged = evidence.judged(method, load)
        if max(len(group), judged.beyond) > judge.OUTLIERS:
            continue
        # Where the token is the target's choice, the gap is the distance of two logprobs, which has its own tolerance.
        if all(one.gap is not None and one.gap <= limit and one.got != one.expected for one in group):
            forgiven |= {id(one) for one in group}
            message = (
                f"{method} at {load}: {len(group)} tokens beyond epsilon, within {limit:.3g} nat: rounding's outliers"
            )
            evidence.reason("note", "outliers", message)
            evidence.forgive(method, load)
    return [msgspec.structs.replace(one, severity="near-tie") if id(one) in forgiven else one for one in found]


def _kind(reasons: Sequence[Reason], findings: Sequence[Finding]) -> Kind:
    effects = {reason.effect for reason in reasons}
    severities = {found.severity for found in findings}
    if "fail" in effects or "fail" in severities:
        return Kind.FAIL
    if "inconclusive" in effects:
        return Kind.INCONCLUSIVE
    return Kind.NEAR_TIE if severities else Kind.EXACT


def _of_speculation(plan: GatePlan, runs: Sequence[RunCounts]) -> list[Reason]:
    steps = sum(run.verify_steps for run in runs)
    generated = sum(run.generated for run in runs)
    requests = sum(run.requests for run in runs)
    if generated < judge.MIN_JUDGED or plan.algorithm == ROUTED:
        return []
    if plan.algorithm == "none":
        if steps:
            return [_fail("speculation-on", f"the profile says none, yet the server counts {steps} verify steps")]
        return []
    if not steps:
        return [_fail("speculation-off", f"no verify steps in {requests} replies: {plan.algorithm} is silently off")]
    # The first token of every output comes from its prefill, the others from verify steps.
    if steps >= MIN_STEPS and generated - requests <= 1.005 * steps:
        message = (
            f"accept length 1.00: {generated - requests} tokens in {steps} verify steps, so no draft is ever taken"
        )
        return [_fail("speculation-off", message)]
    accept = generated / steps
    if plan.min_accept_length is not None and steps >= MIN_STEPS and accept < plan.min_accept_length:
        floor = f"accept length {accept:.2f} is under the profile's floor of {plan.min_accept_length:g}"
        return [_fail("accept-length", floor)]
    return []


def _of_structure(evidence: Evidence) -> list[Reason]:
    plan = evidence.plan
    if plan.algorithm != "none" and plan.tree is None:
        return []
    reasons = [_fail(code, message) for code, message in structure.wrong(plan.tree, evidence.executed)]
    if plan.tree is not None and not evidence.executed_told:
        message = "the server does not tell what it executes, so budget and topk in force are unchecked"
        reasons.append(Reason(effect="note", code="structure-untold", message=message))
    if (why := structure.narrower(plan.tree, evidence.executed)) is not None:
        reasons.append(Reason(effect="note", code="narrow-trees", message=why))
    return reasons


def _shown(evidence: Evidence) -> Shown | None:
    seen = evidence.executed
    if not seen:
        return None
    return Shown(
        samples=seen.total(),
        nodes=max(one.nodes for one in seen),
        max_children=max(one.max_children for one in seen),
        max_depth=max(one.max_depth for one in seen),
    )


def _of_amount(evidence: Evidence) -> list[Reason]:
    reasons = []
    rate = evidence.plan.near_tie_rate
    for method in evidence.methods:
        for load in evidence.tallies:
            seen = evidence.judged(method, load)
            if seen.judged < judge.MIN_JUDGED and not load.mixed:
                fewer = f"{seen.judged} tokens judged at {load}; fewer than {judge.MIN_JUDGED} are no evidence"
                reasons.append(Reason(effect="inconclusive", code="too-little", message=f"{method}: {fewer}"))
    for method, load, seen in evidence.judged_pairs():
        if judge.rate_exceeded(seen.near_ties, seen.judged, rate):
            bound = f"more than {rate:.1%} and than {judge.NEAR_TIE_FLOOR}"
            message = f"{method}: {seen.near_ties} near-ties in {seen.judged} tokens at {load}: {bound}"
            reasons.append(_fail("near-tie-rate", message))
        if seen.ties > max(0.25 * seen.judged, judge.NEAR_TIE_FLOOR):
            tied = f"{seen.ties} of {seen.judged} tokens at {load} tie with another"
            message = f"{method}: {tied}: the scores do not tell tokens apart"
            reasons.append(Reason(effect="inconclusive", code="flat-scores", message=message))
    if evidence.plan.algorithm != "none" and not evidence.plan.sampled_methods:
        message = "temperature 0 only: what is sampled is unchecked (method distribution, or same-seed in float32)"
        reasons.append(Reason(effect="note", code="greedy-only", message=message))
    if evidence.plan.second_turn_tokens and not evidence.second_turns_cached:
        message = (
            "no second turn was served from the cache (or the server does not tell), so KV left behind is unchecked"
        )
        reasons.append(Reason(effect="note", code="cache-unused", message=message))
    return reasons


def _of_output(evidence: Evidence) -> list[Reason]:
    same = len(evidence.distinct_outputs) == 1 and len(next(iter(evidence.distinct_outputs))) >= MIN_SAME_TOKENS
    if same and len(evidence.distinct_prompts) >= MIN_DISTINCT_PROMPTS:
        return [_fail("degenerate", f"all {evidence.outputs} outputs are the same, whatever the prompt")]
    if evidence.outputs and evidence.cycling * 2 > evidence.outputs:
        message = f"{evidence.cycling} of {evidence.outputs} outputs only repeat a cycle of at most four tokens"
        return [Reason(effect="note", code="cycling", message=message)]
    return []


def _fail(code: str, message: str) -> Reason:
    return Reason(effect="fail", code=code, message=message)
