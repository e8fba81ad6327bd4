"""Command line of the engine, with SGLang's names; wrong combinations are refused before torch is imported."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .faults import Fault
from .ladder import parse_ladder


class ArgumentError(ValueError):
    """Arguments that contradict one another, or the model."""


@dataclass(frozen=True)
class Arguments:
    """Arguments as given and checked against one another; None where the model decides."""

    model_path: Path
    tokenizer_path: Path | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "float32"
    context_length: int | None = None
    max_running_requests: int = 16
    max_total_tokens: int | None = None
    page_size: int = 16
    disable_radix_cache: bool = False
    speculative_algorithm: str | None = None
    speculative_draft_model_path: Path | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_ddtree_budget: int | None = None
    speculative_ddtree_topk: int | None = None
    speculative_ddtree_ladder: str | None = None
    speculative_sampling: str | None = None
    skip_tokenizer_init: bool = False
    fault: Fault | None = None
    num_threads: int | None = None
    log_level: str = "info"
    api_key_file: Path | None = None
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    tp_size: int = 1


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT, the host a name or an IPv4 address. Raises ValueError that says what is wrong."""
    host, _, port = text.rpartition(":")
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?", host) is None:
        raise ValueError("must be HOST:PORT, HOST a name or an IPv4 address")
    if re.fullmatch("[0-9]{1,5}", port) is None or not 1 <= int(port) <= 65535:
        raise ValueError("the port must be within 1..65535")
    return host, int(port)


def check_arguments(a: Arguments) -> None:
    """Raises ArgumentError with one line that names the arguments at odds."""
    given = {
        "--speculative-draft-model-path": a.speculative_draft_model_path,
        "--speculative-num-draft-tokens": a.speculative_num_draft_tokens,
        "--speculative-ddtree-budget": a.speculative_ddtree_budget,
        "--speculative-ddtree-topk": a.speculative_ddtree_topk,
        "--speculative-ddtree-ladder": a.speculative_ddtree_ladder,
        "--speculative-sampling": a.speculative_sampling,
    }
    present = [name for name, value in given.items() if value is not None]
    if a.speculative_algorithm is None:
        if present:
            raise ArgumentError(f"{present[0]} needs --speculative-algorithm DFLASH or DDTREE")
    elif a.speculative_draft_model_path is None:
        raise ArgumentError(f"--speculative-algorithm {a.speculative_algorithm} needs --speculative-draft-model-path")
    tree = [name for name in present if "ddtree" in name]
    if a.speculative_algorithm == "DFLASH" and tree:
        raise ArgumentError(f"{tree[0]} needs --speculative-algorithm DDTREE, not DFLASH")
    if a.speculative_algorithm == "DDTREE":
        budget = a.speculative_ddtree_budget
        if budget is None or a.speculative_ddtree_topk is None:
            raise ArgumentError(
                "--speculative-algorithm DDTREE needs --speculative-ddtree-budget and --speculative-ddtree-topk"
            )
        if a.speculative_num_draft_tokens not in (None, budget + 1):
            raise ArgumentError(
                f"--speculative-num-draft-tokens {a.speculative_num_draft_tokens} must be budget + 1 = {budget + 1}"
            )
        try:
            parse_ladder(a.speculative_ddtree_ladder, budget)
        except ValueError as error:
            raise ArgumentError(f"--speculative-ddtree-ladder {a.speculative_ddtree_ladder}: {error}") from None
    if a.fault is not None and a.speculative_algorithm is None:
        raise ArgumentError(f"--fault {a.fault} needs --speculative-algorithm DFLASH or DDTREE")
    if a.skip_tokenizer_init and a.tokenizer_path is not None:
        raise ArgumentError("--tokenizer-path contradicts --skip-tokenizer-init")
    _check_ranks(a)


def _check_ranks(a: Arguments) -> None:
    if a.tp_size != a.nnodes:
        raise ArgumentError(f"--tp-size {a.tp_size} must be --nnodes {a.nnodes}: there is one process a node")
    if a.node_rank >= a.nnodes:
        raise ArgumentError(f"--node-rank {a.node_rank} must be within 0..{a.nnodes - 1}, below --nnodes")
    if a.nnodes == 1:
        if a.dist_init_addr is not None:
            raise ArgumentError(f"--dist-init-addr {a.dist_init_addr} needs --nnodes above 1")
        return
    if a.dist_init_addr is None:
        raise ArgumentError(f"--nnodes {a.nnodes} needs --dist-init-addr HOST:PORT")
    try:
        parse_address(a.dist_init_addr)
    except ValueError as error:
        raise ArgumentError(f"--dist-init-addr {a.dist_init_addr}: {error}") from None
    if a.fault is not None:
        raise ArgumentError(f"--fault {a.fault} contradicts --nnodes {a.nnodes}: faults are planted in one process")


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Arguments from a command line. Exits with status 2 and one clear line when they are wrong."""
    p = argparse.ArgumentParser(
        prog="python -m ddtree_ops.engine",
        usage="%(prog)s --model-path DIR [options]; --help lists them",
        description="The reference engine: AR, chain and DDTree decoding behind SGLang's HTTP shapes.",
        allow_abbrev=False,
    )
    p.add_argument("--model-path", type=Path, required=True, help="directory of the target (config.json, safetensors)")
    p.add_argument("--tokenizer-path", type=Path, help="directory or tokenizer.json; default: the target's directory")
    p.add_argument("--served-model-name")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=_bounded(0, 65535), default=30000, help="0: any free port, named in the log")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--context-length", type=_bounded(2), help="default: the model's max_position_embeddings")
    p.add_argument("--max-running-requests", type=_bounded(1, 1024), default=16, help="more requests queue")
    p.add_argument(
        "--max-total-tokens", type=_bounded(1), help="KV slots; default: enough for all running requests, within 2 GiB"
    )
    p.add_argument("--page-size", type=_bounded(1, 1 << 16), default=16, help="tokens a page of the prefix cache")
    p.add_argument("--disable-radix-cache", action="store_true", help="keep no KV of requests that have ended")
    p.add_argument("--speculative-algorithm", choices=("NONE", "DFLASH", "DDTREE"), default="NONE")
    p.add_argument("--speculative-draft-model-path", type=Path)
    p.add_argument("--speculative-num-draft-tokens", type=_bounded(1), help="must agree with budget + 1 or block_size")
    p.add_argument(
        "--speculative-ddtree-budget", type=_bounded(1, 1024), help="tree nodes verified a step, root excluded"
    )
    p.add_argument("--speculative-ddtree-topk", type=_bounded(1), help="candidates kept a draft position")
    p.add_argument(
        "--speculative-ddtree-ladder",
        help="smaller budgets for larger batches: 8:8,32:0 has 8 nodes from 8 running requests on, none from 32 on",
    )
    p.add_argument(
        "--speculative-sampling",
        choices=("per-node", "rejection"),
        help="how drafts are verified above temperature 0; per-node (default) draws AR's very tokens from a seed",
    )
    p.add_argument("--skip-tokenizer-init", action="store_true", help="serve token ids only")
    p.add_argument(
        "--fault",
        type=Fault,
        choices=list(Fault),
        metavar="NAME",
        help="be wrong on purpose; python -m ddtree_ops.engine.faults lists",
    )
    p.add_argument("--num-threads", type=_bounded(1, 1024), help="threads of one matrix product")
    p.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    p.add_argument("--api-key-file", type=Path, help="file with a key that every route but /health then asks for")
    p.add_argument(
        "--nnodes",
        type=_bounded(1, 64),
        default=1,
        help="processes, on as many hosts, that are one service: the same command line for each but for --node-rank",
    )
    p.add_argument("--node-rank", type=_bounded(0, 63), default=0, help="which of them this is; 0 leads and serves")
    p.add_argument("--dist-init-addr", metavar="HOST:PORT", help="where rank 0 waits for the others (gloo, in clear)")
    p.add_argument("--tp-size", type=_bounded(1, 64), default=1, help="parts the target's layers are in: --nnodes")
    values = vars(p.parse_args(argv))
    if values["speculative_algorithm"] == "NONE":
        values["speculative_algorithm"] = None
    arguments = Arguments(**values)
    try:
        check_arguments(arguments)
    except ArgumentError as error:
        p.error(str(error))
    return arguments


def _bounded(low: int, high: int = 1 << 31) -> _Bounded:
    return _Bounded(low, high)


@dataclass(frozen=True)
class _Bounded:
    """An argparse type: an integer within bounds, both included."""

    low: int
    high: int

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if not self.low <= value <= self.high:
            raise argparse.ArgumentTypeError(f"{value} is not within {self.low}..{self.high}")
        return value
