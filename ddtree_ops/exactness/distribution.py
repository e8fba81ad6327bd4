"""The distribution test: above temperature 0 without seeds, tokens must be drawn from the target's own filtered law.

Every emitted token is scored by a prefill. Its place in the target's distribution, F(better tokens) + V p(token) with V
uniform, is itself uniform and independent of what was before (Rosenblatt's transform, randomised for a discrete law),
whatever was accepted or not. So the values are pooled over all tokens, and by depth in the output and by parameters,
and never by how a token came about; each pool is held against the uniform law by the bound of Dvoretzky, Kiefer,
Wolfowitz and Massart: P(sup |F_n - F| > d) <= 2 exp(-2 n d^2), which needs no large n.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddtree_ops.exactness import findings, judge
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.wire import Entry
from ddtree_ops.exactness.work import Group, Work

METHOD = "distribution"
ALPHA = 1e-3
"""A healthy server's chance of a false FAIL in one run, all pools together."""

TOP_K = 20
BINS = 256
ROUNDS = 2
DEPTHS = (8, 32)
MIN_TOKENS = 400
TABLE: tuple[Mapping[str, float | int], ...] = (
    {"temperature": 1.0, "top_k": TOP_K},
    {"temperature": 1.0, "top_k": TOP_K, "top_p": 0.8},
    {"temperature": 1.0, "top_k": TOP_K, "min_p": 0.1},
    {"temperature": 0.7, "top_k": TOP_K},
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 2.0},
)
"""Sampled rows have a top_k, so that the top TOP_K of a score hold the whole law; top_p and min_p at temperature 1
only, where the masses that they look at are those of the score. Greedy rows among them show what leaks from one row
into another, and penalties that are not the path's own."""

SLACK = {"float32": 0.0, "float16": 0.01, "bfloat16": 0.03}
"""How far, as a distance of distribution functions, rounding may move a healthy law."""

EDGE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
"""How far, relatively, a filter's edge may lie beside where the score has it."""


@dataclass
class Pools:
    """Counts of PIT values in BINS bins a pool, and the tokens that no filter lets through."""

    bins: dict[str, Counter[int]] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    tokens: int = 0

    def add(self, value: float, names: Sequence[str]) -> None:
        """One value of every pool in ``names``."""
        self.tokens += 1
        place = min(int(value * BINS), BINS - 1)
        for name in names:
            self.bins.setdefault(name, Counter())[place] += 1


@dataclass(frozen=True)
class Tested:
    """One pool: how many values, how far from uniform, how far is allowed."""

    pool: str
    count: int
    distance: float
    bound: float


def interval(entry: Entry, parameters: Mapping[str, float | int], edge: float) -> tuple[float, float] | None:
    """(F before, F with) the emitted token in the target's law under the filters; None outside their support.

    ``entry``: the token's score with the TOP_K best, at temperature 1. Filters as SGLang's sampler has them: top_k and
    top_p jointly on the tempered law (a token stays while the mass before it is not above top_p), then min_p against
    the largest probability. A token outside by less than ``edge``, relatively, counts as the last one inside.
    """
    temperature = float(parameters["temperature"])
    ranked = [(logprob, token) for logprob, token, _ in entry.top or () if logprob is not None]
    if not ranked or entry.logprob is None:
        return None
    top_p, min_p = float(parameters.get("top_p", 1.0)), float(parameters.get("min_p", 0.0))
    kept: list[tuple[float, int]] = []
    before = 0.0
    for logprob, token in ranked[: int(parameters["top_k"])]:
        if before > top_p or math.exp(logprob - ranked[0][0]) < min_p:
            break
        kept.append((math.exp((logprob - ranked[0][0]) / temperature), token))
        before += math.exp(logprob)
    total, low = math.fsum(weight for weight, _ in kept), 0.0
    for weight, token in kept:
        if token == entry.token:
            return low / total, (low + weight) / total
        low += weight
    last = ranked[len(kept) - 1][0]
    mass = math.fsum(math.exp(logprob) for logprob, _ in ranked if logprob > entry.logprob)
    close = math.exp(entry.logprob - last) >= 1 - edge or (top_p < 1 and mass <= top_p * (1 + edge))
    close = close or (min_p > 0 and math.exp(entry.logprob - ranked[0][0]) >= min_p * (1 - edge))
    return (1 - 1 / BINS, 1.0) if close else None


def greedy(entry: Entry, index: int, output: Sequence[int], parameters: Mapping[str, float | int]) -> judge.Position:
    """A greedy token against the best of the score under the penalties of ``output``, what was emitted before it.

    The gap is to the best of the TOP_K: a better one that they do not hold makes it too small, never too large.
    """
    penalty, counts = float(parameters.get("frequency_penalty", 0.0)), Counter(output)
    ranked = [(lp - penalty * counts[token], token, text) for lp, token, text in entry.top or () if lp is not None]
    if not ranked or entry.logprob is None:
        return judge.Position(index, entry.token, entry.text, entry.token, "", None, None)
    ranked.sort(key=lambda one: -one[0])
    best, best_id, best_text = ranked[0]
    gap = max(0.0, best - (entry.logprob - penalty * counts[entry.token]))
    two = best - ranked[1][0] if len(ranked) > 1 else None
    return judge.Position(index, entry.token, entry.text, best_id, best_text, gap, two, entry.logprob)


def tested(pools: Pools, dtype: str) -> list[Tested]:
    """Every pool against the uniform law, by the DKW bound at ALPHA over the number of pools, plus rounding's slack."""
    slack = SLACK.get(dtype, SLACK["bfloat16"])
    found = []
    for name, bins in pools.bins.items():
        count, seen, distance = bins.total(), 0, 0.0
        for place in range(BINS):
            seen += bins[place]
            distance = max(distance, abs(seen / count - (place + 1) / BINS))
        bound = math.sqrt(math.log(2 * len(pools.bins) / ALPHA) / (2 * count)) + slack
        found.append(Tested(name, count, distance, bound))
    return found


def conclude(work: Work, pools: Pools) -> None:
    """The verdict of all groups together, into the evidence."""
    if pools.outside:
        shown = (
            f"{len(pools.outside)} of {pools.tokens + len(pools.outside)} tokens outside what the filters let through"
        )
        work.evidence.reason("fail", "outside-support", f"{shown}; first {pools.outside[0]}")
    results = tested(pools, work.plan.dtype)
    if pools.tokens < MIN_TOKENS:
        message = f"distribution: {pools.tokens} tokens; fewer than {MIN_TOKENS} are no evidence"
        work.evidence.reason("inconclusive", "too-little", message)
        return
    for one in results:
        if one.distance > one.bound:
            message = (
                f"{one.pool}: {one.count} tokens lie {one.distance:.3f} from the target's law, {one.bound:.3f} allowed"
            )
            work.evidence.reason("fail", METHOD, message)
    whole = results[0]
    message = (
        f"distribution: N = {whole.count}, {whole.distance:.3f} from the target's law, {whole.bound:.3f} allowed "
        f"({len(results)} pools, false alarm {ALPHA:g} a run); a law {2 * whole.bound:.3f} away is found with "
        f"probability {1 - ALPHA / len(results):.4f}"
    )
    work.evidence.reason("note", "distribution-power", message)


async def sample_group(work: Work, group: Group, load: Load, pools: Pools) -> None:
    """Asks every prompt ROUNDS times at ``load`` by TABLE's rows, and scores what came; the pools get what is drawn."""
    tally = work.evidence.judged(METHOD, load)
    edge = EDGE.get(work.plan.dtype, EDGE["bfloat16"])

    async def act(turn: int) -> None:
        prompt, row = turn % len(group.ids), turn % len(TABLE)
        ids, name, limit, given = group.ids[prompt], group.names[prompt], group.limits[prompt], TABLE[row]
        got = await work.sampled(work.server, ids, limit, given)
        tokens = None if got is None else work.checked(got, f"{name}, sampled at {load}", len(ids), limit)
        if not tokens:
            return
        whole = ids + tokens
        reply = await work.server.score(whole, start=len(ids) - 1, texts=False, top=TOP_K)
        work.validated(whole, len(ids), reply, name)
        if not given["temperature"]:
            judged = [greedy(one, i, tokens[:i], given) for i, one in enumerate(reply.entries[1:])]
            tally.judged += len(judged)
            for found in findings.of_positions(METHOD, name, load, judged, work.evidence.epsilon):
                tally.add(found)
                work.evidence.finding(found)
            return
        # Not Python's hash, which differs from run to run: a verdict on the same answers is the same.
        noise = random.Random(f"{name} {turn}")
        for depth, entry in enumerate(reply.entries[1:]):
            place = interval(entry, given, edge)
            if place is None:
                tally.beyond += 1
                pools.outside.append(f"{name} at {load}, position {depth}: token {entry.token} with {dict(given)}")
                del pools.outside[judge.MIN_JUDGED :]
                continue
            tally.judged += 1
            stratum = sum(depth >= limit for limit in DEPTHS)
            names = ("all tokens", f"depth stratum {stratum} of {len(DEPTHS)}", f"tokens sampled with {dict(given)}")
            pools.add(place[0] + noise.random() * (place[1] - place[0]), names)

    await work.each(load.concurrency, range(ROUNDS * len(group.ids)), act, f"{METHOD} at {load}")
