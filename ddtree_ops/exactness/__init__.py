"""The exactness gate: proves that a running server's greedy output is the target model's own.

>>> verdict = run_gate(GatePlan(url="http://127.0.0.1:30000", ..., prompts=builtin_prompts()))
>>> verdict.passed("exact")
"""

from ddtree_ops.exactness.gate import run_gate
from ddtree_ops.exactness.plan import METHODS, GatePlan, Prompt, known_methods
from ddtree_ops.exactness.prompts import PROMPT_SET, builtin_prompts, load_prompts
from ddtree_ops.exactness.render import render_lines
from ddtree_ops.exactness.verdict import Finding, Kind, Policy, Reason, Verdict

__all__ = [
    "METHODS",
    "PROMPT_SET",
    "Finding",
    "GatePlan",
    "Kind",
    "Policy",
    "Prompt",
    "Reason",
    "Verdict",
    "builtin_prompts",
    "known_methods",
    "load_prompts",
    "render_lines",
    "run_gate",
]
