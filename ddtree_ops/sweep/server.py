"""What the server and its host tell of themselves around a cell: resolved arguments, room, GPUs, EOS, log."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import httpx

from ddtree_ops import httpclients
from ddtree_ops.errors import DdtreeError, Failed
from ddtree_ops.model import Deployment
from ddtree_ops.remote.transport import Transport
from ddtree_ops.snapshot import redact
from ddtree_ops.sweep.records import Gpu
from ddtree_ops.sweep.workload import PromptSet, eos_ids
from ddtree_ops.units.launch import model_path, release_path

_QUERY = "index,name,clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used"
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Not enough memory", re.IGNORECASE)
#: Not arguments: what differs between two looks, or is large and said elsewhere.
_LEFT_OUT = re.compile(r"internal_states|.*_time|.*timestamp.*|uptime|random_seed|nccl_port|.*_pid")


def server_info(url: str, api_key: str | None) -> dict[str, Any]:
    """``/server_info`` as it is. Raises Failed."""
    try:
        with httpclients.blocking(url, api_key, timeout_s=60) as client:
            reply = client.get("/server_info")
            if reply.status_code == 404:
                reply = client.get("/get_server_info")
            reply.raise_for_status()
            told = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Failed(f"/server_info: {error}") from error
    if not isinstance(told, dict):
        raise Failed("/server_info is no JSON object")
    return told


def arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved arguments that are plain values, and the sizes of CUDA graphs; secrets out."""
    plain = {
        key: value
        for key, value in info.items()
        if key == "cuda_graph_config"
        or (not _LEFT_OUT.fullmatch(key) and (value is None or isinstance(value, str | int | float | bool)))
    }
    kept: dict[str, Any] = redact.document(plain, redact.found_secrets([], [plain]))
    return dict(sorted(kept.items()))


def too_small(info: Mapping[str, Any], concurrency: int) -> str | None:
    """Why the server would queue some of C requests in silence, or leave its graphs; None when it covers C."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    for place, key in (
        (info, "max_running_requests"),
        (state, "effective_max_running_requests_per_dp"),
        (state, "max_running_requests"),
    ):
        value = place.get(key)
        if isinstance(value, int) and value < concurrency:
            return f"the server runs {value} requests at once ({key}), so C={concurrency} would queue"
    return _beyond_graphs(info, concurrency)


def _beyond_graphs(info: Mapping[str, Any], concurrency: int) -> str | None:
    """Why a batch of C would run without a CUDA graph where smaller ones do not. Keys: SGLang's server_args.py."""
    config = info.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, Mapping) else None
    if isinstance(decode, Mapping):
        sizes, key = decode.get("bs"), "cuda_graph_config.decode"
        largest = max(sizes) if isinstance(sizes, list) and sizes else decode.get("max_bs")
        graphs = decode.get("backend") != "disabled"
    else:
        largest, key = info.get("cuda_graph_max_bs"), "cuda_graph_max_bs"
        graphs = not info.get("disable_cuda_graph", True)
    if not graphs:
        return None
    if not isinstance(largest, int):
        return f"the server does not tell up to which batch it has CUDA graphs ({key})"
    if largest < concurrency:
        return f"CUDA graphs go up to a batch of {largest} ({key}), so C={concurrency} would run eagerly"
    return None


def too_long(info: Mapping[str, Any], prompts: PromptSet, max_tokens: int) -> str | None:
    """Why a prompt and its answer would not fit into the server's context; None where they do or nobody knows."""
    context = info.get("context_length")
    longest = max((len(prompt) for prompt in prompts.prompts if not isinstance(prompt, str)), default=0)
    if isinstance(context, int) and longest + max_tokens > context:
        return f"a prompt of {longest} tokens and {max_tokens} new ones exceed the server's context of {context}"
    return None


def gpus(transport: Transport, deployment: Deployment) -> list[Gpu] | None:
    """The service's GPUs now; None where it uses none or nvidia-smi does not say."""
    if deployment.profile.engine != "sglang" or not deployment.host.gpus.count:
        return None
    try:
        done = transport.run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], timeout=30)
    except Failed:
        return None
    return parse_gpus(done.stdout.decode(errors="replace"), deployment.service.gpus) if done.code == 0 else None


def parse_gpus(text: str, wanted: list[int]) -> list[Gpu]:
    """nvidia-smi's CSV lines of the GPUs wanted (all where none is named); a field that is no number is None."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 7 or not fields[0].isdigit() or (wanted and int(fields[0]) not in wanted):
            continue
        numbers: list[float | None] = []
        for field in fields[2:]:
            try:
                numbers.append(float(field))
            except ValueError:
                numbers.append(None)
        found.append(Gpu(int(fields[0]), fields[1][:80], *numbers))
    return found


def model_eos(transport: Transport, deployment: Deployment, release: str | None) -> list[int] | None:
    """EOS ids out of the model's own files on the host; None where they cannot be read."""
    share = f"{release_path(deployment, release)}/share" if release else ""
    folder = model_path(deployment.profile.model, share)
    configs = []
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(Failed):
            done = transport.run(["cat", "--", f"{folder}/{name}"], root=transport.may_root, limit=1 << 20)
            configs.append(done.stdout if done.code == 0 else b"")
    return eos_ids(*configs)


def log_tail(agent_call: Any) -> list[str]:
    """The last lines of the service's log; [] where they cannot be had."""
    try:
        return [str(line) for line in agent_call("logs", lines=200)["lines"]]
    except DdtreeError:
        return []


def says_out_of_memory(lines: list[str]) -> bool:
    """Whether a log says that memory ran out."""
    return any(_OUT_OF_MEMORY.search(line) for line in lines)
