"""What the gate is asked to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness.judge import UNIT_ROUNDOFF
from ddtree_ops.exactness.verdict import Policy

if TYPE_CHECKING:
    from ddtree_ops.exactness.golden import Golden


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt: exactly one of ``text`` and ``input_ids``. ``id`` names it in findings, ``kind`` says what it is."""

    id: str
    kind: str
    text: str | None = None
    input_ids: tuple[int, ...] | None = None


SAMPLED = ("same-seed", "distribution")
"""Methods above temperature 0. They go beside the greedy ones, never in their place."""

ROUTED = "routed"

METHODS = ("self-score", "replay", "golden", *SAMPLED)


@dataclass(frozen=True, order=True)
class Load:
    """How requests are in flight: ``concurrency`` at a time; ``mixed``: of different lengths, some broken off."""

    concurrency: int
    mixed: bool = False

    def __str__(self) -> str:
        return f"C={self.concurrency}{' mixed' if self.mixed else ''}"


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What the profile says is drafted: ``budget`` nodes besides the root and ``topk`` candidates a position (both None
    for a chain), ``ladder`` the smaller budgets of larger batches, ``block_size`` with the anchor. ``drafter`` names
    the weights, so that counts are not compared across.
    """

    block_size: int
    budget: int | None = None
    topk: int | None = None
    ladder: str | None = None
    drafter: str = ""

    @property
    def shape(self) -> str:
        """The name under which a golden keeps verify counts."""
        tree = "chain" if self.budget is None else f"tree {self.budget}/{self.topk}"
        ladder = f" ladder {self.ladder}" if self.ladder else ""
        return f"{tree}{ladder} block {self.block_size}" + (f" drafter {self.drafter}" if self.drafter else "")


@dataclass(frozen=True, kw_only=True)
class GatePlan:
    """``url`` is the server's base; ``algorithm`` none, dflash, ddtree, or routed where each request may meet another
    server, of which each was proven by itself; ``dtype`` float32, bfloat16, float16 or auto
    (judged with bfloat16's epsilon). ``expect``: `/server_info` key -> the value it must show. ``vocab_size`` and
    ``stop_token_ids`` add to what the server tells. ``prompt_set`` names the prompts in the verdict.
    ``near_tie_rate``: judge.rate_exceeded. ``logit_scale``: judge.epsilon. ``time_limit_s`` bounds the whole run.
    ``second_turn_tokens`` 0 leaves second turns out. ``methods`` of METHODS; none: self-score, or replay where the
    server refuses logprobs. ``golden`` is what the method golden compares with, ``baseline`` the URL of a running
    server to compare with as well. ``tree``: what is drafted, where it is known. ``mixed``: also a load where requests
    join and leave, at the largest concurrency.
    """

    url: str
    algorithm: str
    dtype: str
    policy: Policy
    epsilon_roundings: int
    concurrency: tuple[int, ...]
    max_new_tokens: int
    prompts: Sequence[Prompt]
    time_limit_s: float
    expect: Mapping[str, Any] = field(default_factory=dict)
    min_accept_length: float | None = None
    api_key: str | None = field(default=None, repr=False)
    prompt_set: str = ""
    vocab_size: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    near_tie_rate: float = 0.02
    logit_scale: float = 16.0
    second_turn_tokens: int = 16
    methods: tuple[str, ...] = ()
    golden: Golden | None = None
    baseline: str | None = None
    tree: Tree | None = None
    mixed: bool = True

    @property
    def greedy_methods(self) -> tuple[str, ...]:
        """Those at temperature 0; none: the default."""
        return tuple(method for method in self.methods if method not in SAMPLED)

    @property
    def sampled_methods(self) -> tuple[str, ...]:
        """Those above temperature 0."""
        return tuple(method for method in self.methods if method in SAMPLED)

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads in the order in which they run; the mixed one needs company."""
        steady = tuple(Load(concurrency) for concurrency in self.concurrency)
        widest = max(self.concurrency, default=1)
        return (*steady, Load(widest, mixed=True)) if self.mixed and widest > 1 else steady


def known_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The methods named, once each. Raises UsageError for one that does not exist."""
    unknown = sorted(set(names) - set(METHODS))
    if unknown:
        raise UsageError(f"exactness: method {', '.join(unknown)}; allowed: {', '.join(METHODS)}")
    return tuple(dict.fromkeys(names))


def check_plan(plan: GatePlan) -> None:
    """Raises UsageError for a plan that could not give a verdict on any server."""
    known_methods(plan.methods)
    ids = [prompt.id for prompt in plan.prompts]
    wrong = [
        (not plan.url.startswith(("http://", "https://")), f"url {plan.url!r} is not http(s)"),
        (
            plan.dtype not in (*UNIT_ROUNDOFF, "auto"),
            f"dtype {plan.dtype!r}; allowed: {', '.join(UNIT_ROUNDOFF)}, auto",
        ),
        (plan.algorithm not in ("none", "dflash", "ddtree", ROUTED), f"algorithm {plan.algorithm!r}"),
        (
            not (plan.api_key or "x").isascii() or not (plan.api_key or "x").isprintable(),
            "api_key is not printable ASCII",
        ),
        ("golden" in plan.methods and plan.golden is None, "method golden without a golden"),
        (
            "same-seed" in plan.methods and plan.golden is None and plan.baseline is None,
            "method same-seed without a golden or a baseline",
        ),
        (
            plan.baseline is not None and not plan.baseline.startswith(("http://", "https://")),
            f"baseline {plan.baseline!r} is not http(s)",
        ),
        (plan.policy not in get_args(Policy), f"policy {plan.policy!r}; allowed: exact, near-tie"),
        (plan.epsilon_roundings < 0, "epsilon_roundings below 0"),
        (not plan.concurrency or min(plan.concurrency) < 1, f"concurrency {plan.concurrency}: at least one, each >= 1"),
        (len(set(plan.concurrency)) != len(plan.concurrency), f"concurrency {plan.concurrency} names one twice"),
        (plan.max_new_tokens < 2, "max_new_tokens below 2: the first token of a prefill is never speculated"),
        (not (math.isfinite(plan.time_limit_s) and plan.time_limit_s > 0), "time_limit_s is not above 0"),
        (not ids, "no prompts"),
        (len(set(ids)) != len(ids), "two prompts have one id"),
    ]
    for prompt in plan.prompts:
        given = (prompt.text is not None) + (prompt.input_ids is not None)
        wrong.append((given != 1, f"prompt {prompt.id}: give text or input_ids, one of them"))
        wrong.append((prompt.text == "" or prompt.input_ids == (), f"prompt {prompt.id} is empty"))
    for bad, message in wrong:
        if bad:
            raise UsageError(f"exactness: {message}")
