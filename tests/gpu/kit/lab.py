"""Servers on one card, started all at once, each held by one experiment at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from .ask import Asker
from .results import Results
from .trees import Trees

FIRST_PORT = 30000
#: a fault of tests/gpu/faults -> the reference engine's nearest
REFERENCE_FAULTS = {
    "mask-rows-by-block-size": "mask-rows-by-block-size",
    "mask-offset-of-second-request": "mask-of-first-request",
    "mask-all-blocked": "mask-all-blocked",
    "rope-by-index": "rope-by-index",
    "stale-kv": "stale-kv",
    "hidden-of-wrong-node": "draft-hidden-of-wrong-node",
    "walk-past-mismatch": "walk-past-mismatch",
    "pad-node-accepted": "pad-node-accepted",
    "padded-rows-write-live-slots": "padded-rows-write-live-slots",
    "lenient-acceptance": "lenient-acceptance",
    "sampled-as-greedy": "temperature-ignored",
    "sampled-filter-order": "filter-order",
    "sampled-min-p-ignored": "min-p-ignored",
    "sampled-by-next-rows-parameters": "parameters-of-neighbour",
    "sampled-repeat-for-repeat-interleave": "parameters-of-neighbour",
}


@dataclass(frozen=True)
class Spec:
    """A server to start. ``chunk``: prefill chunk in tokens; ``slots``: of the KV pool; ``more``: further arguments as
    they are. ``budget``, ``topk``, ``ladder``: of trees. ``faults``: of tests/gpu/faults, planted into its SGLang.
    ``starts``: False where the start-up canary must stop it. ``debug``: DDTREE's dear checks. ``split``: False has
    SGLang's own attention kernel verify trees. ``kind``: of kit/kinds, another pair than the run's. ``environment``:
    further variables.
    """

    name: str
    algorithm: str = "none"
    dtype: str = "float32"
    stock: bool = False
    graphs: bool = True
    overlap: bool = True
    chunk: int | None = None
    tokenizer: bool = True
    more: tuple[str, ...] = ()
    budget: int | None = None
    topk: int | None = None
    ladder: str | None = None
    slots: int = 65536
    faults: tuple[str, ...] = ()
    starts: bool = True
    debug: bool = False
    split: bool = True
    kind: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def arguments(self, pair: Path, port: int, nccl_port: int) -> list[str]:
        """For sglang.launch_server. A fixed number of KV slots: fractions of what is free race between servers."""
        words = [
            *("--model-path", str(pair / "target"), "--host", "127.0.0.1", "--port", str(port)),
            *("--nccl-port", str(nccl_port), "--dtype", self.dtype, "--random-seed", "1"),
            *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--mem-fraction-static", "0.5", "--max-total-tokens", str(self.slots)),
            *("--max-running-requests", "40"),
            "--disable-prefill-cuda-graph",
            *("--decode-log-interval", "400", "--watchdog-timeout", "240"),
        ]
        if self.graphs:
            words += ["--cuda-graph-bs-decode", "1", "2", "4", "8", "16", "24", "32", "40"]
        else:
            words += ["--disable-decode-cuda-graph"]
        if self.algorithm != "none":
            words += ["--speculative-algorithm", self.algorithm.upper()]
            words += ["--speculative-draft-model-path", str(pair / "draft")]
        words += self._tree()
        if self.ladder is not None:
            words += ["--speculative-ddtree-ladder", self.ladder]
        if not self.overlap:
            words += ["--disable-overlap-schedule"]
        if self.chunk is not None:
            words += ["--chunked-prefill-size", str(self.chunk)]
        if not self.tokenizer:
            words += ["--skip-tokenizer-init"]
        return [*words, *self.more]

    def _tree(self) -> list[str]:
        if self.budget is None:
            return []
        return ["--speculative-ddtree-budget", str(self.budget), "--speculative-ddtree-topk", str(self.topk)]

    def reference_arguments(self, pair: Path, port: int) -> list[str]:
        """For ddtree_ops.engine, which stands in where there is no GPU. It has faults of its own by other names, and
        no canary that would stop it."""
        words = ["--model-path", str(pair / "target"), "--port", str(port), "--dtype", self.dtype]
        words += ["--max-running-requests", "40", "--num-threads", "1", "--log-level", "warning"]
        if self.algorithm != "none":
            words += ["--speculative-algorithm", self.algorithm.upper()]
            words += ["--speculative-draft-model-path", str(pair / "draft")]
        words += self._tree()
        for fault in self.faults:
            if fault in REFERENCE_FAULTS:
                words += ["--fault", REFERENCE_FAULTS[fault]]
        return words


@dataclass
class Running:
    """A started server. ``lock``: whoever holds it has the server alone."""

    spec: Spec
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    ask: Asker
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None


class Lab:
    """Starts servers and hands them to experiments. ``trees`` None: the reference engine stands in."""

    def __init__(
        self,
        trees: Trees | None,
        pair: Path,
        results: Results,
        start_limit_s: float,
        caches: Path,
        deadline: float,
    ) -> None:
        """``deadline``: on the monotonic clock; experiments begin nothing long that would not end before it."""
        self.trees, self.pair, self.results, self.start_limit_s = trees, pair, results, start_limit_s
        self.deadline = deadline
        self.servers: dict[str, Running] = {}
        self.caches = caches

    def pair_of(self, spec: Spec) -> Path:
        """The server's pair, written at the first question where it is of another kind. The reference engine serves
        one kind only."""
        if spec.kind is None or self.trees is None:
            return self.pair
        from .kinds import KINDS

        folder = self.caches.parent / "pairs" / spec.kind
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)
            KINDS[spec.kind](folder)
        return folder

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def start(self, specs: list[Spec]) -> None:
        """All at once: they share the compile caches, whose locks let one of them compile each kernel."""
        logs = self.results.evidence / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for i, spec in enumerate(specs):
            port = FIRST_PORT + 10 * i
            if self.trees is None:
                command = [
                    sys.executable,
                    "-m",
                    "ddtree_ops.engine",
                    *spec.reference_arguments(self.pair_of(spec), port),
                ]
                path = os.environ.get("PYTHONPATH", "")
            else:
                tree = self.trees.stock if spec.stock else self.trees.planted(spec.faults)
                if tree is None:
                    continue
                path = tree
                command = [sys.executable, "-m", "sglang.launch_server"]
                command += spec.arguments(self.pair_of(spec), port, FIRST_PORT + 5000 + 10 * i)
            log = logs / f"{spec.name}.log"
            with log.open("wb") as file:
                file.write((" ".join(command) + "\n").encode())
                file.flush()
                process = subprocess.Popen(
                    command, stdout=file, stderr=file, start_new_session=True, env=self._environment(path, spec)
                )
            url = f"http://127.0.0.1:{port}"
            self.servers[spec.name] = Running(spec, url, process, log, Asker(url))

    def _environment(self, path: str, spec: Spec) -> dict[str, str]:
        caches = {
            "TRITON_CACHE_DIR": "triton",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TVM_FFI_CACHE_DIR": "tvm-ffi",
            "XDG_CACHE_HOME": "xdg",
            "SGLANG_CACHE_DIR": "sglang",
        }
        own = {name: str(self.caches / folder) for name, folder in caches.items()}
        if spec.debug:
            own["SGLANG_DDTREE_DEBUG"] = "1"
        if not spec.split:
            own["SGLANG_DDTREE_SPLIT_PREFIX"] = "0"
        own |= dict(spec.environment)
        return {**os.environ, **own, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}

    async def watch(self) -> None:
        """Tells every server's readiness or failure; ends when all are told."""
        await asyncio.gather(*(self._watch(server) for server in self.servers.values()))

    async def _watch(self, server: Running) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < self.start_limit_s:
            if server.process.poll() is not None:
                break
            if (await server.ask.get("/health")).status == 200 and await server.ask.alive():
                self.results.add("start", server.spec.name, "ready", True, seconds=time.monotonic() - begun)
                server.ready.set()
                return
            await asyncio.sleep(1.0)
        code = server.process.poll()
        server.failure = "not ready in time" if code is None else f"exit code {code}"
        if server.spec.starts:
            self.results.add("start", server.spec.name, "ready", False, why=server.failure, log=last_error(server.log))
        server.ready.set()

    @contextlib.asynccontextmanager
    async def hold(self, *names: str) -> AsyncIterator[list[Running]]:
        """The servers of these names, ready and alone. Raises LookupError for one that was not started or failed."""
        servers = []
        for name in names:
            if name not in self.servers:
                raise LookupError(f"server {name} was not asked for")
            servers.append(self.servers[name])
        async with contextlib.AsyncExitStack() as stack:
            for server in sorted(servers, key=lambda one: one.url):
                await server.ready.wait()
                if server.failure is not None:
                    raise LookupError(f"server {server.spec.name}: {server.failure}")
                await stack.enter_async_context(server.lock)
            yield servers

    def memory_mib(self) -> dict[str, int]:
        """Server -> what its processes have of the card; empty where nvidia-smi does not say."""
        command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        had: dict[str, int] = {}
        with contextlib.suppress(OSError):
            told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            for line in told.splitlines():
                pid, mib = (int(word) for word in line.split(","))
                for name, server in self.servers.items():
                    if os.getsid(pid) == server.process.pid:
                        had[name] = had.get(name, 0) + mib
        return had

    def stop(self) -> None:
        """Ends every process group that was started here."""
        for server in self.servers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()


def last_error(log: Path, limit: int = 300) -> str:
    """The last line of a log that names an error; the last one, where none does."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines or [""])[-1][-limit:]
