"""All parts at once, one document."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable

from ..agent.base import JSON, safe_json
from .cards import capabilities, driver, fabric, gpus, kernel_log, modprobe, toolchain
from .links import bus, peers, topology
from .machine import clock, memory, python, rights, system
from .running import log, port, server, service
from .stores import disks, model, release_facts
from .tools import Box

FORMAT = 1
LIMIT_S = 2.7
PARTS: dict[str, Callable[[Box], JSON]] = {
    "os": system, "python": python, "rights": rights, "clock": clock, "memory": memory,
    "driver": driver, "fabric": fabric, "capabilities": capabilities, "cards": gpus, "kernel_log": kernel_log,
    "toolchain": toolchain, "module_options": modprobe,
    "topology": topology, "peers": peers, "bus": bus,
    "disks": disks, "releases": release_facts,
    "service": service, "port": port, "server": server, "log": log,
}  # fmt: skip


def gather(request: JSON) -> JSON:
    """Every part on its own thread; those that do not end in time are ``unfinished``, a failed one is a problem."""
    limit = request.get("limit_s", LIMIT_S)
    box = Box(request, limit if isinstance(limit, (int, float)) and 0.1 <= limit <= 120 else LIMIT_S)
    began, done = time.monotonic(), {}
    jobs: dict[str, tuple[Callable[..., JSON], tuple[str, ...]]] = {name: (part, ()) for name, part in PARTS.items()}
    for path in [str(each) for each in request.get("models", [])][:8]:
        jobs[f"model {path}"] = (model, (path,))

    def work(name: str, part: Callable[..., JSON], more: tuple[str, ...]) -> None:
        try:
            done[name] = part(box, *more)
        except Exception as error:  # a part that fails is a fact; the others go on
            box.problems.append({"part": name, "problem": f"{type(error).__name__}: {error}"[:300]})

    threads = {name: threading.Thread(target=work, args=(name, *job), daemon=True) for name, job in jobs.items()}
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, box.deadline - time.monotonic()))
    late = sorted(name for name, thread in threads.items() if thread.is_alive())
    box.kill_all()
    reply: JSON = {name: value for name, value in list(done.items()) if not name.startswith("model ")}
    reply["models"] = {name[6:]: value for name, value in list(done.items()) if name.startswith("model ")}
    reply["collector"] = {
        "seconds": round(time.monotonic() - began, 3),
        "limit_s": box.limit_s,
        "unfinished": late,
        "problems": list(box.problems)[:64],
    }
    reply["format"] = FORMAT
    return reply


def safe_reply(reply: JSON) -> JSON:
    """Every text made safe, but not the paths that were asked for: a long one may look like a key."""
    kept = {name: reply[name] for name in ("models", "disks") if name in reply}
    made: JSON = safe_json({name: value for name, value in reply.items() if name not in kept})
    return {**made, **{name: {path: safe_json(each) for path, each in part.items()} for name, part in kept.items()}}


def main(argv: list[str]) -> None:
    try:
        request = json.loads(argv[0]) if argv else {}
    except ValueError:
        request = {}
    print(json.dumps(safe_reply(gather(request if isinstance(request, dict) else {}))), flush=True)
    # A thread may hang in a call to the kernel that no signal ends.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
