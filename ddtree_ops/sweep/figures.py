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
SEVERAL = 0.1
"""Most of the steps that may have come with others in one chunk where the gaps between chunks are called steps."""


def repeat_of(samples: Sequence[Sample], concurrency: int, eos: Collection[int] | None, *, closed: bool) -> Repeat:
    """The figures of a pass with at least one sample. ``eos`` None: unknown, so all tokens count."""
    ordered = sorted(samples, key=lambda sample: sample.answer.sent)
    begin = ordered[0].answer.sent
    end = max(sample.answer.events[-1].at for sample in ordered)
    tokens = sum(sample.answer.events[-1].tokens for sample in ordered)
    low, high = window(ordered, concurrency) if closed else (begin, end)
    inside = sum(_inside(sample.answer, low, high) for sample in ordered)
    if inside < tokens / 2:
        low, high, inside = begin, end, tokens
    shares = [_inside(sample.answer, low, high) / sample.answer.events[-1].tokens for sample in ordered]
    rows = [row_of(sample, eos) for sample in ordered]
    steps = sum((row.steps or 0) * share for row, share in zip(rows, shares, strict=True))
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
    until, steps = last.tokens, answer.steps
    at = next((i for i, token in enumerate(ids) if eos and token in eos), None)
    if at is not None:
        # the last event that holds nothing beyond the EOS
        before = [event for event in advancing(answer) if event.tokens <= at + 1]
        until = before[-1].tokens if before else 0
        steps = max(0, len(before) - 1) if one_step_each(answer) else None
    return Row(
        prompt=sample.prompt,
        tokens=last.tokens,
        steps=answer.steps,
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


def _inside(answer: Answer, low: float, high: float) -> int:
    """Tokens that came after ``low`` and not after ``high``."""
    before = max((event.tokens for event in answer.events if event.at <= low), default=0)
    return max(0, max((event.tokens for event in answer.events if event.at <= high), default=before) - before)


def advancing(answer: Answer) -> list[Event]:
    """The first event and those that brought tokens."""
    return [answer.events[0], *(b for a, b in itertools.pairwise(answer.events) if b.tokens > a.tokens)]


def one_step_each(answer: Answer) -> bool:
    """Whether every chunk after the first, which is the prefill's, was one verify step: there are as many as steps.

    How many steps a chunk holds is told by no server; several reach one chunk where its HTTP side was slower than a
    step.
    """
    return answer.steps == len(advancing(answer)) - 1


def gaps(answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """(milliseconds a token, how many tokens) between events: k tokens in one chunk share its gap."""
    return [
        (1000 * (b.at - a.at) / (b.tokens - a.tokens), b.tokens - a.tokens)
        for answer in answers
        for a, b in itertools.pairwise(answer.events)
        if b.tokens > a.tokens
    ]


def step_ms(answers: Sequence[Answer]) -> float | None:
    """Median time between two chunks of a request in ms, which is a step's; without speculation a step is a token.

    None where more than SEVERAL of the steps came with others in one chunk: the median gap might be no step's then.
    """
    found = [1000 * (b.at - a.at) for answer in answers for a, b in itertools.pairwise(advancing(answer))]
    steps = sum(answer.events[-1].tokens - 1 if answer.steps is None else answer.steps for answer in answers)
    return statistics.median(found) if found and steps - len(found) <= SEVERAL * steps else None


def commits_of(answers: Sequence[Answer]) -> tuple[dict[int, int], int]:
    """How many steps committed 1, 2, ... tokens, and of how many that is not known. A last, cut step counts.

    By the server's own counts, else by the chunks of a request each of which is one step.
    """
    seen: Counter[int] = Counter()
    unseen = 0
    for answer in answers:
        if answer.commits is not None:
            seen.update(answer.commits)
        elif one_step_each(answer):
            seen.update(b.tokens - a.tokens for a, b in itertools.pairwise(advancing(answer)))
        else:
            unseen += answer.steps or 0
    return dict(sorted(seen.items())), unseen


def accept_over_time(answers: Sequence[Answer], low: float, high: float) -> list[tuple[float, float]]:
    """(second in the window, commit length) of up to PARTS equal parts, of requests whose chunks are one step each."""
    span = max(high - low, 1e-9)
    tokens, steps = [0] * PARTS, [0] * PARTS
    for answer in answers:
        if not one_step_each(answer):
            continue
        for a, b in itertools.pairwise(advancing(answer)):
            if low < b.at <= high:
                part = min(PARTS - 1, int((b.at - low) / span * PARTS))
                tokens[part] += b.tokens - a.tokens
                steps[part] += 1
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
