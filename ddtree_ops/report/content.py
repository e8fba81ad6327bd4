"""A run's records as the blocks of its report. Pure: no clock, no host, no file."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.report import words
from ddtree_ops.report.blocks import Block, Code, Heading, Items, Table, Text
from ddtree_ops.report.method import hardware, method
from ddtree_ops.report.plots import figures
from ddtree_ops.sweep.claims import Crossover, best, crossover, doubts, prediction, ranking, ratio
from ddtree_ops.sweep.findings import accept_findings, downtimes, drift, output_findings
from ddtree_ops.sweep.grid import AR, CHAIN, Load
from ddtree_ops.sweep.records import Measured, Record, Started
from ddtree_ops.sweep.tables import Group, Result, groups, header, why_apart
from ddtree_ops.sweep.workload import ENOUGH


def report(records: Sequence[Record], sha256: str) -> list[Block]:
    """The whole report. ``sha256``: of the records as they lie on the disk."""
    run, tables = header(records), groups(records)
    blocks: list[Block] = [
        Heading(1, f"Sweep of {run.service} on {run.host}"),
        Text(headline(records)),
        Text(f"Begun {words.moment(run.t)}; ddtree {run.version}; records sha256 {sha256}."),
    ]
    if len(tables) > 1:
        blocks.append(Heading(2, "Why there are several tables"))
        lines = [f"Table {n + 2} and table 1: {'; '.join(why_apart(tables[0], t))}" for n, t in enumerate(tables[1:])]
        blocks.append(Items([f"{line}. Their cells are not compared." for line in lines]))
    for index, group in enumerate(tables, start=1):
        several = len(tables) > 1
        name = f"Table {index}: " if several else ""
        blocks += section(records, group, name, f"t{index}-" if several else "")
    blocks += [Heading(2, "Findings"), Items(findings(records, tables) or ["None."])]
    if failed := failures(records):
        blocks += [Heading(2, "Cells without figures"), failed]
    blocks += [*method(records, tables), *hardware(records), Heading(2, "How to repeat")]
    blocks += [Text("In the same workspace, against the same release:"), Code(run.command)]
    return blocks


def headline(records: Sequence[Record]) -> str:
    """One sentence: what is fastest where, as far as it is proven."""
    tables = groups(records)
    found = []
    for load in tables[0].loads if tables else []:
        top = best(tables[0], load)
        if top is not None and (speed := top[0].throughput) is not None:
            over = ratio(tables[0], top[0].shape, AR, load) if top[0].shape != AR else None
            told = f", {over.value:.2f} x AR" if over is not None and over.proven else ""
            sure = "" if top[1] is not None and top[1].beats else " (not proven)"
            found.append(f"{load_name(load)} {top[0].shape.name} {speed.value:.0f} tokens/s{told}{sure}")
    return f"Fastest measured: {'; '.join(found)}." if found else "No cell has figures."


def section(records: Sequence[Record], group: Group, name: str, prefix: str) -> list[Block]:
    """The tables, the commentary and the charts of one group of comparable cells."""
    identity = group.identity
    what = (
        f"{identity.get('model')} ({identity.get('dtype')}) on {identity.get('engine')}, TP{identity.get('tp')} "
        f"PP{identity.get('pp')} EP{identity.get('ep')}, GPUs {identity.get('gpus')}, release {identity.get('release')}"
    )
    title = f"{name}prompts {group.prompts}, {group.max_tokens} new tokens"
    blocks: list[Block] = [Heading(2, title + (", Poisson arrivals" if group.open_loop else "")), Text(what)]
    crossings = [crossover(group, against, doubts(records, group)) for against in (AR, CHAIN)]
    if len(group.loads) > 1:
        blocks += [Heading(3, "Tokens/s of all requests together"), by_concurrency(group)]
    for load in group.loads:
        blocks += [Heading(3, load_name(load)), one_load(group, load)]
    if (predicted := predictions(group)) is not None:
        blocks += [Heading(3, "Speed-up against its limit"), predicted]
    blocks += [Heading(3, "What the figures say"), Items(commentary(group, crossings))]
    return blocks + list(figures(group, crossings, prefix))


def load_name(load: Load) -> str:
    """As headings name it."""
    return f"C={load.concurrency}" if load.rate is None else f"{load.rate:g} requests/s"


def by_concurrency(group: Group) -> Table:
    """Shapes by C: medians alone."""
    rows = []
    for shape in group.shapes:
        cells = [_speed(group.get(shape, load)) for load in group.loads]
        rows.append([shape.name, *cells])
    return Table(["shape", *map(load_name, group.loads)], rows, "Median over all repeats and starts; -: no figures.")


def _speed(result: Result | None) -> str:
    return "-" if result is None or result.throughput is None else f"{result.throughput.value:.1f}"


def one_load(group: Group, load: Load) -> Table:
    """Every shape under one load, the fastest first."""
    rows = []
    for result in ranking(group, load):
        first = result.repeats[0]
        rows.append(
            [
                result.shape.name,
                words.interval(result.throughput),
                words.ratio(ratio(group, result.shape, AR, load)) if result.shape != AR else "1",
                words.number(result.accept_length, 2),
                words.number(result.median("per_request")),
                words.percentiles(first.ttft_ms),
                words.percentiles(first.itl_ms),
                words.number(result.median("steps_per_s")),
                str(len(result.records)),
            ]
        )
    sample = next((result.throughput for result in ranking(group, load)), None)
    coverage = f"{sample.coverage:.0%}" if sample else "-"
    columns = ["shape", "tokens/s", "x AR", "accept length", "per request", "TTFT ms", "ITL ms", "steps/s", "starts"]
    note = (
        f"tokens/s: median over the repeats of all starts, in brackets an interval that holds it with {coverage} or "
        "what the row's repeats allow; x AR: paired per prompt, 95 %; TTFT and ITL: p50 / p90 / p99 of the first "
        f"repeat; steps/s: of all requests. {load.requests} requests a repeat."
    )
    return Table(columns, rows, note)


def predictions(group: Group) -> Table | None:
    """Predicted and measured speed-ups; None without AR or speculation."""
    rows = []
    for load in group.loads:
        for shape in group.shapes:
            found = prediction(group, shape, load)
            if found is not None:
                rows.append(
                    [
                        shape.name,
                        load_name(load),
                        words.number(found.commit_length, 2),
                        words.number(found.ar_step_ms, 2),
                        words.number(found.verify_step_ms, 2),
                        words.number(found.predicted, 2),
                        words.number(found.measured, 2),
                        f"{100 * (found.rest - 1):+.0f} %",
                    ]
                )
    if not rows:
        return None
    columns = ["shape", "load", "commit length", "AR step ms", "verify step ms", "predicted", "measured", "unexplained"]
    note = (
        "predicted = commit length x AR step time / verify step time; unexplained = measured / predicted - 1: prefill, "
        "queueing, and whatever else no step shows."
    )
    return Table(columns, rows, note)


def commentary(group: Group, crossings: Sequence[Crossover]) -> list[str]:
    """Sentences that follow from the figures and from nothing else."""
    found = []
    for load in group.loads:
        top = best(group, load)
        if top is None:
            found.append(f"{load_name(load)}: no figures.")
            continue
        second = ranking(group, load)[1:2]
        if top[1] is None or not second:
            found.append(f"{load_name(load)}: only {top[0].shape.name} has figures.")
        else:
            found.append(f"{load_name(load)}: {words.claim(top[0].shape.name, second[0].shape.name, top[1])}.")
    rows = [row for result in group.results for repeat in result.repeats for row in repeat.rows]
    if rows:
        found.append(f"{sum(row.loops for row in rows) / len(rows):.0%} of all outputs end in a loop.")
    for crossing in crossings:
        if crossing.between is not None:
            low, high = crossing.between
            found.append(f"{crossing.against.name} overtakes the best tree between C={low} and C={high}.")
        else:
            found.append(f"Crossover with {crossing.against.name}: not claimed; {crossing.why}.")
    return found


def findings(records: Sequence[Record], tables: Sequence[Group]) -> list[str]:
    """What somebody should look at."""
    found = [line for group in tables for line in (*accept_findings(group), *output_findings(group))]
    moved = drift(records)
    if moved.exceeded and moved.load is not None:
        found.append(
            f"Drift: the reference cell {moved.shape.name} {moved.load.name} moved by {100 * moved.change:+.1f} % over "
            f"the run, more than the stated {100 * moved.bound:.0f} %: differences of that size mean nothing here."
        )
    for group in tables:
        for result in group.results:
            name = f"{result.shape.name} {load_name(result.load)}"
            if result.looping > 0.2:
                found.append(f"{name}: {result.looping:.0%} of the outputs loop, which flatters speculation.")
            rows = sum(len(repeat.rows) for repeat in result.repeats)
            cached = sum(repeat.cached_tokens or 0 for repeat in result.repeats)
            if cached >= rows > 0:  # prompts that begin alike share a token or two
                found.append(f"{name}: {cached / rows:.1f} prompt tokens a request came from the prefix cache.")
            if unsteady := sum(record.steady is False for record in result.records):
                found.append(f"{name}: not steady after the warm-up in {unsteady} of {len(result.records)} starts.")
            distinct = {row.prompt for repeat in result.repeats for row in repeat.rows}
            if result.load.concurrency > 1 and 0 < len(distinct) < ENOUGH:
                found.append(f"{name}: only {len(distinct)} distinct prompts, fewer than {ENOUGH}.")
    rules = dict.fromkeys(rule for record in records if isinstance(record, Started) for rule in record.rules)
    found += [f"Rule applied: {rule}" for rule in rules]
    if down := downtimes(records):
        found.append(
            f"The service that ran before was away {len(down)} times, {min(down):.0f} to {max(down):.0f} s each."
        )
    return found


def failures(records: Sequence[Record]) -> Table | None:
    """Cells that have no figures, and why."""
    rows = [
        [record.cell.name, record.status, record.reason]
        for record in {r.cell: r for r in records if isinstance(r, Measured)}.values()
        if record.status != "ok"
    ]
    return Table(["cell", "result", "reason"], rows) if rows else None
