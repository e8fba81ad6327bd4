"""A real engine process on a port of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from ddtree_ops import httpclients

REPOSITORY = Path(__file__).parents[3]


class Engine:
    """An engine process, its log and a client."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        program: Sequence[str] = ("-m", "ddtree_ops.engine"),
        wrapped: Sequence[str] = (),
    ) -> None:
        """program: what python runs instead of the engine itself; wrapped: a command that runs what follows it."""
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*wrapped, sys.executable, *program, "--port", "0", "--num-threads", "1", *arguments],
                cwd=REPOSITORY,
                stderr=output,
                stdout=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.client = httpclients.blocking("", None, timeout_s=20)

    def wait_ready(self) -> Engine:
        until(lambda: "ready on" in self.log.read_text() or self.process.poll() is not None, 60)
        ready = re.search(r"ready on (http://\S+)", self.log.read_text())
        assert ready, self.log.read_text()
        self.client.base_url = httpx.URL(ready[1])
        return self

    def generate(self, **body: Any) -> Any:
        answer = self.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.client.get("/server_info").json()["internal_states"][0]
        return state

    def idle(self) -> bool:
        state = self.state()
        requests = state["num_running_reqs"] + state["num_queue_reqs"]
        return bool(requests == 0 and state["kv_slots_free"] == state["kv_slots_total"])

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def tree(pair: Path) -> list[str]:
    return [
        *("--model-path", str(pair / "target"), "--speculative-draft-model-path", str(pair / "draft")),
        *("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "8", "--speculative-ddtree-topk", "4"),
    ]
