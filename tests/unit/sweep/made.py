"""Runs made up from speeds that are known: records as a sweep would have written them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_ops.sweep.grid import AR, Cell, Load, Shape
from ddtree_ops.sweep.records import Client, Ended, Measured, Percentiles, Record, Repeat, Row, Run, Started

IDENTITY: dict[str, Any] = {
    "engine": "sglang", "release": "r1", "model": "/m", "weights": "w1", "dtype": "bfloat16",
    "tp": 8, "pp": 1, "ep": 1, "gpus": "8x X (sm_120, pcie)", "driver": "1", "machine": "box x86_64",
}  # fmt: skip
TOKENS = 512
B8K4, B16K4 = Shape("ddtree", 8, 4), Shape("ddtree", 16, 4)


def load(concurrency: int, prompts: int = 32) -> Load:
    return Load(concurrency, "coding", TOKENS, prompts, 3)


def repeat(
    chance: random.Random,
    shape: Shape,
    speed: float,
    concurrency: int,
    accept: float,
    hard: Sequence[float],
    tokens: str,
) -> Repeat:
    """``speed`` is of all C requests together; prompt p takes exp(-hard[p]) times as long as the mean one."""
    rows = []
    for prompt, how in enumerate(hard):
        seconds = TOKENS * concurrency / speed * math.exp(-how + chance.gauss(0, 0.01))
        steps = None if shape == AR else round((TOKENS - 1) / accept)
        rows.append(Row(prompt, TOKENS, steps, seconds, 0.1, TOKENS, steps, 0, False))
    shown = speed * math.exp(chance.gauss(0, 0.01))
    nothing = Percentiles(1.0, 2.0, 3.0)
    step = 1000 * concurrency / speed * (1 if shape == AR else accept)
    return Repeat(
        seconds=10.0, window_s=8.0, tokens=TOKENS * len(hard), throughput=shown, overall=shown, per_request=shown,
        ttft_ms=nothing, itl_ms=nothing, accept_length=None if shape == AR else accept,
        accept_over_time=[] if shape == AR else [(1.0, accept), (5.0, accept)],
        commits={} if shape == AR else {1: 10, 4: 30}, unseen_steps=0, steps_per_s=None, step_ms=step,
        in_flight=float(concurrency), cached_tokens=0, outputs=tokens, rows=rows,
    )  # fmt: skip


def made_run(
    speeds: Mapping[tuple[Shape, int], float],
    *,
    starts: int = 2,
    sigma: float = 0.01,
    accept: Mapping[tuple[Shape, int], float] | None = None,
    identity: Mapping[str, Any] | None = None,
    identities: Mapping[Shape, Mapping[str, Any]] | None = None,
    ceiling: float | None = 1e6,
    drift: float = 0.0,
    failed: Mapping[tuple[Shape, int], tuple[str, str]] | None = None,
    seed: int = 1,
    prompts: int = 32,
) -> list[Record]:
    """Every shape's cells, each shape started ``starts`` times. ``drift``: by how much later starts are faster."""
    chance = random.Random(seed)
    hard = [random.Random(prompt).gauss(0, 0.3) for prompt in range(prompts)]
    shapes = sorted({shape for shape, _ in speeds}, key=lambda shape: shape.width)
    concurrencies = sorted({value for _, value in speeds})
    records: list[Record] = [
        Run(
            format=1, t=1_800_000_000.0, host="ct200", service="k26", command="ddtree sweep --host ct200", seed=seed,
            reference=shapes[0], drift_bound=0.05, loads=[load(c, prompts).name for c in concurrencies], shapes=shapes,
            sets={"coding": {"sha256": "ab" * 32, "prompts": prompts}},
            hardware={"gpus": 8, "name": "X", "arch": "sm_120", "link": "pcie"}, version="0.1.0",
        )
    ]  # fmt: skip
    if ceiling is not None:
        records.append(Client(t=1_800_000_001.0, ceilings=dict.fromkeys(concurrencies, (ceiling, ceiling / 4))))
    t = 1_800_000_100.0
    for number in range(1, starts + 1):
        for shape in shapes:
            txn = f"{shape.name}-{number}"
            shift = math.exp(chance.gauss(0, sigma)) * (1 + drift * (number - 1))
            own = {**IDENTITY, **(identity or {}), **((identities or {}).get(shape) or {})}
            records.append(
                Started(
                    t=t, txn=txn, shape=shape, number=number, release="r1", profile={}, rules=[], arguments={},
                    identity=own, verdict={"kind": "NEAR-TIE"}, passed=True, load_s=600.0,
                )
            )  # fmt: skip
            for concurrency in concurrencies:
                cell = Cell(shape, load(concurrency, prompts), number)
                t += 60
                if (shape, concurrency) in (failed or {}):
                    status, why = (failed or {})[shape, concurrency]
                    records.append(Measured(t=t, cell=cell, status=status, reason=why, txn=txn))  # type: ignore[arg-type]
                elif (shape, concurrency) in speeds:
                    long = (accept or {}).get((shape, concurrency), 4.0)
                    speed = speeds[shape, concurrency] * shift
                    repeats = [repeat(chance, shape, speed, concurrency, long, hard, "t") for _ in range(3)]
                    records.append(
                        Measured(
                            t=t, cell=cell, status="ok", txn=txn, repeats=repeats, warmup=2, steady=True, wall_s=50.0
                        )
                    )  # fmt: skip
            records.append(Ended(t=t, txn=txn, event="recovered", generation=3, seconds=700.0, downtime_s=900.0))
    return records
