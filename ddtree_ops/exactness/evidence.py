"""What a run has seen so far, in bounded memory, and the pure step from there to a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddtree_ops.exactness import judge
from ddtree_ops.exactness.plan import GatePlan
from ddtree_ops.exactness.verdict import (
    FORMAT,
    MAX_FINDINGS,
    MAX_REASONS,
    Counts,
    Finding,
    Kind,
    Reason,
    RunCounts,
    Scalar,
    Verdict,
)
from ddtree_ops.exactness.wire import Generation

Ids = tuple[int, ...]
MAX_PER_CODE = 3
MAX_PER_OUTPUT = 3
MIN_STEPS = 32
MIN_DISTINCT_PROMPTS = 8
MIN_SAME_TOKENS = 8


@dataclass
class Tally:
    """Running counts of one concurrency (verdict.RunCounts has their meaning)."""

    concurrency: int
    requests: int = 0
    generated: int = 0
    judged: int = 0
    ties: int = 0
    near_ties: int = 0
    beyond: int = 0
    verify_steps: int = 0

    def add_output(self, generated: Generation) -> None:
        count = len(generated.output_ids)
        self.requests += 1
        self.generated += count
        if generated.verify_steps is not None:
            self.verify_steps += generated.verify_steps
        elif generated.accept_length:
            self.verify_steps += round(count / generated.accept_length)

    def counts(self) -> RunCounts:
        accept = self.generated / self.verify_steps if self.verify_steps else None
        return RunCounts(**vars(self), accept_length=None if accept is None else round(accept, 4))


@dataclass
class Evidence:
    """Grows while the gate runs. Reasons are kept three a code, findings three an output and 40 in all of each
    severity; the counters go on.
    """

    plan: GatePlan
    epsilon: float
    tallies: dict[int, Tally]
    shape: dict[str, Scalar] = field(default_factory=dict)
    prompt_set: str = ""
    prompts: int = 0
    compared: int = 0
    differing: int = 0
    second_turns: int = 0
    second_turns_cached: int = 0
    second_turns_differing: int = 0
    second_turn_beyond: int = 0
    distinct_prompts: set[Ids] = field(default_factory=set)
    distinct_outputs: set[Ids] = field(default_factory=set)
    cycling: int = 0
    outputs: int = 0
    troubles: int = 0
    findings: int = 0
    _codes: Counter[str] = field(default_factory=Counter)
    _reasons: list[Reason] = field(default_factory=list)
    _kept: dict[str, list[Finding]] = field(default_factory=lambda: {"fail": [], "near-tie": []})

    def reason(self, effect: Literal["fail", "inconclusive", "note"], code: str, message: str) -> None:
        self._codes[code] += 1
        if self._codes[code] <= MAX_PER_CODE:
            self._reasons.append(Reason(effect=effect, code=code, message=message))

    def finding(self, found: Finding) -> None:
        self.findings += 1
        kept = self._kept[found.severity]
        same = sum((f.method, f.prompt, f.concurrency) == (found.method, found.prompt, found.concurrency) for f in kept)
        if len(kept) < MAX_FINDINGS and same < MAX_PER_OUTPUT:
            kept.append(found)

    def seen(self, prompt: Ids, output: Ids) -> None:
        """Notes what tells degenerate output: whether outputs differ at all, and whether they only cycle."""
        self.outputs += 1
        self.cycling += judge.cycle_length(output) is not None
        if len(self.distinct_outputs) < 2:
            self.distinct_outputs.add(output)
        if len(self.distinct_prompts) < MIN_DISTINCT_PROMPTS:
            self.distinct_prompts.add(prompt)

    def reasons(self) -> list[Reason]:
        """In order of arrival; where a code came more often than it is kept, its last message says how often."""
        shown = list(self._reasons)
        for code, count in self._codes.items():
            if count > MAX_PER_CODE:
                last = max(i for i, reason in enumerate(shown) if reason.code == code)
                more = f"{shown[last].message} (and {count - MAX_PER_CODE} more like it)"
                shown[last] = Reason(effect=shown[last].effect, code=code, message=more)
        return shown

    def kept_findings(self) -> list[Finding]:
        return (self._kept["fail"] + self._kept["near-tie"])[:MAX_FINDINGS]


def differing_arguments(expect: Mapping[str, Any], shown: Mapping[str, object]) -> list[str]:
    """One line for every expected `/server_info` key whose value is another; 1 and 1.0 are equal, 1 and true not."""
    lines = []
    for key, wanted in sorted(expect.items()):
        if key not in shown:
            lines.append(f"{key} is not shown by the server, expected {wanted!r}")
        elif shown[key] != wanted or isinstance(shown[key], bool) != isinstance(wanted, bool):
            value = "another value" if _secret(key) else repr(shown[key])[:120]
            lines.append(f"{key} is {value}, expected {'(hidden)' if _secret(key) else repr(wanted)}")
    return lines


def _secret(key: str) -> bool:
    return any(word in key.lower() for word in ("api_key", "secret", "password", "auth"))


def conclude(evidence: Evidence, *, seconds: float, requests: int, generated: int, prefilled: int) -> Verdict:
    """The verdict on what was seen. Pure. FAIL needs proof and then wins; else whatever is missing is INCONCLUSIVE."""
    plan = evidence.plan
    runs = [tally.counts() for tally in evidence.tallies.values()]
    reasons = evidence.reasons() + _of_speculation(plan, runs) + _of_amount(evidence, runs) + _of_output(evidence)
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
    )
    findings = evidence.kept_findings()
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
    )


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
    if generated < judge.MIN_JUDGED:
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


def _of_amount(evidence: Evidence, runs: Sequence[RunCounts]) -> list[Reason]:
    reasons = []
    for run in runs:
        where = f"at C={run.concurrency}"
        if run.judged < judge.MIN_JUDGED:
            message = f"{run.judged} tokens judged {where}; fewer than {judge.MIN_JUDGED} are no evidence"
            reasons.append(Reason(effect="inconclusive", code="too-little", message=message))
        if judge.rate_exceeded(run.near_ties, run.judged, evidence.plan.near_tie_rate):
            bound = f"more than {evidence.plan.near_tie_rate:.1%} and than {judge.NEAR_TIE_FLOOR}"
            message = f"{run.near_ties} near-ties in {run.judged} tokens {where}: {bound}"
            reasons.append(_fail("near-tie-rate", message))
        if run.ties > max(0.25 * run.judged, judge.NEAR_TIE_FLOOR):
            message = f"{run.ties} of {run.judged} tokens {where} tie with another: the scores do not tell tokens apart"
            reasons.append(Reason(effect="inconclusive", code="flat-scores", message=message))
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
