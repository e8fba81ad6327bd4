"""The prompt sets of a sweep: distinct prompts in a fixed order, their hash, and what is known of EOS and loops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ddtree_ops import engine_pair
from ddtree_ops.errors import UsageError
from ddtree_ops.exactness import load_prompts
from ddtree_ops.model import Profile

HELD_OUT = "held-out"
CODING = "coding"
#: Distinct prompts a cell needs at C > 1, so that neither cache hits nor lock-step decide (design.md, "Measuring").
ENOUGH = 128
#: An output whose end repeats a cycle of at most this many tokens, at least three times and over 24 tokens, loops.
LONGEST_CYCLE, LEAST_TOKENS = 32, 24

_ASKS = (
    "Write a Python function for {}, with type hints and a docstring.",
    "Explain step by step how {} works, with one small example.",
    "Implement {} in C++17 without the standard algorithms, then say what it costs in time and memory.",
    "Compare two ways to do {} and say when each one is the better choice.",
    "Write unit tests in pytest that an implementation of {} must pass, edge cases included.",
    "Find out what usually goes wrong in {}, and show for each mistake a corrected piece of code.",
    "Describe {} to somebody who can program and has never heard of it.",
    "Give a Rust module for {}, with errors as values, and a main that shows it.",
)
_SUBJECTS = (
    "an LRU cache",
    "topological sorting",
    "a rate limiter with a token bucket",
    "parsing arithmetic expressions",
    "a bloom filter",
    "binary search over rotated arrays",
    "consistent hashing",
    "a trie with prefix search",
    "merging overlapping intervals",
    "an undo history for a text editor",
    "Dijkstra's shortest paths",
    "a thread-safe bounded queue",
    "reading CSV files with quoted fields",
    "exponential back-off with jitter",
    "matrix multiplication in blocks",
    "a write-ahead log",
    "edit distance between two strings",
    "garbage collection by reference counting",
    "a B-tree's insertion",
    "public-key signatures",
    "union-find with path compression",
    "streaming median of numbers",
    "a small regular-expression matcher",
    "two-phase commit",
)


@dataclass(frozen=True)
class PromptSet:
    """``prompts``: token ids or text each, all distinct; ``sha256`` over them in order."""

    name: str
    prompts: tuple[tuple[int, ...] | str, ...]

    @property
    def sha256(self) -> str:
        """Of the prompts as JSON."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """For the run's header."""
        lengths = [len(prompt) for prompt in self.prompts if not isinstance(prompt, str)]
        known = {"shortest": min(lengths), "longest": max(lengths)} if len(lengths) == len(self.prompts) else {}
        return {"sha256": self.sha256, "prompts": len(self.prompts), **known}


def prompt_set(name: str | None, profile: Profile) -> PromptSet:
    """The set of that name, a file of prompts, or (None) what suits the profile's model. Raises UsageError."""
    if name is None:
        name = HELD_OUT if profile.model.startswith("release:pair/") else CODING
    if name == HELD_OUT:
        return PromptSet(name, held_out())
    if name == CODING:
        return coding()
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"--prompts {name}: no such set and no such file", hint=f"{HELD_OUT}, {CODING}, or a file")
    prompts = [prompt.input_ids or prompt.text or "" for prompt in load_prompts(path)]
    distinct = tuple(dict.fromkeys(prompts))
    if len(distinct) != len(prompts):
        raise UsageError(f"{path}: {len(prompts) - len(distinct)} prompts are there twice", hint="a cache would answer")
    return PromptSet(path.stem, distinct)


def coding() -> PromptSet:
    """Coding and explaining prompts as text: every ask with every subject."""
    return PromptSet(CODING, tuple(ask.format(subject) for ask in _ASKS for subject in _SUBJECTS))


def held_out(*, looping: bool = True) -> tuple[tuple[int, ...], ...]:
    """The tiny pair's prompts as token ids; without ``looping`` only those whose greedy continuation does not loop."""
    rows = json.loads(engine_pair.HELD_OUT.read_text())
    return tuple(tuple(row["prompt_ids"]) for row in rows if looping or not row["loops"])


def eos_ids(*configs: bytes) -> list[int] | None:
    """EOS token ids out of a model's generation_config.json or config.json, the first that names any; else None."""
    for data in configs:
        try:
            config = msgspec.json.decode(data)
        except msgspec.MsgspecError:
            continue
        for place in (config, config.get("text_config")) if isinstance(config, dict) else ():
            given = place.get("eos_token_id") if isinstance(place, dict) else None
            ids = given if isinstance(given, list) else [given]
            if numbers := [one for one in ids if isinstance(one, int) and not isinstance(one, bool)]:
                return numbers
    return None


def loops(tokens: Sequence[int]) -> bool:
    """Whether the output ends in a cycle: such text is drafted too well, and says little of other text."""
    for cycle in range(1, LONGEST_CYCLE + 1):
        repeated = max(3 * cycle, LEAST_TOKENS)
        if len(tokens) < repeated + cycle:
            return False
        end = tokens[-repeated:]
        if all(end[i] == end[i - cycle] for i in range(cycle, repeated)):
            return True
    return False
