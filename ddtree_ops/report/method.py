"""The parts of a report that say how and on what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.report import words
from ddtree_ops.report.blocks import Block, Heading, Items, Table
from ddtree_ops.sweep.findings import drift
from ddtree_ops.sweep.records import Client, Measured, Record, Started
from ddtree_ops.sweep.tables import Group, header


def method(records: Sequence[Record], tables: Sequence[Group]) -> list[Block]:
    """How it was measured, in sentences that the records bear out."""
    run = header(records)
    starts = [record for record in records if isinstance(record, Started)]
    kinds = dict.fromkeys(str(start.verdict.get("kind")) for start in starts)
    client = next((record for record in records if isinstance(record, Client)), None)
    sets = [f"{name}: {facts.get('prompts')} prompts, sha256 {facts.get('sha256')}" for name, facts in run.sets.items()]
    items = [
        "Greedy, streamed, a fixed number of new tokens (EOS ignored); acceptance is counted up to the first EOS. "
        "Tokens and steps are the server's counts.",
        "A closed loop keeps C requests in flight; tokens/s are those of the steady window, in which C of them decode. "
        "Prompts are asked again under a cache namespace of their own.",
        f"{len(starts)} starts of the service, each through the deploy path and the exactness gate (verdicts: "
        f"{words.listed(list(kinds) or ['none'])}), none confirmed; shapes in random order, seed {run.seed}.",
        "Ratios are paired per prompt and clustered by start of the service; A beats B only where the 95 % interval of "
        "the ratio excludes 1, which needs two starts of each.",
        *(f"Prompt set {line}." for line in sets),
    ]
    if client is not None:
        told = [f"C={value}: {tokens:.0f} tokens/s" for value, (tokens, _) in sorted(client.ceilings.items())]
        items.append(f"The load client's own ceiling against a stub, on the machine that measured: {', '.join(told)}.")
    moved = drift(records)
    if len(moved.points) > 1 and moved.load is not None:
        told = [f"{value:.1f} after {hours:.1f} h" for hours, value in moved.points]
        items.append(f"Reference cell {moved.shape.name} {moved.load.name}, tokens/s: {', '.join(told)}.")
    return [Heading(2, "Method"), Items(items)]


def hardware(records: Sequence[Record]) -> list[Block]:
    """The host's inventory line, and its GPUs before the first and after the last cell where they were told."""
    run = header(records)
    told = [f"{key} {value}" for key, value in run.hardware.items()]
    starts = [record for record in records if isinstance(record, Started)]
    machines = dict.fromkeys(f"{s.identity.get('machine')}, driver {s.identity.get('driver') or '-'}" for s in starts)
    blocks: list[Block] = [Heading(2, "Hardware"), Items([f"Inventory: {', '.join(told)}.", *machines])]
    cells = [record for record in records if isinstance(record, Measured) and record.gpus_before]
    if cells:
        rows = []
        for when, cards in (("before the first cell", cells[0].gpus_before), ("after the last", cells[-1].gpus_after)):
            for card in cards or []:
                figures = (card.sm_clock_mhz, card.temperature_c, card.power_w, card.memory_used_mib)
                rows.append([when, str(card.index), card.name, *(words.number(value, 0) for value in figures)])
        blocks.append(Table(["when", "GPU", "name", "SM MHz", "C", "W", "MiB used"], rows))
    return blocks
