"""Which servers an experiment needs, and in which order the experiments are begun (servers are handed out in it)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from . import branching, churn, drawn, faulty, hostile, models, ranks, scoring, speed, tokens
from .lab import Lab, Spec
from .trees import FAULTS, Trees

PAIRS = ((7, 1), (8, 4), (16, 4), (16, 8), (24, 6), (32, 8), (48, 8), (63, 8), (64, 8), (65, 8))
"""(budget, topk): a chain as a tree, the six of the sweep, and around a tile of 64 rows."""
STOPPED = ("mask-rows-by-block-size", "mask-offset-of-second-request", "mask-all-blocked", "rope-by-index")
"""Faults that the start-up canary must stop; the gate judges them where it is left out."""
_FAULTS = sorted(path.stem for path in FAULTS.glob("*.patch") if path.stem != "no-canary")
PLANTED = tuple(name for name in _FAULTS if not name.startswith("sampled-"))
SAMPLED = tuple(name for name in _FAULTS if name.startswith("sampled-"))
"""Faults above temperature 0."""


def _tree(name: str, budget: int, topk: int, dtype: str = "float32", **more: Any) -> Spec:
    return Spec(name, "ddtree", dtype, budget=budget, topk=topk, **{"more": ("--enable-metrics",), **more})


TREES = (
    *(_tree(f"tree-{budget}-{topk}", budget, topk) for budget, topk in PAIRS),
    # by the chain's own attention kernel, which rounds as the chain does
    _tree("tree-7-1-bf16", 7, 1, "bfloat16", split=False),
    _tree("tree-8-4-eager", 8, 4, graphs=False),
    _tree("tree-64-8-eager", 64, 8, graphs=False),
    # narrower than the drafter's block
    _tree("tree-4-2", 4, 2),
    _tree("tree-16-4-sync", 16, 4, overlap=False, chunk=64),
    _tree("tree-16-4-chunk", 16, 4, chunk=64),
    _tree("tree-16-4-small", 16, 4, slots=3000),
    _tree("tree-32-8-debug", 32, 8, debug=True),
    # SGLang's own watch over KV slots, which follows chains
    _tree("tree-7-1-kv-canary", 7, 1, more=("--enable-metrics", "--kv-canary", "raise")),
    _tree("tree-16-4-bf16", 16, 4, "bfloat16"),
    # a round of 32 that ends goes through all three
    _tree("tree-16-4-ladder", 16, 4, ladder="4:8,16:0"),
)
FAULTY = (
    *(_tree(f"fault-{name}", 16, 4, faults=(name, "no-canary")) for name in PLANTED),
    *(_tree(f"fault-{name}", 16, 4, faults=(name,)) for name in SAMPLED),
    *(_tree(f"fault-{name}-bf16", 16, 4, "bfloat16", faults=(name,)) for name in SAMPLED),
    *(_tree(f"stopped-{name}", 16, 4, faults=(name,), starts=False) for name in STOPPED),
)

_LARGE = (
    *("--mem-fraction-static", "0.8", "--max-running-requests", "64"),
    *("--cuda-graph-bs-decode", "1", "2", "4", "8", "16", "32", "64"),
)
FAST = (
    Spec("fast-ar", dtype="bfloat16", slots=40000, more=_LARGE),
    Spec("fast-chain", "dflash", "bfloat16", slots=40000, more=_LARGE),
    _tree("fast-tree-8-4", 8, 4, "bfloat16", slots=40000, more=_LARGE),
    _tree("fast-ladder", 16, 4, "bfloat16", slots=40000, more=_LARGE, ladder="8:8"),
)
"""For the padded pair (benchmarks/gpu/pad)."""

SPECS = {
    spec.name: spec
    for spec in (
        Spec("ar-fp32"),
        Spec("dflash-fp32", "dflash"),
        Spec("dflash-fp32-sync", "dflash", overlap=False, chunk=64),
        Spec("dflash-fp32-chunk", "dflash", chunk=64),
        Spec("ar-fp32-eager", graphs=False),
        Spec("dflash-fp32-eager", "dflash", graphs=False),
        Spec("ar-bf16", dtype="bfloat16"),
        Spec("dflash-bf16", "dflash", "bfloat16"),
        Spec("ar-bf16-eager", dtype="bfloat16", graphs=False),
        Spec("dflash-bf16-eager", "dflash", "bfloat16", graphs=False),
        Spec("ar-bf16-stock", dtype="bfloat16", stock=True, tokenizer=False),
        Spec("dflash-bf16-stock", "dflash", "bfloat16", stock=True, tokenizer=False),
        *TREES,
        *FAULTY,
        *FAST,
        *ranks.RANKED,
        *models.SPECS,
    )
}
_OTHER = {spec.name for spec in (*FAST, *ranks.RANKED, *models.SPECS)}
CHAINS = tuple(n for n, spec in SPECS.items() if spec.algorithm != "ddtree" and n not in _OTHER)
CHURNED = ("tree-16-4-sync", "tree-16-4-chunk", "tree-16-4-small", "tree-32-8-debug", "tree-7-1-kv-canary", "tree-4-2")
#: selection -> the servers that it asks
NEEDS: dict[str, tuple[str, ...]] = {
    "tokens": CHAINS,
    "tree": (
        *("ar-fp32", "dflash-fp32", "dflash-bf16-stock", "tree-7-1-bf16", "tree-8-4-eager", "tree-64-8-eager"),
        "tree-16-4-ladder",
        *(f"tree-{budget}-{topk}" for budget, topk in PAIRS),
    ),
    "churn": ("ar-fp32", *CHURNED),
    "refusals": ("tree-16-4",),
    "faults": ("ar-fp32", "tree-16-4", *(spec.name for spec in FAULTY if not spec.name.startswith("fault-sampled-"))),
    "sampled": (
        *("ar-fp32", "dflash-fp32", "tree-7-1", "tree-16-4", "tree-64-8", "ar-bf16", "dflash-bf16", "tree-16-4-bf16"),
        "tree-16-4-ladder",
        *(spec.name for spec in FAULTY if spec.name.startswith("fault-sampled-")),
    ),
    "logprobs": (
        "ar-fp32",
        "dflash-fp32",
        "dflash-fp32-eager",
        "ar-bf16",
        "dflash-bf16",
        "tree-16-4",
        "tree-16-4-bf16",
    ),
    "scoring": (
        *("ar-fp32", "dflash-fp32", "dflash-fp32-sync", "dflash-fp32-chunk", "dflash-fp32-eager"),
        *("dflash-bf16", "dflash-bf16-eager", "tree-16-4"),
    ),
    "noise": ("ar-bf16", "dflash-bf16", "ar-bf16-eager", "dflash-bf16-eager"),
    "gate": (
        "ar-fp32",
        "dflash-fp32",
        "dflash-fp32-eager",
        "ar-bf16",
        "dflash-bf16",
        "dflash-bf16-stock",
        "tree-16-4",
        "tree-16-4-bf16",
    ),
    "load": ("dflash-fp32", "dflash-fp32-eager", "ar-bf16", "dflash-bf16", "tree-16-4"),
    "requests": ("ar-fp32", "dflash-fp32", "ar-bf16", "dflash-bf16", "tree-16-4"),
    "fatal": ("ar-bf16-stock", "dflash-bf16-stock"),
    "speed": tuple(spec.name for spec in FAST),
    "traces": tuple(spec.name for spec in FAST),
    "ranks": ("ar-fp32", "tree-8-4", "tree-16-4", *(spec.name for spec in ranks.RANKED)),
    "deploy": (),
    "sweep": (),
    "bench": (),
    **models.NEEDS,
}


def needed(selected: list[str], servers: list[str], trees: Trees | None) -> list[Spec]:
    """The servers to start, fewer where ``servers`` names some; stock ones only where there is a stock tree."""
    unknown = [name for name in selected if name not in NEEDS]
    unknown += [name for name in servers if name not in SPECS]
    if unknown:
        raise SystemExit(f"run: {', '.join(unknown)}; selections: {', '.join(NEEDS)}; servers: {', '.join(SPECS)}")
    wanted = {name for one, names in NEEDS.items() if one in selected for name in names}
    stock = trees is not None and trees.stock is not None
    return [
        spec
        for spec in SPECS.values()
        if spec.name in wanted and (not servers or spec.name in servers) and (stock or not spec.stock)
    ]


def plan(
    lab: Lab, selected: list[str], prompts: int, concurrency: tuple[int, ...]
) -> dict[str, Coroutine[Any, Any, None]]:
    """Selection -> its work, in the order in which they queue for servers."""
    from . import deployed, judged, swept

    held = tokens.held_out(lab.pair, prompts)

    def there(selection: str) -> tuple[str, ...]:
        return tuple(name for name in NEEDS[selection] if name in lab.servers)

    gate: dict[str, tuple[str, ...]] = dict.fromkeys(there("gate"), ("self-score", "replay"))
    gate.pop("ar-fp32", None)
    for name in gate:
        if name.startswith(("dflash-fp32", "tree-16-4")) and SPECS[name].dtype == "float32":
            gate[name] = ("self-score", "replay", "golden")
    if "dflash-bf16-stock" in gate:
        gate["dflash-bf16-stock"] = ()
    asked = tuple(name for name in there("scoring") if name != "ar-fp32")
    work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "deploy": lambda: deployed.run_deploy(lab),
        "sweep": lambda: swept.run_sweep(lab),
        "bench": lambda: swept.run_bench(lab),
        "tokens": lambda: tokens.run_tokens(lab, held, concurrency, there("tokens")),
        "tree": lambda: branching.run_tree(lab, held, there("tree"), concurrency),
        "churn": lambda: churn.run_churn(lab, held, tuple(n for n in there("churn") if n != "ar-fp32"), "ar-fp32"),
        "refusals": lambda: churn.run_refusals(lab, there("refusals")),
        "faults": lambda: faulty.run_faults(
            lab, held, tuple(name for name in there("faults") if SPECS[name].faults), "ar-fp32", "tree-16-4"
        ),
        "sampled": lambda: drawn.run_sampled(lab, held, there("sampled"), concurrency),
        "ranks": lambda: ranks.run_ranks(lab, held, there("ranks"), concurrency),
        "logprobs": lambda: scoring.run_logprobs(lab, held, there("logprobs")),
        "scoring": lambda: scoring.run_scoring(lab, held, asked, "ar-fp32"),
        "traces": lambda: speed.run_traces(lab, held, there("traces")),
        "speed": lambda: speed.run_speed(lab, held, there("speed")),
        "models": lambda: models.run_models(lab),
        "pages": lambda: models.run_pages(lab, held, there("pages")),
        "noise": lambda: tokens.run_noise(lab, held, there("noise"), "ar-bf16", (8, 32)),
        "gate": lambda: judged.run_gate_selection(lab, held, gate, "ar-fp32"),
        "load": lambda: hostile.run_load(lab, held, there("load")),
        "requests": lambda: hostile.run_requests(lab, there("requests")),
        "fatal": lambda: hostile.run_fatal(lab, there("fatal")),
    }
    return {name: begin() for name, begin in work.items() if name in selected}
