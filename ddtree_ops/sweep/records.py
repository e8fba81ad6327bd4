"""What a sweep keeps: one JSON object a line, appended and fsynced; a run's directory and its lock.

Figures that nobody told are null, never made up. Times are in seconds unless a name says ``_ms``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from ddtree_ops.errors import Failed, Locked, UsageError
from ddtree_ops.sweep.grid import Cell, Shape

FORMAT = 1
FOLDER = "sweeps"
JOURNAL = "records.jsonl"

#: ok: has figures. not-exact: the gate failed or gave no verdict, so no throughput. refused: a rule or the server's
#: limits. start-failed: never healthy. hang, crash, out-of-memory, failed: while it was measured.
Status: TypeAlias = Literal["ok", "not-exact", "refused", "start-failed", "hang", "crash", "out-of-memory", "failed"]
T = TypeVar("T")


class Percentiles(msgspec.Struct, frozen=True):
    """In milliseconds."""

    p50: float
    p90: float
    p99: float


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request. ``prompt`` is an index into the set; ``steps`` verify steps, None without speculation;
    ``until_eos``/``steps_until_eos``: tokens and steps up to the first EOS, all where there was none, steps None where
    they are not known; ``loops``: the output ends in a cycle.
    """

    prompt: int
    tokens: int
    steps: int | None
    seconds: float
    ttft: float
    until_eos: int
    steps_until_eos: int | None
    cached: int | None
    loops: bool


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of a cell. ``throughput``: tokens/s over the steady window (``window_s``: all C in flight and more
    waiting; the whole pass where that is under half of its tokens), ``overall`` over all of it. ``per_request``:
    tokens/s of each request, median. ``accept_length``: commit length, tokens of verify steps over verify steps up to
    the first EOS. ``accept_over_time``: [second, commit length] in up to 20 parts of the window. ``commits``: how many
    steps committed 1, 2, ... tokens; ``unseen_steps``: those of which that is not known. ``step_ms``: median time of a
    step of one request, None where chunks hold several. ``outputs``: sha256 of all output ids in prompt order.
    """

    seconds: float
    window_s: float
    tokens: int
    throughput: float
    overall: float
    per_request: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    accept_length: float | None
    accept_over_time: list[tuple[float, float]]
    commits: dict[int, int]
    unseen_steps: int
    steps_per_s: float | None
    step_ms: float | None
    in_flight: float
    cached_tokens: int | None
    outputs: str
    rows: list[Row]


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as nvidia-smi tells it; None for what it does not."""

    index: int
    name: str
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    memory_used_mib: float | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """The first line: what was asked for. ``sets``: prompt set -> its facts (workload hash, count, EOS ids)."""

    format: int
    t: float
    host: str
    service: str
    command: str
    seed: int
    reference: Shape
    drift_bound: float
    loads: list[str]
    shapes: list[Shape]
    sets: dict[str, dict[str, Any]]
    hardware: dict[str, Any]
    version: str


class Client(msgspec.Struct, frozen=True, kw_only=True, tag="client", tag_field="kind"):
    """The load client's own ceiling against a stub on this machine, by concurrency: tokens/s and chunks/s."""

    t: float
    ceilings: dict[int, tuple[float, float]]


class Attempt(msgspec.Struct, frozen=True, kw_only=True, tag="attempt", tag_field="kind"):
    """Written before the host is touched: whose transaction an unfinished one is."""

    t: float
    txn: str
    shape: Shape
    number: int
    back_to: int | None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started", tag_field="kind"):
    """A start that got its verdict. ``arguments``: the server's resolved ones, secrets out; ``identity``: what must be
    equal for two cells to stand in one table.
    """

    t: float
    txn: str
    shape: Shape
    number: int
    release: str | None
    profile: dict[str, Any]
    rules: list[str]
    arguments: dict[str, Any]
    identity: dict[str, Any]
    verdict: dict[str, Any]
    passed: bool
    load_s: float | None


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="kind"):
    """How the host left a start: ``event`` recovered, unchanged, ...; ``downtime_s``: from the stop of what ran before
    to its being back healthy, so without it for that long. None where nothing ran.
    """

    t: float
    txn: str
    event: str
    generation: int | None
    seconds: float
    downtime_s: float | None


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="cell", tag_field="kind"):
    """A cell's end. ``txn`` names its start; ``warmup``: passes until steady, and whether it became so."""

    t: float
    cell: Cell
    status: Status
    reason: str = ""
    txn: str | None = None
    repeats: list[Repeat] = []
    warmup: int = 0
    steady: bool | None = None
    gpus_before: list[Gpu] | None = None
    gpus_after: list[Gpu] | None = None
    wall_s: float = 0.0


Record: TypeAlias = Run | Client | Attempt | Started | Ended | Measured


class Journal:
    """A run's ``records.jsonl``. One process writes it at a time (`opened`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = read(path)

    def append(self, record: Record) -> None:
        """One line, on the disk when this returns. Raises Failed when the disk does not take it."""
        line = msgspec.json.encode(record) + b"\n"
        try:
            new = not self.path.exists()
            with self.path.open("ab") as stream:
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
            if new:
                folder = os.open(self.path.parent, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
        except OSError as error:
            raise Failed(f"{self.path}: {error.strerror}; the sweep cannot keep what it measures") from error
        self.records.append(record)

    def of(self, kind: type[T]) -> list[T]:
        """All records of one kind, in order."""
        return [record for record in self.records if isinstance(record, kind)]


def read(path: Path) -> list[Record]:
    """The records of a file; [] where there is none. A last line without its end (a killed writer) is left out.

    Raises UsageError for lines that are no records, or a format this version does not read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    found: list[Record] = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}:{number}: not a sweep's record: {error}") from error
    first = found[0] if found else None
    if first is not None and (not isinstance(first, Run) or first.format != FORMAT):
        raise UsageError(f"{path}: not the records of a sweep of format {FORMAT}")
    return found


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Journal]:
    """The journal of a run's directory, alone with it; a torn last line is cut off. Raises Locked, Failed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Locked(f"{folder}: another sweep writes there", hint="wait for it, or --run") from None
            _cut_torn(folder / JOURNAL)
            yield Journal(folder / JOURNAL)
    except OSError as error:
        raise Failed(f"{folder}: {error.strerror or error}") from error


def _cut_torn(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as stream:
            stream.truncate(whole)
            os.fsync(stream.fileno())


def cells(records: Sequence[Record]) -> dict[Cell, Measured]:
    """The end of every cell that has one; the last counts."""
    return {record.cell: record for record in records if isinstance(record, Measured)}


def sha256_of(path: Path) -> str:
    """Of a run's journal as it lies there: the evidence's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
