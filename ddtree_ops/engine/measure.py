"""`python -m ddtree_ops.engine.measure`: token identity with AR and commit length of chain and trees, in process.

Rows are held-out prompts. Commit length is tokens that verify steps committed (accepted + 1 bonus; what falls behind
the length limit in the last step included, the first token, which the prefill gives, not) over verify steps, pooled
over rows. It is quoted over rows that do not loop as well: a text that repeats itself is easy to draft. Where the
prompt file does not say which rows loop, a row loops when fewer than half of the 8-grams of its AR output are
distinct.

Exit codes: 0 every configuration equals AR token for token, 1 some row differs or a file is wrong, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .arguments import ArgumentError, Arguments
from .config import ConfigError
from .faults import Fault
from .loading import build_decoder, resolve
from .metrics import Metrics
from .request import Request, Update
from .scheduler import Scheduler

DEFAULT_PAIR = Path(__file__).parent / "pair"
DEFAULT_PAIRS = ((8, 4), (16, 4), (16, 8), (24, 6), (32, 8), (48, 8))


@dataclass(frozen=True)
class Row:
    """A held-out prompt; the recorded fp32 AR output and whether it loops, where the file says so."""

    prompt: list[int]
    recorded: list[int] | None
    loops: bool | None


@dataclass(frozen=True)
class Outcome:
    """One configuration's figures. Commit lengths are None for AR, and where no row qualifies."""

    name: str
    budget: int | None
    topk: int | None
    rows: int
    rows_that_differ: int
    commit_length: float | None
    commit_length_no_loops: float | None
    seconds: float
    tokens_per_second: float


def read_rows(path: Path) -> list[Row]:
    """Rows of a prompt file: a list of {prompt_ids, ar_fp32?, loops? (or loopy)}. Raises ConfigError."""
    try:
        entries = json.loads(path.read_text("utf-8"))
        rows = [Row(e["prompt_ids"], e.get("ar_fp32"), e.get("loops", e.get("loopy"))) for e in entries]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a list of objects with prompt_ids: {error!r}") from None
    if not rows:
        raise ConfigError(f"{path}: holds no prompts")
    return rows


def loops(output: list[int]) -> bool:
    """Whether fewer than half of the output's 8-grams are distinct."""
    grams = [tuple(output[i : i + 8]) for i in range(len(output) - 7)]
    return 2 * len(set(grams)) < len(grams)


def generate(arguments: Arguments, prompts: list[list[int]], max_new_tokens: int) -> tuple[list[Update], float]:
    """(last update of every prompt, wall seconds without loading), through the very scheduler that serves HTTP.

    EOS is ignored, so that every row has its full length. Raises ConfigError, ArgumentError, RuntimeError.
    """
    resolved = resolve(arguments)
    decoder = build_decoder(arguments, resolved)
    metrics = Metrics("measure", resolved.draft.block_size - 1 if resolved.draft else 0)
    scheduler = Scheduler(decoder, resolved.width, arguments.max_running_requests, metrics, lambda _reason: None)
    done: dict[int, Update] = {}
    complete = threading.Event()

    def sink(index: int) -> Callable[[Update], None]:
        def take(update: Update) -> None:
            done[index] = update
            if len(done) == len(prompts):
                complete.set()

        return take

    for prompt in prompts:
        if not prompt or scheduler.slots_for(len(prompt), max_new_tokens) > min(
            decoder.table.columns, decoder.table.slots
        ):
            raise ConfigError(f"a prompt of {len(prompt)} tokens and {max_new_tokens} more does not fit the context")
    scheduler.submit(
        [Request(str(i), p, max_new_tokens, frozenset(), None, False, sink(i)) for i, p in enumerate(prompts)]
    )
    started = time.monotonic()
    scheduler.start()
    complete.wait()
    seconds = time.monotonic() - started
    scheduler.stop("measured")
    scheduler.join(timeout=5)
    if scheduler.failure is not None:
        raise RuntimeError(scheduler.failure)
    return [done[i] for i in range(len(prompts))], seconds


def measure(base: Arguments, draft: Path, rows: list[Row], pairs: list[tuple[int, int]], limit: int) -> list[Outcome]:
    """AR, chain, then every budget/topk pair. Rows that differ are counted against this machine's own AR.

    For AR itself they are counted against the recorded output, where there is one.
    """
    prompts = [row.prompt for row in rows]
    ar, seconds = generate(base, prompts, limit)
    reference = [update.output_ids for update in ar]
    looping = [loops(out) if row.loops is None else row.loops for row, out in zip(rows, reference, strict=True)]
    recorded = [
        row.recorded[:limit] if row.recorded else out[: len(out)] for row, out in zip(rows, reference, strict=True)
    ]
    moved = sum(out[: len(old)] != old for out, old in zip(reference, recorded, strict=True))
    outcomes = [Outcome("AR", None, None, len(rows), moved, None, None, seconds, len(rows) * limit / seconds)]
    for budget, topk in [(None, None), *pairs]:
        arguments = replace(
            base,
            speculative_algorithm="DFLASH" if budget is None else "DDTREE",
            speculative_draft_model_path=draft,
            speculative_ddtree_budget=budget,
            speculative_ddtree_topk=topk,
        )
        updates, seconds = generate(arguments, prompts, limit)
        outcomes.append(
            Outcome(
                name="chain" if budget is None else f"tree {budget}/{topk}",
                budget=budget,
                topk=topk,
                rows=len(rows),
                rows_that_differ=sum(u.output_ids != out for u, out in zip(updates, reference, strict=True)),
                commit_length=_commit_length(updates),
                commit_length_no_loops=_commit_length(
                    [u for u, loop in zip(updates, looping, strict=True) if not loop]
                ),
                seconds=seconds,
                tokens_per_second=len(rows) * limit / seconds,
            )
        )
    return outcomes


def _commit_length(updates: list[Update]) -> float | None:
    steps = sum(update.verify_count for update in updates)
    return sum(update.committed for update in updates) / steps if steps else None


def _pairs(text: str) -> list[tuple[int, int]]:
    found = []
    for item in text.split(","):
        budget, slash, topk = item.partition("/")
        if not slash or not budget.isdecimal() or not topk.isdecimal() or not int(budget) or not int(topk):
            raise argparse.ArgumentTypeError(f"{item!r} is no budget/topk pair such as 8/4")
        found.append((int(budget), int(topk)))
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def _table(outcomes: list[Outcome]) -> str:
    lines = [f"{'':12} {'differ':>10} {'commit, all':>12} {'no loops':>9} {'tok/s':>8} {'seconds':>8}"]
    for o in outcomes:
        everything, quiet = (f"{x:.2f}" if x is not None else "-" for x in (o.commit_length, o.commit_length_no_loops))
        differ = f"{o.rows_that_differ} of {o.rows}"
        lines.append(
            f"{o.name:12} {differ:>10} {everything:>12} {quiet:>9} {o.tokens_per_second:8.0f} {o.seconds:8.1f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    p = argparse.ArgumentParser(prog="python -m ddtree_ops.engine.measure", allow_abbrev=False)
    p.add_argument("--pair", type=Path, default=DEFAULT_PAIR, help="directory with target/ and draft/")
    p.add_argument("--prompts", type=Path, help="default: held_out.json of the pair")
    p.add_argument("--pairs", type=_pairs, default=list(DEFAULT_PAIRS), help="budget/topk,... to measure")
    p.add_argument("--max-new-tokens", type=_positive, default=128)
    p.add_argument("--concurrency", type=_positive, default=8)
    p.add_argument("--rows", type=_positive, help="measure the first so many prompts only")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--fault", type=Fault, choices=list(Fault))
    p.add_argument("--num-threads", type=_positive)
    p.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    o = p.parse_args(argv)
    if o.num_threads is not None:
        torch.set_num_threads(o.num_threads)
    base = Arguments(
        o.pair / "target", dtype=o.dtype, max_running_requests=o.concurrency, fault=o.fault, disable_radix_cache=True
    )
    try:
        rows = read_rows(o.prompts or o.pair / "held_out.json")[: o.rows]
        outcomes = measure(base, o.pair / "draft", rows, o.pairs, o.max_new_tokens)
    except (ConfigError, ArgumentError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    settings: dict[str, Any] = {"max_new_tokens": o.max_new_tokens, "concurrency": o.concurrency, "dtype": o.dtype}
    if o.json:
        print(json.dumps({**settings, "fault": o.fault, "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        print(_table(outcomes))
    return int(any(outcome.rows_that_differ for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
