"""A verdict as lines for a terminal. Pure; a server's text is made harmless, markup is the caller's to switch off."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.verdict import Finding, Kind, MethodCounts, RunCounts, Verdict

MAX_SHOWN = 8


def render_lines(verdict: Verdict) -> list[str]:
    """The verdict, why, the first failing position with its context, and what the evidence cost."""
    return list(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    accept = "" if verdict.accept_length is None else f", accept length {verdict.accept_length:.2f}"
    shape = ", ".join(f"{_short(k)} {v}" for k, v in verdict.shape.items() if k.startswith("speculative_ddtree"))
    what = " ".join(part for part in (verdict.algorithm, f"({shape})" if shape else "", verdict.dtype) if part)
    passing = "pass" if verdict.passed() else "no verdict" if verdict.kind is Kind.INCONCLUSIVE else "not exact"
    yield f"{verdict.kind}: {what}{accept} - {passing} under policy {verdict.policy}"
    for reason in verdict.reasons:
        yield f"  {reason.effect}: {_plain(reason.message, 300)}"
    if verdict.findings:
        yield from _first(verdict.findings[0])
        shown = verdict.findings[1:MAX_SHOWN]
        yield from (f"  {_one(found)}" for found in shown)
        if verdict.counts.findings > len(shown) + 1:
            yield f"  ... {verdict.counts.findings - len(shown) - 1} more"
    for run in verdict.runs:
        length = "" if run.accept_length is None else f", accept length {run.accept_length:.2f}"
        yield (
            f"  {_load(run)}: {run.requests} requests, {run.generated} tokens, {run.judged} judged, "
            f"{run.beyond} wrong, {run.near_ties} near-ties, {run.ties} ties{length}"
        )
    for judged in verdict.methods:
        if judged.judged and judged.method != verdict.methods[0].method:
            yield (
                f"  {judged.method} at {_load(judged)}: {judged.judged} tokens judged, {judged.beyond} wrong, "
                f"{judged.near_ties} near-ties"
            )
    if (trees := verdict.executed) is not None:
        yield (
            f"  executed in {trees.samples} samples: {trees.nodes} nodes, at most {trees.max_children} children, "
            f"{trees.max_depth} deep"
        )
    c = verdict.counts
    if c.verify_counts:
        yield f"  verify steps of {c.verify_counts} outputs held against the golden's"
    yield (
        f"  {c.prompts} prompts ({verdict.prompt_set}), {c.generated} tokens generated, {c.prefilled} prefilled, "
        f"{c.compared} outputs compared across C ({c.differing} differ), "
        f"{c.second_turns} second turns ({c.second_turns_cached} from the cache, {c.second_turns_differing} differ), "
        f"epsilon {verdict.epsilon:.3g} nat, {verdict.seconds:.1f} s"
    )


def _first(found: Finding) -> Iterator[str]:
    yield f"  first: {_one(found)}"
    if found.before or found.got_text or found.expected_text:
        yield f"    after     …{_quoted(found.before)}"
        yield f"    got       {_quoted(found.got_text)}"
        yield f"    expected  {_quoted(found.expected_text)}"


def _one(found: Finding) -> str:
    gap = "unknown" if found.gap is None else f"{found.gap:.6g}"
    two = "" if found.top_two_gap is None else f", top-two gap {found.top_two_gap:.6g}"
    got = "end" if found.got is None else f"token {found.got}"
    expected = "end" if found.expected is None else f"{found.expected}"
    return (
        f"{found.severity} ({found.method}): {_plain(found.prompt, 60)} at {_load(found)}, position "
        f"{found.position}: {got} instead of {expected}, gap {gap}{two}"
    )


def _load(counted: Finding | RunCounts | MethodCounts) -> str:
    return str(Load(counted.concurrency, counted.mixed))


def _short(key: str) -> str:
    return key.removeprefix("speculative_ddtree_")


def _quoted(text: str) -> str:
    """As a Python literal: repr escapes what is not printable, so no control character reaches the terminal."""
    return repr(text)


def _plain(text: str, limit: int) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
