"""An all-reduce of every size at every TP size, each rank a process of its own, all of it within a limit.

A box that cannot do it does not fail: it hangs in the first one, for ever. So the parent waits, and ends the ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .prelude import run, wrong


def rank_main(request: dict[str, Any]) -> None:
    """One rank: joins, reduces each size three times, checks every value, says so a line a size."""
    import torch
    import torch.distributed as dist

    rank, ranks, backend = request["rank"], request["ranks"], request["backend"]
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{request['meet']}", rank=rank, world_size=ranks)
    print("joined", flush=True)
    for size in request["sizes"]:
        began = time.monotonic()
        for turn in range(3):
            pattern = torch.arange(size // 4, device=device, dtype=torch.float32) % 251 + turn
            data = pattern * (rank + 1)
            dist.all_reduce(data)
            # Whole numbers below 2^24: the sum is exact in any order.
            if not torch.equal(data, pattern * (ranks * (ranks + 1) // 2)):
                print(f"wrong {size}", flush=True)
                os._exit(3)
        print(f"done {size} {time.monotonic() - began:.3f}", flush=True)
    # Taking a communicator down may hang where using it did not.
    os._exit(0)


def main(request: dict[str, Any]) -> dict[str, Any]:
    """``tp_sizes``, ``sizes`` in bytes, ``backend`` nccl or gloo, ``limit_s`` for each TP size."""
    figures = {}
    for ranks in request["tp_sizes"]:
        told = one_size(request, ranks)
        if not told["ok"]:
            return told
        figures[str(ranks)] = told["seconds_by_size"]
    return {"ok": True, "seconds_by_tp": figures}


def one_size(request: dict[str, Any], ranks: int) -> dict[str, Any]:
    """All ranks of one TP size; those that have not ended at the limit are killed."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            words = {**request, "rank": rank, "ranks": ranks, "meet": f"{folder}/meet"}
            with log.open("wb") as out:
                command = [
                    *request.get("python", [sys.executable, "-I"]),
                    request.get("script", sys.argv[0]),
                    json.dumps(words),
                ]
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
        deadline = time.monotonic() + request["limit_s"]
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):  # one failed: the others would wait for it
                break
            time.sleep(0.05)
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        said = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    what = f"TP {ranks}, {request['backend']}"
    if failed:
        return wrong(f"{what}: rank {failed[0]} ended: {said[failed[0]].strip()[-600:]}", "right sums on every rank")
    if late:
        return wrong(f"{what}: {hung_at(request, said, late)} after {request['limit_s']:g} s", "an end")
    seconds = dict(line.split()[1:] for line in said[0].splitlines() if line.startswith("done "))
    return {"ok": True, "seconds_by_size": {size: float(took) for size, took in seconds.items()}}


def hung_at(request: dict[str, Any], said: list[str], late: list[int]) -> str:
    """Where the slowest rank was: joining, or in which size."""
    names = ", ".join(map(str, late[:8]))
    fewest = min((said[rank] for rank in late), key=len)
    if "joined" not in fewest:
        return f"ranks {names} had not joined"
    size = request["sizes"][min(fewest.count("done "), len(request["sizes"]) - 1)]
    return f"ranks {names} hung in the all-reduce of {size} bytes"


if __name__ == "__main__":
    if "rank" in json.loads(sys.argv[1]):
        rank_main(json.loads(sys.argv[1]))
    else:
        run(main)
