"""Which servers an experiment needs, and in which order the experiments are begun (servers are handed out in it)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from . import hostile, scoring, tokens
from .lab import Lab, Spec
from .trees import Trees

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
    )
}
#: selection -> the servers that it asks
NEEDS: dict[str, tuple[str, ...]] = {
    "tokens": tuple(SPECS),
    "logprobs": ("ar-fp32", "dflash-fp32", "dflash-fp32-eager", "ar-bf16", "dflash-bf16"),
    "scoring": (
        *("ar-fp32", "dflash-fp32", "dflash-fp32-sync", "dflash-fp32-chunk", "dflash-fp32-eager"),
        *("dflash-bf16", "dflash-bf16-eager"),
    ),
    "noise": ("ar-bf16", "dflash-bf16", "ar-bf16-eager", "dflash-bf16-eager"),
    "gate": ("ar-fp32", "dflash-fp32", "dflash-fp32-eager", "ar-bf16", "dflash-bf16", "dflash-bf16-stock"),
    "load": ("dflash-fp32", "dflash-fp32-eager", "ar-bf16", "dflash-bf16"),
    "requests": ("ar-fp32", "dflash-fp32", "ar-bf16", "dflash-bf16"),
    "fatal": ("ar-bf16-stock", "dflash-bf16-stock"),
    "deploy": (),
}


def needed(selected: list[str], servers: list[str], trees: Trees | None) -> list[Spec]:
    """The servers to start, fewer where ``servers`` names some; stock ones only where there is a stock tree."""
    unknown = [name for name in selected if name not in NEEDS and name != "all"]
    unknown += [name for name in servers if name not in SPECS]
    if unknown:
        raise SystemExit(f"run: {', '.join(unknown)}; selections: {', '.join(NEEDS)}; servers: {', '.join(SPECS)}")
    wanted = {name for one, names in NEEDS.items() if one in selected or "all" in selected for name in names}
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
    from . import deployed, judged

    held = tokens.held_out(lab.pair, prompts)

    def there(selection: str) -> tuple[str, ...]:
        return tuple(name for name in NEEDS[selection] if name in lab.servers)

    gate: dict[str, tuple[str, ...]] = dict.fromkeys(there("gate"), ("self-score", "replay"))
    gate.pop("ar-fp32", None)
    for name in gate:
        if name.startswith("dflash-fp32"):
            gate[name] = ("self-score", "replay", "golden")
    if "dflash-bf16-stock" in gate:
        gate["dflash-bf16-stock"] = ()
    asked = tuple(name for name in there("scoring") if name != "ar-fp32")
    work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "deploy": lambda: deployed.run_deploy(lab),
        "tokens": lambda: tokens.run_tokens(lab, held, concurrency),
        "logprobs": lambda: scoring.run_logprobs(lab, held, there("logprobs")),
        "scoring": lambda: scoring.run_scoring(lab, held, asked, "ar-fp32"),
        "noise": lambda: tokens.run_noise(lab, held, there("noise"), "ar-bf16", (8, 32)),
        "gate": lambda: judged.run_gate_selection(lab, held, gate, "ar-fp32"),
        "load": lambda: hostile.run_load(lab, held, there("load")),
        "requests": lambda: hostile.run_requests(lab, there("requests")),
        "fatal": lambda: hostile.run_fatal(lab, there("fatal")),
    }
    return {name: begin() for name, begin in work.items() if name in selected or "all" in selected}
