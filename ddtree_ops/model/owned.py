"""Which engine arguments the profile owns. An extra argument that names one would win over it, or be lost, silently."""

from __future__ import annotations

import re

# flag -> the key that says it. All names argparse knows an argument by (SGLang 0.5.17 server_args.py; the reference
# engine takes a subset of them).
_OWNED: dict[str, str] = {
    "--model-path": "model",
    "--model": "model",
    "--host": "bind",
    "--port": "the service's port",
    "--dtype": "dtype",
    "--tensor-parallel-size": "tp",
    "--tp-size": "tp",
    "--tp": "tp",
    "--pipeline-parallel-size": "pp",
    "--pp-size": "pp",
    "--pp": "pp",
    "--expert-parallel-size": "ep",
    "--ep-size": "ep",
    "--ep": "ep",
    "--mem-fraction-static": "memory_fraction",
    "--context-length": "context_length",
    "--max-running-requests": "max_running_requests",
    "--attention-backend": "attention_backend",
    "--prefill-attention-backend": "attention_backend",
    "--decode-attention-backend": "attention_backend",
    "--disable-cuda-graph": "cuda_graph",
    "--enable-metrics": "ddtree, always",
    "--speculative-algorithm": "algorithm",
    "--speculative-algo": "algorithm",
    "--speculative-draft-model-path": "drafter",
    "--speculative-draft-model": "drafter",
    "--speculative-num-draft-tokens": "budget",
    "--speculative-num-steps": "block_size",
    "--speculative-eagle-topk": "topk",
    "--speculative-dflash-block-size": "block_size",
    "--speculative-ddtree-budget": "budget",
    "--speculative-ddtree-topk": "topk",
    "--speculative-ddtree-ladder": "ladder",
    "--api-key": "api_key",
    "--api-key-file": "api_key",
    "--admin-api-key": "api_key",
    "--nnodes": "the service's nodes",
    "--node-rank": "the service's nodes",
    "--dist-init-addr": "the service's nodes",
    "--nccl-init-addr": "the service's nodes",
    # A file of further arguments could set every one of the above.
    "--config": "the profile",
}

# No engine has these flags, but whoever writes one means the key.
_KEYS_AS_FLAGS: dict[str, str] = {
    f"--{key.replace('_', '-')}": key
    for key in (
        "budget",
        "topk",
        "ladder",
        "block_size",
        "algorithm",
        "drafter",
        "bind",
        "cuda_graph",
        "memory_fraction",
        "min_accept_length",
        "engine",
        "profile",
    )
}


def owner(argument: str) -> str | None:
    """The profile key that owns the flag in ``argument``, or None for a free flag or a value.

    argparse takes ``--flag=value``, ``--flag value`` and every unambiguous beginning of a flag, so every beginning of
    an owned flag is owned; ``_`` counts as ``-``. A lone ``--`` would turn what follows into positional arguments.
    """
    if not argument.startswith("--"):
        return None
    flag = argument.partition("=")[0].replace("_", "-")
    if flag == "--":
        return "ddtree"
    if flag in _KEYS_AS_FLAGS:
        return _KEYS_AS_FLAGS[flag]
    for known, key in _OWNED.items():
        if flag == known or (known.startswith(flag) and re.fullmatch(r"--[a-z][a-z-]*", flag)):
            return key
    return None
