"""The sweep's load client beside SGLang's own ``bench_serving``: one server, the same prompts, lengths and C, in turns.

python -m benchmarks.bench_serving prepare DIR        SGLang 0.5.17's bench_serving and what it imports, out of the
                                                      locked wheels: no torch, no server; DIR may be carried elsewhere
python -m benchmarks.bench_serving compare --site DIR --server paced       against a stub of a fixed pace, started here
python -m benchmarks.bench_serving compare --site DIR --server reference   against the reference engine, tree 8/4
python -m benchmarks.bench_serving compare --url URL --model DIR --bench-python RELEASE/venv/bin/python
                                                      against any SGLang server with a tokenizer; needs no network

Writes OUT.json and OUT.txt; exit status 1 where a bounded figure differs by more than 3 %. An API key is taken from
OPENAI_API_KEY, where bench_serving looks for it. What the two count differently is DIFFERENCES below.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ddtree_ops.engine_pair import PAIR
from ddtree_ops.exactness import load_prompts
from ddtree_ops.release.cache import Cache
from ddtree_ops.release.fetch import fetch
from ddtree_ops.release.lock import load_lock
from ddtree_ops.release.workflow import stock
from ddtree_ops.sweep.ceiling import stub
from ddtree_ops.sweep.figures import repeat_of
from ddtree_ops.sweep.grid import Load
from ddtree_ops.sweep.load import Sample, drive
from ddtree_ops.sweep.records import Repeat
from ddtree_ops.sweep.server import arguments, server_info
from ddtree_ops.sweep.workload import PromptSet, coding

BASE = "sglang-0.5.17"
BOUND = 0.03
LIMIT_S = 1800.0
SEED = 1
#: What bench_serving imports besides SGLang; what these need in turn is in the lock.
NEEDS = {
    "aiohttp",
    "datasets",
    "numpy",
    "orjson",
    "pillow",
    "psutil",
    "pybase64",
    "pyzmq",
    "requests",
    "tqdm",
    "transformers",
}
#: SGLang's own files as they are; the packages above them import torch and more, so theirs are left empty.
WHOLE = ("sglang/bench_serving.py", "sglang/benchmark/", "sglang/srt/utils/network.py")
EMPTY = ("sglang", "sglang/srt", "sglang/srt/utils", "sglang/srt/disaggregation")
CONSTANT_FILE, CONSTANT = "sglang/srt/disaggregation/utils.py", "FAKE_BOOTSTRAP_HOST = "

DIFFERENCES = """\
What the two count differently:
- time: bench_serving divides by the time from before the first request is made to after the answer to a /server_info
  that it asks at the end; the sweep's `overall` by that from the first request sent to the last token. The sweep's own
  headline is neither: it is the steady window, in which C requests decode. It stands last, for comparison only.
- connections: bench_serving makes a client session and a connection for every request, inside the time it takes of
  it, the sweep keeps C of them. That is the same few milliseconds (on a busy machine more) for a short request and a
  long one, and over a forwarded port a round trip besides: the shorter a request, the slower bench_serving says.
- tokens: both take the server's completion_tokens. bench_serving passes over chunks whose text is empty, so its first
  token is the first that shows; the sweep's is the first that is counted.
- inter-token latency: both spread a chunk's gap over its tokens; the median is numpy's there, nearest rank here.
- accept length: bench_serving shows the server's average since it started, behind EOS as well; the sweep counts each
  request's own steps up to EOS. Not compared.
- failures: bench_serving leaves failed requests out and goes on; here, and in a sweep, one of them fails the pass.
Every pass has a cache namespace of its own in both (extra_key), prompts go out in the same order, EOS is ignored."""


class Figure(NamedTuple):
    """One compared figure: how to take it from a pass of the sweep's client, and its key in bench_serving's result."""

    name: str
    ours: Callable[[Repeat], float]
    theirs: str
    bounded: bool


FIGURES = (
    Figure("output tokens/s", lambda r: r.overall, "output_throughput", True),
    Figure("median latency, ms", lambda r: 1000 * statistics.median(x.seconds for x in r.rows), "median_e2e_latency_ms",
           True),
    Figure("mean time per token after the first, ms",
           lambda r: 1000 * statistics.fmean((x.seconds - x.ttft) / (x.tokens - 1) for x in r.rows), "mean_tpot_ms",
           True),
    Figure("median inter-token latency, ms", lambda r: r.itl_ms.p50 if r.itl_ms else 0.0, "median_itl_ms", False),
    Figure("median time to first token, ms", lambda r: 1000 * statistics.median(x.ttft for x in r.rows),
           "median_ttft_ms", False),
)  # fmt: skip


def prepare(folder: Path) -> None:
    """bench_serving, byte for byte, and its needs below ``folder``. Raises UsageError, Failed."""
    python = ".".join(platform.python_version_tuple()[:2])
    lock, wanted = load_lock(BASE, python), set(NEEDS)
    while more := {pin.name for pin in lock.pins if wanted & set(pin.via)} - wanted:
        wanted |= more
    for wheel in fetch(replace(lock, pins=tuple(pin for pin in lock.pins if pin.name in wanted)), Cache()):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    files = stock(BASE, python, Cache()).files
    for path in (path for path in files if path.startswith(WHOLE)):
        _write(folder / path, files[path])
    for package in EMPTY:
        _write(folder / package / "__init__.py", b"")
    line = next(line for line in files[CONSTANT_FILE].decode().splitlines() if line.startswith(CONSTANT))
    _write(folder / CONSTANT_FILE, line.encode() + b"\n")


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


class Pass(NamedTuple):
    """One pass of either client: its figures by name, the texts in the prompts' order, tokens in all."""

    figures: dict[str, float]
    texts: list[str]
    tokens: int


def our_pass(url: str, prompts: PromptSet, load: Load) -> tuple[Pass, Repeat]:
    """By the sweep's client. Raises RequestFailed, Hung."""
    key = os.environ.get("OPENAI_API_KEY")
    samples: list[Sample] = asyncio.run(drive(url, prompts, load, limit_s=LIMIT_S, api_key=key))
    repeat = repeat_of(samples, load.concurrency, None, closed=True)
    texts = [str(one.answer.body.get("text")) for one in sorted(samples, key=lambda one: one.prompt)]
    return Pass({one.name: one.ours(repeat) for one in FIGURES}, texts, repeat.tokens), repeat


def their_pass(url: str, prompts: PromptSet, load: Load, options: argparse.Namespace) -> Pass:
    """By ``python -m sglang.bench_serving``. Raises SystemExit with its words where a request failed."""
    with tempfile.TemporaryDirectory() as scratch:
        data, out = Path(scratch) / "prompts.jsonl", Path(scratch) / "result.jsonl"
        data.write_text(dataset([str(prompt) for prompt in prompts.prompts[: load.requests]]))
        argv = [options.bench_python, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url]
        argv += ["--model", str(options.model), "--tokenizer", str(options.model), "--ready-check-timeout-sec", "0"]
        argv += ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", str(load.requests)]
        argv += ["--sharegpt-output-len", str(load.max_tokens), "--max-concurrency", str(load.concurrency)]
        # Its own warm-up would be the first prompt in the pass's namespace: that one would then come from the cache.
        argv += ["--warmup-requests", "0", "--seed", str(SEED), "--disable-tqdm"]
        argv += ["--extra-request-body", json.dumps({"extra_key": f"bench-serving-{secrets.token_hex(8)}"})]
        argv += ["--output-file", str(out), "--output-details"]
        places = [str(options.site)] if options.site else []
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **({"PYTHONPATH": os.pathsep.join(places)} if places else {}),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        # Not in this directory: `-m` would look for sglang here first.
        done = subprocess.run(argv, env=environment, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode or not out.exists():
            raise SystemExit(f"bench_serving ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        told: dict[str, Any] = json.loads(out.read_text())
    errors = [error for error in told["errors"] if error]
    if errors or told["completed"] != load.requests:
        raise SystemExit(f"bench_serving: {told['completed']} of {load.requests} answers; {errors[:1]}")
    figures = {one.name: float(told[one.theirs]) for one in FIGURES}
    return Pass(figures, told["generated_texts"], told["total_output_tokens"])


def dataset(prompts: Sequence[str]) -> str:
    """Its custom data set, ordered so that the shuffle it does by its seed gives the prompts' own order."""
    places = list(range(len(prompts)))
    random.Random(SEED).shuffle(places)
    lines = [""] * len(prompts)
    for place, prompt in zip(places, prompts, strict=True):
        lines[place] = json.dumps({"conversations": [{"content": prompt}, {"content": "-"}]})
    return "\n".join(lines) + "\n"


def compare(url: str, prompts: PromptSet, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both clients in turns under one load, the order changing; what they gave and their ratios."""
    our_pass(url, prompts, load)  # warm-up
    ours, theirs, steady = [], [], []
    for number in range(options.rounds):
        for mine in (True, False) if number % 2 == 0 else (False, True):
            if mine:
                found, repeat = our_pass(url, prompts, load)
                ours.append(found)
                steady.append(repeat.throughput)
            else:
                theirs.append(their_pass(url, prompts, load, options))
    if {one.tokens for one in (*ours, *theirs)} != {load.requests * load.max_tokens}:
        raise SystemExit(f"tokens: {[one.tokens for one in ours]} here, {[one.tokens for one in theirs]} there")
    return {
        "concurrency": load.concurrency,
        "requests": load.requests,
        "max_tokens": load.max_tokens,
        "texts alike": sum(a == b for a, b in zip(ours[0].texts, theirs[0].texts, strict=True)),
        "figures": [compared(one, ours, theirs) for one in FIGURES],
        "steady window, tokens/s": spread(steady),
    }


def compared(figure: Figure, ours: Sequence[Pass], theirs: Sequence[Pass]) -> dict[str, Any]:
    """One figure's spreads, and the spread of the ratio of each round's two passes."""
    mine = [one.figures[figure.name] for one in ours]
    other = [one.figures[figure.name] for one in theirs]
    ratio = spread([a / b for a, b in zip(mine, other, strict=True)])
    bound = BOUND if figure.bounded else None
    kept = None if bound is None else abs(ratio["median"] - 1) <= bound
    return {"name": figure.name, "sweep": spread(mine), "bench_serving": spread(other), "ratio": ratio, "kept": kept}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def report(document: dict[str, Any]) -> str:
    """The text file."""
    lines = [f"$ {document['command']}", "", document["machine"], document["server"], ""]
    for cell in document["cells"]:
        lines.append(
            f"C={cell['concurrency']}, {cell['requests']} requests of {cell['max_tokens']} new tokens, "
            f"{document['rounds']} rounds; texts alike: {cell['texts alike']} of {cell['requests']}"
        )
        lines.append(f"  {'':42}{'sweep':>34}{'bench_serving':>34}{'ratio':>26}")
        for one in cell["figures"]:
            kept = {True: "within 3 %", False: "NOT within 3 %", None: ""}[one["kept"]]
            shown = [_shown(one["sweep"], 2), _shown(one["bench_serving"], 2), _shown(one["ratio"], 3)]
            lines.append(f"  {one['name']:42}{shown[0]:>34}{shown[1]:>34}{shown[2]:>26}  {kept}".rstrip())
        lines += [f"  {'steady window, tokens/s':42}{_shown(cell['steady window, tokens/s'], 2):>34}", ""]
    return "\n".join([*lines, "Median (least to most) of the rounds; the ratio is of the two passes of each round.", ""
                      , DIFFERENCES, ""])  # fmt: skip


def _shown(found: dict[str, float], digits: int) -> str:
    return f"{found['median']:.{digits}f} ({found['least']:.{digits}f} to {found['most']:.{digits}f})"


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The server's URL; where none is given, one that is started here."""
    if options.url:
        yield options.url
    elif options.server == "paced":
        with stub(step_ms=options.step_ms) as url:
            yield url
    else:
        argv = [sys.executable, "-m", "ddtree_ops.engine", "--model-path", str(PAIR / "target"), "--port", "0"]
        argv += ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(PAIR / "draft")]
        argv += ["--speculative-ddtree-budget", "8", "--speculative-ddtree-topk", "4", "--num-threads", "1"]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                ready = next((line for line in process.stderr if "ready on http://" in line), "")
                if not ready:
                    raise SystemExit("the reference engine did not start")
                yield "http://" + ready.partition("http://")[2].split()[0].rstrip("/")
            finally:
                process.kill()


def prompts_of(name: str | None) -> PromptSet:
    """The sweep's coding prompts or a file's, as text: bench_serving's data sets hold nothing else."""
    if name is None:
        return coding()
    texts = tuple(prompt.text for prompt in load_prompts(Path(name)))
    if None in texts or len(set(texts)) != len(texts):
        raise SystemExit(f"{name}: the prompts must be text, each there once")
    return PromptSet(Path(name).stem, tuple(str(text) for text in texts))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = made.add_subparsers(dest="verb", required=True)
    verbs.add_parser("prepare").add_argument("folder", type=Path)
    run = verbs.add_parser("compare")
    run.add_argument("--url", help="a server that runs; else --server is started here")
    run.add_argument("--server", choices=("paced", "reference"), default="paced")
    run.add_argument("--step-ms", type=float, default=20.0, help="of the paced stub, which gives 4 tokens a step")
    run.add_argument("--model", type=Path, default=PAIR / "target", help="directory with the served model's tokenizer")
    run.add_argument("--site", type=Path, help="what prepare made; without it bench-python has SGLang itself")
    run.add_argument("--bench-python", default=sys.executable)
    run.add_argument("-c", "--concurrency", default="1,8")
    run.add_argument("--per-slot", type=int, default=8, help="requests a pass for each in flight, at least 16 in all")
    run.add_argument("--max-tokens", type=int, default=512)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--prompts", help="a file as for ddtree verify-exactness --prompts; default: the coding prompts")
    run.add_argument("--out", type=Path, required=True, help="without its ending")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a bounded figure is out of its bound."""
    options = parser().parse_args(argv)
    if options.verb == "prepare":
        prepare(options.folder)
        return 0
    if options.rounds < 3:
        raise SystemExit("--rounds: at least 3")
    options.site, options.model = options.site and options.site.resolve(), options.model.resolve()
    prompts = prompts_of(options.prompts)
    before, cells = os.getloadavg()[0], []
    with served(options) as url:
        info = arguments(server_info(url, os.environ.get("OPENAI_API_KEY")))
        for concurrency in map(int, options.concurrency.split(",")):
            requests = min(max(16, options.per_slot * concurrency), len(prompts.prompts))
            load = Load(concurrency, prompts.name, options.max_tokens, requests, options.rounds)
            cells.append(compare(url, prompts, load, options))
    where = f"--url {options.url}" if options.url else f"--server {options.server}"
    document = {
        "command": f"python -m benchmarks.bench_serving compare {where} -c {options.concurrency} --per-slot "
        f"{options.per_slot} --max-tokens {options.max_tokens} --rounds {options.rounds}",
        "machine": f"{os.cpu_count()} cores, load average {before:.1f} before and {os.getloadavg()[0]:.1f} after",
        "server": _server(options, info),
        "prompts": prompts.facts(),
        "rounds": options.rounds,
        "cells": cells,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = report(document)
    options.out.with_suffix(".txt").write_text(text)
    print(text)
    return int(any(one["kept"] is False for cell in cells for one in cell["figures"]))


def _server(options: argparse.Namespace, info: dict[str, Any]) -> str:
    if not options.url and options.server == "paced":
        return f"a stub that gives every request 4 tokens each {options.step_ms:g} ms"
    known = ("version", "model_path", "dtype", "attention_backend", "speculative_algorithm",
             "speculative_ddtree_budget", "speculative_ddtree_topk")  # fmt: skip
    told = {key: Path(str(info[key])).name for key in known if info.get(key) is not None}
    return ", ".join(f"{key} {value}" for key, value in told.items())


if __name__ == "__main__":
    raise SystemExit(main())
