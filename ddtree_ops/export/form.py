"""What both exports share: a deployment without a host's supervisor, and the files that the jobs read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment, profile_to_json
from ddtree_ops.units import expectations

PROFILE, EXPECT, PROMPTS = "profile.json", "expect.json", "prompts.jsonl"
JOB = ("python3", "-m", "ddtree_ops.export.job")
#: Beside the time that a job's own work may take: the image, the imports.
JOB_SPARE_S = 120


def plain(deployment: Deployment) -> Deployment:
    """The deployment as a plain process: its cache below the root, its API key read from the file that it names.

    Raises UsageError for a service that is not an engine.
    """
    if deployment.profile.router is not None:
        raise UsageError(
            f"{deployment.host.name}/{deployment.service_name} is a router",
            hint="export its backends: what runs them there has a balancer of its own",
        )
    return msgspec.structs.replace(deployment, host=msgspec.structs.replace(deployment.host, supervisor="process"))


def job_files(deployment: Deployment) -> dict[str, str]:
    """The files of the jobs by name: the resolved profile, what the server must show, the profile's own prompts.

    Raises UsageError when the prompts cannot be read.
    """
    profile = deployment.profile
    files = {
        PROFILE: profile_to_json(profile),
        EXPECT: json.dumps(expectations(profile), indent=2, sort_keys=True) + "\n",
    }
    if profile.exactness.prompts is not None:
        path = deployment.workspace_path / profile.exactness.prompts
        try:
            files[PROMPTS] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from error
    return files


def job_argv(deployment: Deployment, what: str, url: str, folder: str, key_file: str | None) -> list[str]:
    """The command of a job, ``exactness`` or ``bench``, whose files lie in ``folder``."""
    profile = deployment.profile
    argv = [*JOB, what, "--url", url, "--files", folder, "--wait-s", str(profile.load_timeout_s)]
    return [*argv, "--api-key-file", key_file] if key_file is not None else argv


def job_limit_s(deployment: Deployment) -> int:
    """How long a job may take: the engine's load, the gate's own limit."""
    profile = deployment.profile
    return profile.load_timeout_s + profile.exactness.time_limit_s + JOB_SPARE_S


def engine_env(env: Mapping[str, str], *, gpus: bool) -> dict[str, str]:
    """The engine's variables, less those that choose GPUs: a scheduler gives GPUs and says which."""
    chosen = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {key: value for key, value in env.items() if not (gpus and key in chosen)}


def label(deployment: Deployment, release_id: str) -> dict[str, Any]:
    """Where an export came from, for a person who finds it running."""
    profile = deployment.profile
    return {"host": deployment.host.name, "profile": profile.name, "base": profile.base or "", "release": release_id}
