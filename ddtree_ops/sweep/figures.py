"""Samples of one pass -> its figures. Pure. Everything is counted in the server's tokens and steps, never in chunks."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Sequence

from ddtree_ops.sweep.load import Sample, outputs_hash
from ddtree_ops.sweep.records import Percentiles, Repeat, Row
from ddtree_ops.sweep.wire import Answer, Event
from ddtree_ops.sweep.workload import loops

PARTS = 20


def repeat_of(samples: Sequence[Sample], concurrency: int, eos: Collection[int] | None, *, closed: bool) -> Repeat:
    """The figures of a pass with at least one sample. ``eos`` None: unknown, so all tokens count."""
    ordered = sorted(samples, key=lambda sample: sample.answer.sent)
    begin = ordered[0].answer.sent
    end = max(sample.answer.events[-1].at for sample in ordered)
    tokens = sum(sample.answer.events[-1].tokens for sample in ordered)
    low, high = window(ordered, concurrency) if closed else (begin, end)
    inside = sum(_inside(sample.answer, low, high)[0] for sample in ordered)
    if inside < tokens / 2:
        low, high, inside = begin, end, tokens
    rows = [row_of(sample, eos) for sample in ordered]
    steps = sum(_inside(sample.answer, low, high)[1] for sample in ordered)
    speculates = any(row.steps is not None for row in rows)
    committed, verified = _committed(rows)
    commits, unseen = commits_of([sample.answer for sample in ordered])
    cached = [row.cached for row in rows if row.cached is not None]
    span = max(high - low, 1e-9)
    open_s = sum(max(0.0, min(high, sample.answer.events[-1].at) - max(low, sample.answer.sent)) for sample in ordered)
    step = step_ms([sample.answer for sample in ordered])
    return Repeat(
        seconds=end - begin,
        window_s=span,
        tokens=tokens,
        throughput=inside / span,
        overall=tokens / max(end - begin, 1e-9),
        per_request=statistics.median(row.tokens / row.seconds for row in rows),
        ttft_ms=percentiles([(1000 * row.ttft, 1) for row in rows]),
        itl_ms=percentiles(list(gaps([sample.answer for sample in ordered]))),
        accept_length=committed / verified if verified else None,
        accept_over_time=accept_over_time([sample.answer for sample in ordered], low, high) if speculates else [],
        commits=commits if speculates else {},
        unseen_steps=unseen if speculates else 0,
        steps_per_s=steps / span if steps else None,
        step_ms=step,
        in_flight=open_s / span,
        cached_tokens=sum(cached) if cached else None,
        outputs=outputs_hash(list(samples)),
        rows=sorted(rows, key=lambda row: row.prompt),
    )


def window(ordered: Sequence[Sample], concurrency: int) -> tuple[float, float]:
    """From when C requests have their first token to the first end after the last was sent: C decode all the time.

    ``ordered`` by time of sending. With C=1 it is the whole pass.
    """
    last_sent = ordered[-1].answer.sent
    if concurrency <= 1 or len(ordered) <= concurrency:
        return ordered[0].answer.sent, max(sample.answer.events[-1].at for sample in ordered)
    first_tokens = sorted(sample.answer.events[0].at for sample in ordered)
    return first_tokens[concurrency - 1], min(
        sample.answer.events[-1].at for sample in ordered if sample.answer.events[-1].at >= last_sent
    )


def row_of(sample: Sample, eos: Collection[int] | None) -> Row:
    """One request's figures."""
    answer, last = sample.answer, sample.answer.events[-1]
    ids = answer.body.get("output_ids") or []
    cached = answer.body.get("meta_info", {}).get("cached_tokens")
    until, steps = last.tokens, last.steps
    at = next((i for i, token in enumerate(ids) if eos and token in eos), None)
    if at is not None:
        # the last event that holds nothing beyond the EOS: steps are known at events only
        before = [event for event in answer.events if event.tokens <= at + 1]
        until, steps = (before[-1].tokens, before[-1].steps) if before else (0, None if steps is None else 0)
    return Row(
        prompt=sample.prompt,
        tokens=last.tokens,
        steps=last.steps,
        seconds=last.at - answer.sent,
        ttft=answer.events[0].at - answer.sent,
        until_eos=until,
        steps_until_eos=steps,
        cached=cached if isinstance(cached, int) else None,
        loops=loops(ids),
    )


def _committed(rows: Sequence[Row]) -> tuple[int, int]:
    """Tokens that verify steps added and those steps, up to EOS; a request's first token is its prefill's."""
    counted = [row for row in rows if row.steps_until_eos]
    return sum(row.until_eos - 1 for row in counted), sum(row.steps_until_eos or 0 for row in counted)


def _inside(answer: Answer, low: float, high: float) -> tuple[int, int]:
    """Tokens and verify steps that came after ``low`` and not after ``high``."""
    before = max((event for event in answer.events if event.at <= low), key=lambda e: e.tokens, default=Event(0, 0, 0))
    until = max((event for event in answer.events if event.at <= high), key=lambda e: e.tokens, default=before)
    return max(0, until.tokens - before.tokens), max(0, (until.steps or 0) - (before.steps or 0))


def gaps(answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """(milliseconds a token, how many tokens) between events: k tokens in one chunk share its gap."""
    return [
        (1000 * (b.at - a.at) / (b.tokens - a.tokens), b.tokens - a.tokens)
        for answer in answers
        for a, b in itertools.pairwise(answer.events)
        if b.tokens > a.tokens
    ]


def step_ms(answers: Sequence[Answer]) -> float | None:
    """Median time of a step of one request in ms, between events; without speculation a step is a token."""
    found = []
    for answer in answers:
        for a, b in itertools.pairwise(answer.events):
            steps = b.tokens - a.tokens if answer.events[-1].steps is None else (b.steps or 0) - (a.steps or 0)
            if steps > 0:
                found.append(1000 * (b.at - a.at) / steps)
    return statistics.median(found) if found else None


def commits_of(answers: Sequence[Answer]) -> tuple[dict[int, int], int]:
    """How many steps committed 1, 2, ... tokens, and how many came several in one chunk. A last, cut step counts."""
    seen: Counter[int] = Counter()
    unseen = 0
    for answer in answers:
        for a, b in itertools.pairwise(answer.events):
            steps = (b.steps or 0) - (a.steps or 0)
            if steps == 1:
                seen[b.tokens - a.tokens] += 1
            else:
                unseen += max(0, steps)
    return dict(sorted(seen.items())), unseen


def accept_over_time(answers: Sequence[Answer], low: float, high: float) -> list[tuple[float, float]]:
    """(second in the window, commit length) of up to PARTS equal parts that saw a step."""
    span = max(high - low, 1e-9)
    tokens, steps = [0] * PARTS, [0] * PARTS
    for answer in answers:
        for a, b in itertools.pairwise(answer.events):
            if low < b.at <= high:
                part = min(PARTS - 1, int((b.at - low) / span * PARTS))
                tokens[part] += b.tokens - a.tokens
                steps[part] += (b.steps or 0) - (a.steps or 0)
    return [
        (round((part + 0.5) * span / PARTS, 3), round(tokens[part] / steps[part], 3))
        for part in range(PARTS)
        if steps[part]
    ]


def percentiles(weighted: Sequence[tuple[float, int]]) -> Percentiles:
    """Nearest-rank percentiles of values with weights; NaN-free: 0 where there is nothing."""
    ordered, total = sorted(weighted), sum(weight for _, weight in weighted)

    def at(share: float) -> float:
        seen = 0
        for value, weight in ordered:
            seen += weight
            if seen >= share * total:
                return round(value, 4)
        return 0.0

    return Percentiles(at(0.5), at(0.9), at(0.99))
