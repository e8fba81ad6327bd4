"""What a run has seen so far, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ddtree_ops.exactness import judge
from ddtree_ops.exactness.plan import GatePlan, Load
from ddtree_ops.exactness.structure import Executed
from ddtree_ops.exactness.verdict import MAX_FINDINGS, Finding, MethodCounts, Reason, RunCounts, Scalar
from ddtree_ops.exactness.wire import Generation

Ids = tuple[int, ...]
MAX_PER_CODE = 3
MAX_PER_OUTPUT = 3
MIN_DISTINCT_PROMPTS = 8


@dataclass
class Judged:
    """Running counts of what one method judged of one load (verdict.MethodCounts has their meaning)."""

    judged: int = 0
    ties: int = 0
    near_ties: int = 0
    beyond: int = 0
    largest_gap: float | None = None

    def add(self, found: Finding) -> None:
        if found.gap is not None:
            self.largest_gap = max(found.gap, self.largest_gap or 0.0)
        self.beyond += found.severity == "fail"
        self.near_ties += found.severity == "near-tie"


@dataclass
class Tally:
    """Running counts of the outputs of one load (verdict.RunCounts has their meaning)."""

    requests: int = 0
    generated: int = 0
    verify_steps: int = 0

    def add_output(self, generated: Generation) -> None:
        count = len(generated.output_ids)
        self.requests += 1
        self.generated += count
        if generated.verify_steps is not None:
            self.verify_steps += generated.verify_steps
        elif generated.accept_length:
            self.verify_steps += round(count / generated.accept_length)

    def counts(self, load: Load, judged: Judged) -> RunCounts:
        accept = round(self.generated / self.verify_steps, 4) if self.verify_steps else None
        counted = {**vars(self), **vars(judged)}
        del counted["largest_gap"]
        return RunCounts(concurrency=load.concurrency, mixed=load.mixed, accept_length=accept, **counted)


@dataclass
class Evidence:
    """Grows while the gate runs. Reasons are kept three a code, findings three an output and 40 in all of each
    severity; the counters go on.
    """

    plan: GatePlan
    epsilon: float
    tallies: dict[Load, Tally]
    methods: tuple[str, ...] = ()
    shape: dict[str, Scalar] = field(default_factory=dict)
    prompt_set: str = ""
    prompts: int = 0
    compared: int = 0
    differing: int = 0
    verify_counts: int = 0
    second_turns: int = 0
    second_turns_cached: int = 0
    second_turns_differing: int = 0
    distinct_prompts: set[Ids] = field(default_factory=set)
    distinct_outputs: set[Ids] = field(default_factory=set)
    cycling: int = 0
    outputs: int = 0
    troubles: int = 0
    findings: int = 0
    executed_told: bool = False
    executed: Counter[Executed] = field(default_factory=Counter)
    _judged: dict[tuple[str, Load], Judged] = field(default_factory=dict)
    _codes: Counter[str] = field(default_factory=Counter)
    _reasons: list[Reason] = field(default_factory=list)
    _kept: dict[str, list[Finding]] = field(default_factory=lambda: {"fail": [], "near-tie": []})

    def judged(self, method: str, load: Load) -> Judged:
        """The counts of one method and load, made at the first call."""
        return self._judged.setdefault((method, load), Judged())

    def forgive(self, method: str, load: Load) -> None:
        """Counts what lies beyond epsilon as near-ties."""
        judged = self.judged(method, load)
        judged.near_ties, judged.beyond = judged.near_ties + judged.beyond, 0

    def judged_pairs(self) -> list[tuple[str, Load, Judged]]:
        """Every method and load that has counts, in the order in which they began."""
        return [(method, load, judged) for (method, load), judged in self._judged.items()]

    def method_counts(self) -> list[MethodCounts]:
        return [
            MethodCounts(method=method, concurrency=load.concurrency, mixed=load.mixed, **vars(judged))
            for (method, load), judged in self._judged.items()
        ]

    def reason(self, effect: Literal["fail", "inconclusive", "note"], code: str, message: str) -> None:
        self._codes[code] += 1
        if self._codes[code] <= MAX_PER_CODE:
            self._reasons.append(Reason(effect=effect, code=code, message=message))

    def note_once(self, code: str, message: str) -> None:
        """For what every group of prompts would say again."""
        if not self._codes[code]:
            self.reason("note", code, message)

    def finding(self, found: Finding) -> None:
        self.findings += 1
        kept = self._kept[found.severity]
        same = sum(_output_of(f) == _output_of(found) for f in kept)
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


def _output_of(found: Finding) -> tuple[str, str, int, bool]:
    return found.method, found.prompt, found.concurrency, found.mixed
