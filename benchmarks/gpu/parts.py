"""Where a decode step's time goes, from the traces that ``tests/gpu/run --select traces`` brings back.

    python -m benchmarks.gpu.parts TRACES [--json OUT]        TRACES: the folder of that name in evidence.tar.gz

A CUDA graph's kernels carry the correlation id of its launch, so each kernel belongs to the draft's graph, the target's
graph or to neither. Spans are from the first kernel's begin to the last one's end, milliseconds, medians over the
traced steps. Of a step that speculates:

- draft: its graph up to the last matrix product, which is the head's;
- build: the rest of that graph, where the tree is made (a chain has its argmax there);
- verify: the target's graph; attention is what its attention kernels take of it;
- commit: kernels outside the graphs, summed: the mask, the walk, the moves, the drafter's KV, the batch's bookkeeping;
- idle: the step's length, from one target graph's begin to the next one's, less all of these;
- host waits: calls that wait for the device, a step.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PRODUCTS = ("nvjet", "gemm", "cutlass", "cublas", "splitKreduce")
ATTENTION = ("_fwd_kernel", "_fwd_grouped_kernel", "_attend_share", "_merge_shares")
"""Kernels of the Triton backend, and of ddtree_attention."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Runtime calls that return when the device is done. ``cudaEventQuery`` and asynchronous copies do not wait; the
profiler itself ends with one ``cudaDeviceSynchronize``."""

Event = dict[str, Any]


@dataclass
class Parts:
    """Of one trace; milliseconds a step but for ``waits``. None: there is no such part."""

    steps: int
    step: float
    verify: float
    attention: float
    draft: float | None
    build: float | None
    commit: float
    idle: float
    waits: float
    kernels: dict[str, float] = field(default_factory=dict)
    """The target graph's longest, by name."""


def parts(events: list[Event]) -> Parts:
    """Raises ValueError for a trace without two launches of the target's graph."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    of: dict[int, list[Event]] = defaultdict(list)
    for kernel in kernels:
        of[kernel["args"]["correlation"]].append(kernel)
    launched = [e["args"]["correlation"] for e in events if e.get("name") == "cudaGraphLaunch"]
    graphs = sorted((sorted(of[c], key=_begin) for c in launched if of[c]), key=lambda g: _begin(g[0]))
    largest = max((len(graph) for graph in graphs), default=0)
    targets = [graph for graph in graphs if len(graph) == largest]
    drafts = [graph for graph in graphs if len(graph) != largest]
    if len(targets) < 2:
        raise ValueError(f"{len(targets)} launches of a target's graph")
    first, last = _begin(targets[0][0]), _begin(targets[-1][0])
    steps = len(targets) - 1
    within = [e for e in kernels if first <= _begin(e) < last]
    in_graphs = {id(e) for graph in graphs for e in graph}
    outside = sum(e["dur"] for e in within if id(e) not in in_graphs) / steps
    step = statistics.median(_begin(b[0]) - _begin(a[0]) for a, b in itertools.pairwise(targets))
    verify = statistics.median(_span(graph) for graph in targets)
    heads = [max(i for i, e in enumerate(graph) if _is(e, PRODUCTS)) for graph in drafts]
    draft = statistics.median(_span(g[: i + 1]) for g, i in zip(drafts, heads, strict=True)) if drafts else None
    whole = statistics.median(_span(graph) for graph in drafts) if drafts else None
    names: dict[str, float] = defaultdict(float)
    for graph in targets:
        for event in graph:
            names[event["name"]] += event["dur"] / len(targets) / 1000
    waits = [e for e in events if e.get("cat") == "cuda_runtime" and e["name"] in WAITS]
    own = 1 if sum(e["name"] == "cudaDeviceSynchronize" for e in waits) == 1 else 0
    return Parts(
        steps=steps,
        step=step / 1000,
        verify=verify / 1000,
        attention=sum(ms for name, ms in names.items() if any(word in name for word in ATTENTION)),
        draft=None if draft is None else draft / 1000,
        build=None if draft is None or whole is None else (whole - draft) / 1000,
        commit=outside / 1000,
        idle=max(0.0, step - verify - (whole or 0.0) - outside) / 1000,
        waits=(len(waits) - own) / len(targets),
        kernels=dict(sorted(names.items(), key=lambda item: -item[1])[:8]),
    )


def _begin(event: Event) -> float:
    return float(event["ts"])


def _span(graph: list[Event]) -> float:
    return max(_begin(e) + float(e["dur"]) for e in graph) - _begin(graph[0])


def _is(event: Event, words: tuple[str, ...]) -> bool:
    return any(word in event["name"] for word in words)


def table(found: dict[str, Parts]) -> str:
    """One line a trace. Names are SERVER-CONTEXT-cCONCURRENCY; AR's of the same load is what ``x AR`` divides by."""
    lines = [
        f"{'trace':28}{'step':>8}{'draft':>8}{'build':>8}{'verify':>8}{'x AR':>7}{'attent.':>8}{'commit':>8}"
        f"{'idle':>8}{'waits':>7}"
    ]
    for name, one in sorted(found.items()):
        load = name.split("-")[-2:]
        ar = next((p.verify for n, p in found.items() if n.startswith("fast-ar-") and n.split("-")[-2:] == load), None)
        ratio = f"{one.verify / ar:.2f}" if ar else "-"
        cells = [one.step, one.draft, one.build, one.verify]
        shown = "".join(f"{'-' if cell is None else f'{cell:.2f}':>8}" for cell in cells)
        lines.append(f"{name:28}{shown}{ratio:>7}{one.attention:8.2f}{one.commit:8.2f}{one.idle:8.2f}{one.waits:7.1f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.parts")
    parser.add_argument("traces", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found = {}
    for path in sorted(args.traces.rglob("*.json.gz")):
        with gzip.open(path) as file:
            found[path.parent.name] = parts(json.load(file)["traceEvents"])
    if not found:
        print(f"parts: no *.json.gz below {args.traces}", file=sys.stderr)
        return 2
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
