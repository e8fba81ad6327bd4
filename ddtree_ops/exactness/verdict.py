"""What the gate answers: the verdict, its evidence, and the JSON it is stored as.

The JSON (``format`` 1) is one object with the fields of :class:`Verdict` in their order; every field is always
present. A field may be added within a format; a changed meaning makes a new one. Readers ignore unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

FORMAT = 1
MAX_FINDINGS = 40
MAX_REASONS = 40

Policy = Literal["exact", "near-tie"]
Severity = Literal["fail", "near-tie"]
Scalar = str | int | float | bool | None


class Kind(StrEnum):
    """The four answers. Only EXACT, and NEAR-TIE where the policy allows it, are a pass."""

    EXACT = "EXACT"
    NEAR_TIE = "NEAR-TIE"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why the verdict is what it is, beside the tokens.

    ``effect``: ``fail`` and ``inconclusive`` each exclude a pass; ``note`` changes nothing. ``code`` is stable,
    ``message`` is for people.
    """

    effect: Literal["fail", "inconclusive", "note"]
    code: str
    message: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One token that is not the target's own choice.

    ``mixed``: under the load where requests join and leave. ``position`` counts output tokens from 0. ``expected`` is
    the token that the judging pass ranks first (for ``concurrency``, ``golden`` and ``baseline`` the other's token);
    ``gap`` = its logprob - the emitted token's, in nats, None where a logprob is not finite or was not to be had;
    ``top_two_gap`` = the target's own top1 - top2 there. Texts are the server's, empty where it has no tokenizer;
    ``before`` is the decoded text just before the position.
    """

    severity: Severity
    method: str
    prompt: str
    concurrency: int
    position: int
    got: int | None
    expected: int | None
    gap: float | None
    top_two_gap: float | None
    got_text: str = ""
    expected_text: str = ""
    before: str = ""
    mixed: bool = False


class MethodCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one method judged of one load. ``judged`` = output tokens that it could judge; ``ties`` = not ranked first,
    yet at gap 0; ``largest_gap`` in nats, of near-ties and tokens beyond, None where none has a gap. A golden or
    baseline judges an output up to its first difference: what follows has another past.
    """

    method: str
    concurrency: int
    mixed: bool
    judged: int
    ties: int
    near_ties: int
    beyond: int
    largest_gap: float | None = None


class RunCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One load: a concurrency, with or without requests that join and leave (``mixed``). ``judged`` to ``beyond`` are
    the first method's (MethodCounts); a token of a sequence that another load produced too is judged by the one score
    of that sequence. ``accept_length`` is SGLang's: completion tokens / verify steps, None without speculation.
    """

    concurrency: int
    requests: int
    generated: int
    judged: int
    ties: int
    near_ties: int
    beyond: int
    verify_steps: int
    accept_length: float | None
    mixed: bool = False


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The largest figures of the trees that the server said it executed, over ``samples`` of its last steps."""

    samples: int
    nodes: int
    max_children: int
    max_depth: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The cost and the amount of evidence. ``generated``/``prefilled``: all tokens the server decoded/prefilled for
    the gate, scoring and second turns included. ``compared``: outputs held against those of the first concurrency.
    ``verify_counts``: outputs whose number of verify steps was held against the golden's.
    """

    prompts: int
    requests: int
    generated: int
    prefilled: int
    judged: int
    compared: int
    differing: int
    second_turns: int
    second_turns_cached: int
    second_turns_differing: int
    findings: int
    verify_counts: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's answer. ``findings`` and ``reasons`` are capped (40 each); ``counts.findings`` has their full number.

    ``executed`` is None where the server does not tell. ``methods``: what each method judged of each load.
    ``epsilon`` in nats (see judge.epsilon). ``shape``: the resolved speculation arguments the server showed.
    """

    format: int
    kind: Kind
    policy: Policy
    algorithm: str
    dtype: str
    epsilon: float
    shape: dict[str, Scalar]
    prompt_set: str
    max_new_tokens: int
    accept_length: float | None
    reasons: list[Reason]
    findings: list[Finding]
    runs: list[RunCounts]
    counts: Counts
    seconds: float
    methods: list[MethodCounts] = []
    executed: Shown | None = None

    def passed(self, policy: Policy | None = None) -> bool:
        """Whether this counts as a pass under ``policy`` (default: the policy the gate ran under)."""
        return self.kind is Kind.EXACT or (self.kind is Kind.NEAR_TIE and (policy or self.policy) == "near-tie")

    def exit_code(self, policy: Policy | None = None) -> int:
        """0 pass, 4 not exact, 8 no verdict."""
        if self.kind is Kind.INCONCLUSIVE:
            return 8
        return 0 if self.passed(policy) else 4

    def lines(self) -> list[str]:
        """The verdict for a terminal (render.render_lines)."""
        from ddtree_ops.exactness.render import render_lines

        return render_lines(self)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain dicts, lists and scalars, ready for json.dumps; every float in it is finite."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @staticmethod
    def from_json(stored: str | bytes | Mapping[str, Any]) -> Verdict:
        """The verdict in JSON text or in what to_json gave. ValueError when it is none, or of another format."""
        try:
            if isinstance(stored, str | bytes):
                verdict = msgspec.json.decode(stored, type=Verdict)
            else:
                verdict = msgspec.convert(stored, type=Verdict)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a stored verdict: {error}") from error
        if verdict.format != FORMAT:
            raise ValueError(f"a verdict of format {verdict.format}; this ddtree reads format {FORMAT}")
        return verdict
