"""A service as a Slurm batch script: its engine on one node, proven, measured, served until the time is over. Pure."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from ddtree_ops.errors import UsageError
from ddtree_ops.export.form import engine_env, job_argv, job_files, label, plain
from ddtree_ops.model import Deployment
from ddtree_ops.units import cache_directory, launch, uses_gpus

_WORD = re.compile(r"[A-Za-z0-9._,:@+-]+")
_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")


@dataclass(frozen=True)
class Allocation:
    """What is asked of Slurm. ``time`` is its own notation; None leaves a choice to the cluster."""

    time: str | None = None
    partition: str | None = None
    account: str | None = None

    def directives(self) -> list[str]:
        """``#SBATCH`` lines. Raises UsageError for what is no word there."""
        found = []
        for option, value, form in (
            ("time", self.time, _TIME),
            ("partition", self.partition, _WORD),
            ("account", self.account, _WORD),
        ):
            if value is not None:
                if not form.fullmatch(value):
                    raise UsageError(f"--{option} {value!r}: not what Slurm takes there")
                found.append(f"#SBATCH --{option}={value}")
        return found


def slurm(deployment: Deployment, release_id: str, allocation: Allocation | None = None) -> str:
    """The batch script. It exits with the gate's code where that is no pass, and with the engine's where it ends.

    The node has the installed release at the host's root, and ``python3`` with ddtree-ops for the jobs
    (``DDTREE_PYTHON`` names another). Raises UsageError for what cannot be written so that it arrives unchanged.
    """
    deployment = plain(deployment)
    started, profile, name = launch(deployment, release_id), deployment.profile, deployment.service_name
    gpus = uses_gpus(deployment)
    count = len(deployment.service.gpus)
    env = engine_env(started.env, gpus=gpus)
    url = f"http://127.0.0.1:{deployment.service.port}"
    key = profile.api_key.file if profile.api_key is not None else None
    files = job_files(deployment)
    for value in (*started.argv, *env.values()):
        if "\0" in value or "\n" in value:
            raise UsageError(f"{name}: {value[:60]!r} has a newline or NUL")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        *([f"#SBATCH --gpus-per-node={count}"] if gpus and count else []),
        f"#SBATCH --output={name}-%j.log",
        # the script is told before the time is over, so that the engine can end as it should
        f"#SBATCH --signal=B:TERM@{profile.stop_timeout_s + 30}",
        *(allocation or Allocation()).directives(),
        f"# Written by ddtree export slurm: {json.dumps(label(deployment, release_id))}",
        "set -euo pipefail",
        "",
        'files=$(mktemp -d "${TMPDIR:-/tmp}/ddtree.XXXXXX")',
        "engine=",
        "stop() {",
        '    if [ -n "$engine" ]; then kill -TERM "$engine" 2>/dev/null || true; wait "$engine" || true; fi',
        '    rm -rf "$files"',
        "}",
        "trap stop EXIT",
        "trap 'exit 143' TERM INT",
        "",
    ]
    for file, text in files.items():
        # a heredoc whose word is quoted expands nothing; the word is in no line of the text
        mark = _mark(text)
        lines += [f"cat > \"$files\"/{file} <<'{mark}'", text.removesuffix("\n"), mark]
    lines += [
        "",
        f"mkdir -p {shlex.quote(cache_directory(deployment))}",
        f"cd {shlex.quote(started.cwd)}",
        "env \\",
        *(f"    {shlex.quote(f'{variable}={value}')} \\" for variable, value in env.items()),
        f"    {shlex.join(started.argv)} &",
        "engine=$!",
        "",
        "# Each waits for the engine to be healthy first, and gives up when it ends.",
        *(_job(deployment, what, url, key) for what in ("exactness", "bench")),
        "",
        'wait "$engine"',
    ]
    return "\n".join(lines) + "\n"


def _job(deployment: Deployment, what: str, url: str, key: str | None) -> str:
    argv = job_argv(deployment, what, url, "FILES", key)
    words = " ".join('"$files"' if word == "FILES" else shlex.quote(word) for word in argv[1:])
    return f'"${{DDTREE_PYTHON:-python3}}" {words} --pid "$engine"'


def _mark(text: str) -> str:
    mark = "END_OF_FILE"
    while mark in text:
        mark += "_"
    return mark
