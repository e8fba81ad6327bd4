"""Goldens: what a server without speculation answered, kept as a file and named by everything that it depends on.

``goldens/<key>.json`` in a workspace; the key is a hash of Identity. Verify counts lie beside the tokens, by the shape
of the tree: faults that change no token (a clamped budget, duplicate siblings) change how many steps the same tokens
take.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.exactness.plan import Prompt

FORMAT = 1
FOLDER = "goldens"
MAX_FILE_BYTES = 256 << 20


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a golden is a golden of. ``model``: what the host tells of its config, tensor headers and shard sizes.
    ``prompts``: the prompt set's name and content hash (prompts_version).
    """

    model: dict[str, Any]
    dtype: str
    arch: str
    tp: int
    engine_base: str
    prompts: str
    max_new_tokens: int

    def key(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def differing(self, other: Identity) -> list[str]:
        """One line for every field in which ``other`` differs; a model's identity is too long to be shown."""
        lines = []
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                lines.append("model (another one)" if name == "model" else f"{name} ({others}, needed is {mine})")
        return lines


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt's answer. ``tokens`` has the stop token that ended it; ``prompt``: prompt_hash of its ids."""

    prompt: str
    tokens: tuple[int, ...]
    finish: str


class Golden(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A golden file. ``verify_counts``: shape -> prompt id -> verify steps of its answer, in fp32 at C=1.

    ``sampled``: answers above temperature 0 by sameseed's table of version ``sampling``; empty where the server had no
    positional seeds.
    """

    format: int
    identity: Identity
    prompts: dict[str, Recorded]
    verify_counts: dict[str, dict[str, int]] = {}
    sampling: str = ""
    sampled: dict[str, Recorded] = {}


class Recording:
    """Collects what a run answers at its first load."""

    def __init__(self) -> None:
        self.prompts: dict[str, Recorded] = {}
        self.verify_counts: dict[str, int] = {}
        self.sampling = ""
        self.sampled: dict[str, Recorded] = {}

    def add(self, name: str, ids: Sequence[int], tokens: tuple[int, ...], finish: str, steps: int | None) -> None:
        self.prompts[name] = Recorded(prompt=prompt_hash(ids), tokens=tokens, finish=finish)
        if steps is not None:
            self.verify_counts[name] = steps


def prompt_hash(ids: Sequence[int]) -> str:
    """16 hex digits."""
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:16]


def prompts_version(name: str, prompts: Sequence[Prompt]) -> str:
    """A prompt set's name with a hash of its content: an edited file under an old name is another set."""
    return f"{name}-{hashlib.sha256(msgspec.json.encode(list(prompts))).hexdigest()[:12]}"


def load(folder: Path, identity: Identity) -> Golden:
    """The golden of exactly this identity. Raises UsageError: none, another's, or damaged; the message names files."""
    path = folder / f"{identity.key()}.json"
    if not path.is_file():
        near = [f"{other.name} differs in {', '.join(why)}" for other, why in _others(folder, identity)]
        raise UsageError(
            f"{folder}: no golden of this model, dtype and machine ({path.name})" + "".join(f"; {n}" for n in near[:4]),
            hint="record one against a service whose algorithm is none: ddtree verify-exactness --record",
        )
    golden = read(path)
    if why := identity.differing(golden.identity):
        raise UsageError(f"{path}: a foreign golden: it differs in {', '.join(why)}")
    return golden


def read(path: Path) -> Golden:
    """Raises UsageError naming the file: unreadable, damaged, or of another format."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB")
        golden = msgspec.json.decode(path.read_bytes(), type=Golden)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: not a golden: {error}") from error
    if golden.format != FORMAT:
        raise UsageError(f"{path}: a golden of format {golden.format}; this ddtree reads format {FORMAT}")
    return golden


def save(folder: Path, golden: Golden) -> Path:
    """Writes the golden under its key, whole or not at all; returns the file. Raises Failed."""
    path = folder / f"{golden.identity.key()}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(golden, order="sorted"), indent=1) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror or error}") from error
    return path


def _others(folder: Path, identity: Identity) -> list[tuple[Path, list[str]]]:
    """Goldens that are there, nearest first, each with how it differs; damaged ones say so."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            found.append((path, identity.differing(read(path).identity)))
        except UsageError:
            found.append((path, ["everything: it cannot be read"]))
    return sorted(found, key=lambda item: len(item[1]))
