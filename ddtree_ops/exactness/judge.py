"""What counts as exact. Pure functions over token ids and logprobs; nothing here talks to a server.

Alignment (SGLang 0.5.17, scheduler_components/logprob_result_processor.py): a prompt of n tokens scored with
``logprob_start_len`` s gives n - s entries; entry j names token s + j and holds its logprob given tokens < s + j,
except entry 0, which holds null. So s = len(prompt) - 1 gives one empty entry and then one for every output token.
SGLang shows the vocabulary's last id as 0 there (it clips what may be the padding of an image).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_ops.exactness.wire import MAX_ID, Entry, Generation, Malformed, Scored

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of one rounding to nearest: 2^-p for a significand of p bits."""

LOGPROB_SLACK = 2.0**-19
"""What two fp32 logprobs of magnitude below 32 may each have lost: twice half of their spacing there, 2^-19."""

LOGPROB_TOLERANCE = {"float32": 2.0**-10, "bfloat16": 0.5, "float16": 2.0**-4}
"""How far, in nats, verify and prefill may be apart on one token. Healthy reference engine, 768 tokens: at most 8e-6 in
float32 and 0.095 in bfloat16; a wrong mask makes whole nats."""

OUTLIERS = 2
OUTLIER_ROUNDINGS = 16
"""In 16 bits, how many tokens that one method judges of one load may lie beyond epsilon, and how far, as rounding does
once in some 100,000 tokens: of 100 healthy bfloat16 runs of the reference engine three had such tokens, up to 13
roundings away. Faults show more of them or whole nats (results/gate/). In float32 there are none."""

MIN_JUDGED = 64
"""Fewer judged tokens than this at a concurrency are no evidence."""

NEAR_TIE_FLOOR = 8
"""Near-ties up to this many never exceed a rate: in a looping output one near-tie repeats in every cycle."""


@dataclass(frozen=True, slots=True)
class Position:
    """One output token held against the target. ``gap`` is None where the emitted token's ``logprob`` is not finite."""

    index: int
    emitted: int
    emitted_text: str
    best: int
    best_text: str
    gap: float | None
    top_two_gap: float | None
    logprob: float | None = None


def epsilon(dtype: str, roundings: int, logit_scale: float = 16.0) -> float:
    """The largest gap, in nats, that rounding alone explains: roundings x u(dtype) x logit_scale + slack.

    A logit of magnitude ``logit_scale`` kept in ``dtype`` is off by up to u x scale a rounding, and a difference of
    logprobs is a difference of logits. At scale 16 one bfloat16 rounding is 1/16 nat, one float32 rounding 1e-6.
    Healthy SGLang 0.5.17 in bfloat16 shows gaps up to three roundings (results/gpu/), so profiles forgive four;
    acceptance within 0.5 nat, the mildest planted fault, shows gaps twice as large (results/gate/). The slack covers
    the fp32 logprobs that are subtracted. ``auto`` takes bfloat16's.
    """
    return roundings * UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF["bfloat16"]) * logit_scale + LOGPROB_SLACK


def outlier_limit(dtype: str, logit_scale: float = 16.0) -> float:
    """The largest gap, in nats, of an outlier: OUTLIER_ROUNDINGS; 0 in float32, where none is forgiven."""
    if dtype == "float32":
        return 0.0
    return OUTLIER_ROUNDINGS * UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF["bfloat16"]) * logit_scale + LOGPROB_SLACK


def logprob_tolerance(dtype: str) -> float:
    """LOGPROB_TOLERANCE, bfloat16's for ``auto``."""
    return LOGPROB_TOLERANCE.get(dtype, LOGPROB_TOLERANCE["bfloat16"])


def severity(gap: float | None, eps: float) -> str:
    """``exact`` at gap 0 (ranked first or tied with it), ``near-tie`` within epsilon, else ``fail``."""
    if gap is None or gap > eps:
        return "fail"
    return "exact" if gap == 0.0 else "near-tie"


def rate_exceeded(near_ties: int, judged: int, rate: float) -> bool:
    """Whether near-ties are more than rounding makes: more than ``rate`` of the judged tokens, and more than 8."""
    return near_ties > max(rate * judged, NEAR_TIE_FLOOR)


def positions(ids: Sequence[int], first: int, reply: Scored, vocab_size: int | None) -> list[Position]:
    """Every token of ``ids[first:]`` against the target, from a scoring that began at ``first - 1``.

    Raises Malformed where the reply contradicts the request or itself: such scores prove nothing either way.
    """
    start = first - 1
    if len(reply.entries) != len(ids) - start:
        raise Malformed(f"{len(reply.entries)} scored entries for {len(ids) - start} tokens")
    if reply.prompt_tokens is not None and reply.prompt_tokens != len(ids):
        raise Malformed(f"the server scored {reply.prompt_tokens} tokens of {len(ids)}")
    judged = []
    for j, entry in enumerate(reply.entries):
        token = ids[start + j]
        clipped = entry.token == 0 and vocab_size is not None and token == vocab_size - 1
        if entry.token != token and not clipped:
            raise Malformed(f"entry {j} names token {entry.token}, asked was {token}")
        if j == 0:
            if entry.logprob is not None:
                raise Malformed("the first entry holds a logprob, so entries are not aligned as SGLang's")
            continue
        judged.append(_position(start + j - first, token, entry))
    return judged


def _position(index: int, token: int, entry: Entry) -> Position:
    if not entry.top:
        raise Malformed(f"no ranked tokens at output position {index}")
    best, best_id, best_text = entry.top[0]
    ranks = [logprob for logprob, _, _ in entry.top]
    if best is None:
        # A target whose best logprob is NaN has no opinion; the emitted token cannot be its choice.
        return Position(index, token, entry.text, best_id, best_text, None, None)
    second = ranks[1] if len(ranks) > 1 else None
    if second is not None and second > best:
        raise Malformed(f"ranked tokens out of order at output position {index}")
    mass = sum(math.exp(min(value, 1.0)) for value in ranks if value is not None)
    if mass > 1.001:
        raise Malformed(f"ranked tokens have probability {mass:.3g} at output position {index}")
    for logprob, ranked_id, _ in entry.top:
        if ranked_id != token or logprob is None or entry.logprob is None:
            continue
        if abs(logprob - entry.logprob) > LOGPROB_SLACK:
            raise Malformed(f"two logprobs of token {token} at output position {index}")
    two = None if second is None else best - second
    if entry.logprob is None:
        return Position(index, token, entry.text, best_id, best_text, None, two)
    gap = best - entry.logprob
    if gap < -LOGPROB_SLACK:
        raise Malformed(f"token {token} ranks above the first at output position {index}")
    return Position(index, token, entry.text, best_id, best_text, max(gap, 0.0), two, entry.logprob)


def sequence(generated: Generation) -> tuple[int, ...]:
    """The output with the stop token that ended it: servers differ in whether output_ids holds it."""
    ids = generated.output_ids
    stop = generated.matched
    if generated.finish == "stop" and isinstance(stop, int) and (not ids or ids[-1] != stop):
        return (*ids, stop)
    return ids


def wrong_output(
    generated: Generation, *, prompt_tokens: int, max_new_tokens: int, vocab_size: int | None, context: int | None
) -> tuple[str, str, bool] | None:
    """(code, message, proven) for an output no correct server returns, else None.

    ``proven`` False: the server may have had a reason that it did not tell. ``context``: its longest sequence.
    """
    ids, count = generated.output_ids, len(generated.output_ids)
    bad = next((i for i in (*ids, *_matched_id(generated)) if not 0 <= i < (vocab_size or MAX_ID)), None)
    if bad is not None:
        return "id-outside-vocabulary", f"output id {bad} is outside the vocabulary of {vocab_size or MAX_ID}", True
    if count > max_new_tokens:
        return "overlong-output", f"{count} tokens returned, {max_new_tokens} allowed", True
    if generated.prompt_tokens is not None and generated.prompt_tokens != prompt_tokens:
        return "prompt-changed", f"the server saw {generated.prompt_tokens} prompt tokens of {prompt_tokens}", False
    if generated.finish not in ("length", "stop"):
        return "not-finished", f"finish reason {generated.finish!r}", False
    told = generated.completion_tokens
    if told is not None and told not in (count, len(sequence(generated))):
        return "completion-count", f"completion_tokens says {told}, {count} ids returned", True
    if generated.finish == "length" and count < max_new_tokens:
        clamped = context is None or prompt_tokens + max_new_tokens >= context
        return "short-output", f"finish reason length after {count} of {max_new_tokens} tokens", not clamped
    if generated.finish == "stop" and count == 0 and not _matched_id(generated):
        return "empty-output", "finished by stop without a token", False
    return None


def _matched_id(generated: Generation) -> tuple[int, ...]:
    return (generated.matched,) if generated.finish == "stop" and isinstance(generated.matched, int) else ()


def stop_inside(output: Sequence[int], stops: frozenset[int]) -> int | None:
    """Index of the first stop token that is not the last token, else None."""
    return next((i for i, token in enumerate(output[:-1]) if token in stops), None)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first position where two outputs differ, the shorter one's end included; None when equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def cycle_length(output: Sequence[int], longest: int = 4) -> int | None:
    """The period (<= ``longest``) that the whole output of at least 16 tokens repeats, else None."""
    if len(output) < 16:
        return None
    return next(
        (n for n in range(1, longest + 1) if all(output[i] == output[i - n] for i in range(n, len(output)))), None
    )
