"""Active checks: each runs a script in the release's own Python on the host, within a time limit.

Never by default. Those that open a GPU are refused while anybody uses one of the service's, and when nobody can tell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ddtree_ops.doctor.check import Case, Finding, listed
from ddtree_ops.doctor.checks.cards import IDLE_MIB
from ddtree_ops.errors import Failed
from ddtree_ops.remote.transport import Transport, printable
from ddtree_ops.units import launch

GROUP = "active"
MARK = b"DDTREE-ACTIVE "
#: Runs its standard input as a file: Triton and ranks of an all-reduce read their own source. Leaves nothing behind.
BOOT = """\
import os, runpy, shutil, signal, sys, tempfile
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
folder = tempfile.mkdtemp(prefix="ddtree-active-")
try:
    path = os.path.join(folder, "active.py")
    with open(path, "wb") as file:
        file.write(sys.stdin.buffer.read())
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        os.environ[name] = folder
    sys.argv[0] = path
    runpy.run_path(path, run_name="__main__")
finally:
    shutil.rmtree(folder, ignore_errors=True)
"""


@dataclass(frozen=True)
class Active:
    """One active check. ``request`` says what its script is asked, None where it does not apply."""

    id: str
    script: str
    what: str
    do: str
    reference: str
    request: Callable[[Case], dict[str, Any] | None]
    limit_s: float
    gpus: bool = True


def _devices(case: Case) -> list[str]:
    return [f"cuda:{index}" for index in range(len(case.deployment.service.gpus))]


def _imports(case: Case) -> dict[str, Any] | None:
    if not case.uses_gpus:
        return {"modules": ["torch", "ddtree_ops.engine.server"]}
    asked: dict[str, Any] = {"modules": ["torch", "triton", "sgl_kernel", "sglang.srt.server_args"]}
    if case.arch is not None:
        asked |= {"code": case.arch.code, "count": len(case.deployment.service.gpus)}
        asked |= {"capability": case.arch.compute_capability, "shared_memory": case.arch.shared_memory_kib * 1024}
    return asked


def _ptxas(case: Case) -> dict[str, Any] | None:
    if not case.uses_gpus or case.arch is None:
        return None
    return {"tool": case.arch.ptxas, "target": case.arch.gpu_name}


def _kernel(case: Case) -> dict[str, Any] | None:
    return {"devices": _devices(case)} if case.uses_gpus and _devices(case) else None


def _tree(case: Case) -> dict[str, Any] | None:
    if not _kernel(case) or case.profile.attention_backend != "triton":
        return None
    return {"devices": _devices(case)[:1], "dtypes": sorted({"float32", "bfloat16"})}


def _copies(case: Case) -> dict[str, Any] | None:
    return {"devices": _devices(case), "bytes": 64 << 20} if case.uses_gpus and len(_devices(case)) > 1 else None


def _reduce(case: Case) -> dict[str, Any] | None:
    if not case.uses_gpus or case.profile.tp < 2:
        return None
    return {"tp_sizes": [case.profile.tp], "sizes": [4096, 64 << 20], "backend": "nccl", "limit_s": 90.0}


ACTIVE: dict[str, Active] = {
    each.id: each
    for each in (
        Active("imports", "imports", "the engine's modules import in the release, built for these GPUs",
               "build a release whose torch, triton and kernels are pinned together and for this arch: ddtree build",
               "undefined symbol at import; no kernel image at the first request", _imports, 180),
        Active("ptxas", "ptxas", "the ptxas that Triton calls knows the arch",
               "a newer Triton in the base's lock, or TRITON_PTXAS_PATH in the profile's env",
               "ptxas rejects sm_103a on B300", _ptxas, 60, gpus=False),
        Active("triton-kernel", "triton_kernel", "a Triton kernel compiles and computes on each GPU",
               "see the checks compiler, ptxas and driver-version", "Triton, compiler and launcher", _kernel, 180),
        Active("tree-verify", "tree_verify", "SGLang's verify kernel reads the tree's mask, against the CPU oracle",
               "do not deploy a tree here: profile chain; and report it with this line",
               "the seed bug: a mask sized by the drafter's block", _tree, 180),
        Active("p2p-copy", "p2p_copy", "copies between GPUs arrive as they were sent",
               "iommu=pt on the kernel's command line, ACS off; until then NCCL_P2P_DISABLE=1 in the profile's env",
               "silent P2P corruption under an IOMMU", _copies, 180),
        Active("all-reduce", "all_reduce", "an all-reduce of 4 KB and 64 MB ends, and is right, at the profile's TP",
               "NCCL_P2P_DISABLE=1 in the profile's env; see pcie-iommu, pcie-acs, p2p-atomics",
               "hang at the first all-reduce on PCIe boxes", _reduce, 150),
    )
}  # fmt: skip


def source(name: str) -> str:
    """A script as one file: the prelude and its own text."""
    home = resources.files(__name__)
    prelude, own = (home.joinpath(f"{part}.py").read_text(encoding="utf-8") for part in ("prelude", name))
    future = "from __future__ import annotations\n"
    own = re.sub(r"^from \.prelude import .*\n", "", own, flags=re.MULTILINE)
    return future + prelude.replace(future, "") + own.replace(future, "")


def busy(case: Case) -> str | None:
    """Who uses the service's GPUs, or why nobody can tell; None when they are free."""
    cards = case.facts.cards
    if cards.problem is not None or "cards" in case.facts.absent or "cards" in case.facts.malformed:
        return f"whether they are free cannot be told: {cards.problem or 'no facts of the GPUs'}"
    if len(case.gpus) != len(case.deployment.service.gpus):
        return f"{len(case.gpus)} of the service's {len(case.deployment.service.gpus)} GPUs are there"
    mine = {gpu.index for gpu in case.gpus}
    holders = [f"GPU {row.gpu}: {row.name or '?'} (pid {row.pid})" for row in cards.processes if row.gpu in mine]
    used = [f"GPU {gpu.index}: {gpu.memory_used_mib} MiB, {gpu.utilization or 0} %" for gpu in case.gpus
            if (gpu.memory_used_mib or 0) > IDLE_MIB or (gpu.utilization or 0) > 0]  # fmt: skip
    return listed(holders or used) or None


def release_of(case: Case) -> str | None:
    """The release to try things in: the confirmed generation's, else the newest that is installed."""
    installed = case.facts.releases.installed
    own = case.facts.service.release
    return own if own in installed else installed[-1] if installed else None


def try_out(
    case: Case, transport: Transport, wanted: Collection[str], say: Callable[[str], None]
) -> dict[str, list[Finding]]:
    """Run the wanted active checks that apply. {id: its findings}; a refusal is a finding as well."""
    found: dict[str, list[Finding]] = {}
    release = release_of(case)
    held = busy(case) if case.uses_gpus else None
    for active in ACTIVE.values():
        asked = active.request(case)
        if active.id not in wanted or asked is None:
            continue
        if release is None:
            seen, do = f"no release is installed below {case.deployment.host.root}", "ddtree deploy, or install one"
            found[active.id] = [_finding(active, f"not tried: {seen}", "a release to try it in", do)]
        elif active.gpus and held is not None:
            do = f"ddtree stop --host {case.deployment.host.name}, or end what holds them; then again"
            found[active.id] = [
                _finding(active, f"not tried: {held}", "free GPUs: an active check would disturb them", do)
            ]
        else:
            say(f"{active.id}: {active.what} (at most {active.limit_s:g} s)")
            found[active.id] = run_one(active, case, transport, release, asked)
    return found


def run_one(active: Active, case: Case, transport: Transport, release: str, asked: dict[str, Any]) -> list[Finding]:
    """One script on the host. Whatever it does, hanging included, is a finding or nothing."""
    started = launch(case.deployment, release)
    env = [f"{key}={value}" for key, value in started.env.items()]
    argv = ["env", "-i", *env, started.argv[0], "-I", "-c", BOOT, json.dumps(asked)]
    try:
        result = transport.run(
            argv, stdin=source(active.script).encode(), timeout=active.limit_s, root=transport.may_root
        )
    except Failed as error:
        return [_finding(active, error.message.rpartition(": ")[2], f"an end within {active.limit_s:g} s", active.do)]
    answer = parse(result.stdout)
    if answer is None:
        said = printable(result.stderr, 1200) or printable(result.stdout, 1200) or "nothing"
        return [_finding(active, f"no answer (status {result.code}); it said: {said}", "an answer", active.do)]
    if answer.get("ok") is True:
        return []
    words = [printable(str(answer.get(key, "?")).encode(), 1500) for key in ("seen", "expected")]
    return [_finding(active, words[0], words[1], active.do)]


def parse(output: bytes) -> dict[str, Any] | None:
    """The answer among what else was printed; None when there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            try:
                answer = json.loads(line[len(MARK) :])
            except (ValueError, RecursionError):
                return None
            return answer if isinstance(answer, dict) else None
    return None


def _finding(active: Active, seen: str, expected: str, do: str) -> Finding:
    return Finding(active.id, GROUP, "error", seen, expected, do, active.reference)
