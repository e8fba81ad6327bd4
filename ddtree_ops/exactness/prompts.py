"""The prompts: the fixed set that ships here, an operator's own file, and stand-ins for a server without tokenizer."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from pathlib import Path

import msgspec

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness.plan import Prompt

PROMPT_SET = "prompts-v1"
MAX_FILE_BYTES = 64 << 20


class PromptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of a prompt set. ``version`` changes whenever a prompt does: verdicts name it."""

    version: str
    prompts: list[Prompt]


def builtin_prompts() -> list[Prompt]:
    """The prompt set ``PROMPT_SET``."""
    data = resources.files("ddtree_ops.exactness").joinpath(f"data/{PROMPT_SET}.json").read_bytes()
    return msgspec.json.decode(data, type=PromptFile).prompts


def load_prompts(path: Path | None = None) -> list[Prompt]:
    """The packaged set, or an operator's file. Raises UsageError naming file and place.

    JSON ``{"version": ..., "prompts": [{"id", "kind", "text" | "input_ids"}]}``; or, in a file named .jsonl, one JSON
    prompt a line, where ``id`` and ``kind`` may be left out.
    """
    if path is None:
        return builtin_prompts()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB of prompts")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    if path.suffix != ".jsonl":
        try:
            return _checked(msgspec.json.decode(data, type=PromptFile).prompts, path)
        except msgspec.DecodeError as error:
            raise UsageError(f"{path}: {error}", hint="one prompt a line goes into a file named .jsonl") from error
    prompts = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                given = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError as error:
                raise UsageError(f"{path}:{number}: {error}") from error
            ids = given.input_ids
            prompts.append(Prompt(id=given.id or f"line-{number}", kind=given.kind, text=given.text, input_ids=ids))
    return _checked(prompts, path)


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str = ""
    kind: str = "own"
    text: str | None = None
    input_ids: tuple[int, ...] | None = None


def _checked(prompts: list[Prompt], path: Path) -> list[Prompt]:
    if not prompts:
        raise UsageError(f"{path}: no prompts")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UsageError(f"{path}: two prompts have the id {prompt.id!r}")
        seen.add(prompt.id)
        if (prompt.text is None) == (prompt.input_ids is None):
            raise UsageError(f"{path}: prompt {prompt.id!r} needs text or input_ids, one of them")
        if prompt.text == "" or prompt.input_ids == ():
            raise UsageError(f"{path}: prompt {prompt.id!r} is empty")
        if any(token < 0 for token in prompt.input_ids or ()):
            raise UsageError(f"{path}: prompt {prompt.id!r} has a negative id")
    return prompts


def stand_in_ids(text: str, vocab_size: int) -> tuple[int, ...]:
    """Ids for ``text`` without a tokenizer: each word or mark hashed below ``vocab_size``.

    Deterministic on any machine, and it keeps what makes the prompts worth having: repeats and shared prefixes.
    """
    pieces = re.findall(r"\w+|[^\w\s]", text) or [text]
    return tuple(int.from_bytes(hashlib.sha256(p.encode()).digest()[:8], "big") % vocab_size for p in pieces)
