"""Two runs side by side: cells of one workload, and what else differs between them said first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.report import words
from ddtree_ops.report.blocks import Block, Heading, Items, Table, Text
from ddtree_ops.report.content import headline, load_name
from ddtree_ops.sweep.records import Record
from ddtree_ops.sweep.stats import Ratio, paired_ratio
from ddtree_ops.sweep.tables import Group, groups, header, why_apart


def comparison(
    a: Sequence[Record], b: Sequence[Record], names: tuple[str, str], hashes: tuple[str, str]
) -> list[Block]:
    """The report of two runs. Only cells with the same prompts, lengths and requests are held against each other."""
    one, other = header(a), header(b)
    blocks: list[Block] = [
        Heading(1, f"{names[0]} and {names[1]}"),
        Items(
            [
                f"A: {one.service} on {one.host}, {words.moment(one.t)}, sha256 {hashes[0]}. {headline(a)}",
                f"B: {other.service} on {other.host}, {words.moment(other.t)}, sha256 {hashes[1]}. {headline(b)}",
            ]
        ),
    ]
    changed = {n for n in {*one.sets, *other.sets} if one.sets.get(n) != other.sets.get(n)}
    met = 0
    for left in groups(a):
        for right in groups(b):
            if (left.prompts, left.max_tokens, left.open_loop) != (right.prompts, right.max_tokens, right.open_loop):
                continue
            title = f"prompts {left.prompts}, {left.max_tokens} new tokens"
            if left.prompts in changed:
                blocks += [Heading(2, title), Text("Not compared: the prompt set has changed between the two runs.")]
                continue
            met += 1
            blocks += [Heading(2, title), *_pair(left, right)]
    if not met:
        blocks.append(Text("The two runs have no workload in common, so nothing is compared."))
    return blocks


def _pair(left: Group, right: Group) -> list[Block]:
    differing = why_apart(left, right)
    said = (
        ["Besides the shapes these differ, and a ratio shows all of it together: " + "; ".join(differing) + "."]
        if differing
        else ["Release, model, parallelism and machine are the same."]
    )
    rows, claims = [], []
    for shape in left.shapes:
        for load in left.loads:
            one, other = left.get(shape, load), right.get(shape, load)
            if one is None or other is None:
                continue
            found: Ratio = paired_ratio(one.speeds(), other.speeds())
            rows.append(
                [
                    shape.name,
                    load_name(load),
                    words.interval(one.throughput),
                    words.interval(other.throughput),
                    words.ratio(found),
                    f"{words.number(one.accept_length, 2)} / {words.number(other.accept_length, 2)}",
                ]
            )
            if found.beats or found.loses:
                claims.append(words.claim(f"{shape.name} {load_name(load)} in A", "itself in B", found) + ".")
    if not rows:
        return [Items([*said, "No cell is in both."])]
    table = Table(["shape", "load", "A tokens/s", "B tokens/s", "A / B", "accept length A / B"], rows)
    return [Items(said), table, Items(claims or ["No cell is proven faster in one of them than in the other."])]
