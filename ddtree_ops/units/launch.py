"""How a profile starts its engine: argv and environment, the same for both supervisors; and what it must then show."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from ddtree_ops.errors import UsageError
from ddtree_ops.model.types import Deployment, Group, Profile, Routing

_RELEASE_ID = re.compile(r"[0-9a-z][0-9a-z.-]{0,63}")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
API_KEY = "api-key"
#: Health checks in a row that a router's backend fails before it gets no more requests.
HEALTH_FAILURES = 2


class Launch(NamedTuple):
    """A process: ``argv[0]`` is an absolute path, ``env`` is all that is set for it, ``cwd`` is where it starts."""

    argv: list[str]
    env: dict[str, str]
    cwd: str = "/"


def launch(deployment: Deployment, release_id: str) -> Launch:
    """The process of a deployment out of an installed release. Raises UsageError for a malformed release id."""
    release = release_path(deployment, release_id)
    python = f"{release}/venv/bin/python"
    engine = {"sglang": _sglang, "reference": _reference, "router": _router}[deployment.profile.engine]
    argv = [python, "-m", *engine(deployment, f"{release}/share"), *deployment.profile.extra_args]
    return Launch(argv=argv, env=_environment(deployment, f"{release}/venv/bin"))


def release_path(deployment: Deployment, release_id: str) -> str:
    """Where a release is installed on the deployment's host."""
    if not _RELEASE_ID.fullmatch(release_id):
        raise UsageError(f"{release_id!r} is not a release id")
    return f"{deployment.host.root}/releases/{release_id}"


def model_path(model: str, share: str) -> str:
    """A profile's ``model`` or ``drafter`` as a path on the host; ``share`` is the release's share/ directory."""
    inside = model.removeprefix("release:")
    return model if inside == model else f"{share}/{inside}"


def cache_directory(deployment: Deployment) -> str:
    """Where the service may write. It outlives releases: compiled kernels are kept over an upgrade."""
    if deployment.host.supervisor == "systemd":
        return f"/var/cache/ddtree/{deployment.service_name}"
    return f"{deployment.host.root}/cache/{deployment.service_name}"


def credential_file(deployment: Deployment) -> str | None:
    """The file the service reads its API key from: systemd's copy for this unit alone, or the file itself."""
    key = deployment.profile.api_key
    if key is None or key.file is None:
        return None
    if deployment.host.supervisor == "systemd":
        return f"/run/credentials/{deployment.service_name}.service/{API_KEY}"
    return key.file


def uses_gpus(deployment: Deployment) -> bool:
    """True when the engine opens GPU devices; the reference engine runs on the CPU wherever it is."""
    return deployment.profile.engine == "sglang"


def expectations(profile: Profile) -> dict[str, Any]:
    """What ``/server_info`` must show under SGLang's names when what runs is what was asked.

    Stock SGLang turns some arguments back with a warning only (facts: DFLASH forces topk 1), so each that shapes the
    tree is compared. Values that the engine chooses by itself are left out. A router tells that it is one, and a
    further rank of a service over several hosts tells nothing.
    """
    if profile.nodes is not None and profile.nodes.rank:
        return {}
    if profile.router is not None:
        return {"router_manager": True}
    wanted: dict[str, Any] = {
        "dtype": profile.dtype,
        "speculative_algorithm": None if profile.algorithm == "none" else profile.algorithm.upper(),
    }
    if profile.algorithm == "dflash":
        wanted["speculative_num_draft_tokens"] = profile.block_size
    if profile.algorithm == "ddtree" and profile.budget is not None:
        wanted["speculative_num_draft_tokens"] = profile.budget + 1
        wanted["speculative_ddtree_budget"] = profile.budget
        wanted["speculative_ddtree_topk"] = profile.topk
        if profile.ladder is not None:
            wanted["speculative_ddtree_ladder"] = profile.ladder
    for key in ("context_length", "max_running_requests"):
        if getattr(profile, key) is not None:
            wanted[key] = getattr(profile, key)
    if profile.nodes is not None:
        wanted |= {
            "nnodes": len(profile.nodes.addresses),
            "tp_size": profile.tp,
            "dist_init_addr": meeting(profile.nodes),
        }
    if profile.engine == "sglang":
        wanted |= {
            "tp_size": profile.tp,
            "pp_size": profile.pp,
            "ep_size": profile.ep,
            "attention_backend": profile.attention_backend,
            "disable_cuda_graph": not profile.cuda_graph,
        }
    return wanted


def _sglang(deployment: Deployment, share: str) -> list[str]:
    profile = deployment.profile
    argv = [
        "sglang.launch_server",
        *_common(deployment, share),
        *("--tp-size", str(profile.tp)),
        *("--pp-size", str(profile.pp)),
        *("--ep-size", str(profile.ep)),
        "--enable-metrics",
    ]
    if profile.attention_backend is not None:
        argv += ["--attention-backend", profile.attention_backend]
    if profile.memory_fraction is not None:
        argv += ["--mem-fraction-static", f"{profile.memory_fraction:g}"]
    if not profile.cuda_graph:
        argv.append("--disable-cuda-graph")
    return argv


def _reference(deployment: Deployment, share: str) -> list[str]:
    argv = ["ddtree_ops.engine", *_common(deployment, share)]
    if deployment.profile.nodes is not None:
        argv += ["--tp-size", str(deployment.profile.tp)]
    key = credential_file(deployment)
    if key is not None:
        argv += ["--api-key-file", key]
    return argv


def _router(deployment: Deployment, share: str) -> list[str]:
    """sglang-router's own words (0.3.2), whose control plane is on the port that it serves on."""
    routing = deployment.profile.router
    assert routing is not None
    return [
        "sglang_router.launch_router",
        *("--host", deployment.profile.bind),
        *("--port", str(deployment.service.port)),
        *("--worker-urls", *routing.workers),
        *("--policy", routing.policy),
        *("--prometheus-host", "127.0.0.1"),
        *("--prometheus-port", str(routing.metrics_port)),
        *("--worker-startup-check-interval", "1"),
        *("--health-check-interval-secs", str(routing.health_interval_s)),
        *("--health-check-timeout-secs", str(routing.health_timeout_s)),
        *("--health-failure-threshold", str(HEALTH_FAILURES)),
        *("--health-success-threshold", "1"),
        *("--retry-max-retries", str(retries(routing))),
        # what is running when it is told to stop may finish
        *("--shutdown-grace-period-secs", str(routing.drain_timeout_s)),
        # it counts a client's bad requests (400) as its worker's failures: ten of them would take a sound one away
        "--disable-circuit-breaker",
    ]


def retries(routing: Routing) -> int:
    """How often a request is tried before its client hears of it: until a dead backend is certainly found out.

    A retry meets the dead one again as the policy has it, so that 5 of them (the default) are not enough: they are
    over in a second. Waits grow by half from 50 ms on, less a fifth at most: n of them take 80 ms x (1.5^n - 1).
    """
    found_out_s = HEALTH_FAILURES * (routing.health_interval_s + routing.health_timeout_s)
    return math.ceil(math.log(1 + found_out_s / 0.08, 1.5)) + 1


def _common(deployment: Deployment, share: str) -> list[str]:
    """What both engines call by the same name."""
    profile = deployment.profile
    argv = [
        *("--model-path", model_path(profile.model, share)),
        *("--host", profile.bind),
        *("--port", str(deployment.service.port)),
        *("--dtype", profile.dtype),
    ]
    if profile.algorithm != "none" and profile.drafter is not None:
        argv += ["--speculative-algorithm", profile.algorithm.upper()]
        argv += ["--speculative-draft-model-path", model_path(profile.drafter, share)]
    if profile.algorithm == "ddtree":
        argv += ["--speculative-ddtree-budget", str(profile.budget)]
        argv += ["--speculative-ddtree-topk", str(profile.topk)]
        if profile.ladder is not None:
            argv += ["--speculative-ddtree-ladder", profile.ladder]
    if profile.context_length is not None:
        argv += ["--context-length", str(profile.context_length)]
    if profile.max_running_requests is not None:
        argv += ["--max-running-requests", str(profile.max_running_requests)]
    if profile.nodes is not None:
        argv += ["--nnodes", str(len(profile.nodes.addresses)), "--node-rank", str(profile.nodes.rank)]
        argv += ["--dist-init-addr", meeting(profile.nodes)]
    return argv


def meeting(group: Group) -> str:
    """Where the ranks of a service meet, as both engines take it."""
    address = group.addresses[0]
    return f"[{address}]:{group.port}" if ":" in address else f"{address}:{group.port}"


def _environment(deployment: Deployment, bin_directory: str) -> dict[str, str]:
    profile, cache = deployment.profile, cache_directory(deployment)
    path = [bin_directory, _SYSTEM_PATH]
    if "CUDA_HOME" in profile.env:
        path.insert(1, f"{profile.env['CUDA_HOME']}/bin")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "LANG": "C.UTF-8"}
    owned = {
        "PATH": ":".join(path),
        "HOME": cache,
        "XDG_CACHE_HOME": cache,
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        # A release is read-only and compiled at install.
        "PYTHONDONTWRITEBYTECODE": "1",
        # Indices as nvidia-smi counts them; empty hides every GPU.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, deployment.service.gpus)) if uses_gpus(deployment) else "",
    }
    if profile.router is not None:
        # It looks for its workers' tokenizers: where a path is not on its own host, at this address and nowhere else.
        # Its title would go over its environment, by which a supervisor without systemd knows its processes.
        owned |= {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_COLOR": "1", "SPT_NOENV": "1"}
    if uses_gpus(deployment):
        owned |= {
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "FLASHINFER_WORKSPACE_BASE": f"{cache}/flashinfer",
        }
    return dict(sorted({**offline, **profile.env, **owned}.items()))
