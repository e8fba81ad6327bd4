"""SGLang's JSON, read strictly. Pure: a decoded document in, a typed reply out, Malformed where it is not what 0.5.17
documents (managers/io_struct.py, managers/tokenizer_manager.py). A server is not trusted to be well-formed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

MAX_ID = 1 << 20


class Malformed(ValueError):
    """The reply cannot be read as SGLang's; the message names the field."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A reply of /generate. Counts are None where the server does not tell them; so are ``logprobs``, one an output
    token, in which None stands for a value that is not finite.
    """

    output_ids: tuple[int, ...]
    finish: str
    matched: int | str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    verify_steps: int | None
    accept_length: float | None
    logprobs: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """Logprob of one prompt token given those before it, and the highest-ranked tokens there.

    ``logprob`` is None for the first entry (nothing is before it) and where the server's value is not finite.
    ``top``: (logprob, id, text), best first; None on the first entry.
    """

    token: int
    logprob: float | None
    text: str
    top: tuple[tuple[float | None, int, str], ...] | None


@dataclass(frozen=True, slots=True)
class Scored:
    """The entries of a scored prompt from ``logprob_start_len`` on: entry j belongs to token start + j."""

    entries: tuple[Entry, ...]
    prompt_tokens: int | None
    cached_tokens: int | None


def document(body: bytes) -> dict[str, object]:
    """The JSON object in ``body``. Raises Malformed."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise Malformed(f"a JSON {type(value).__name__}, not an object")
    return value


def generation(reply: dict[str, object]) -> Generation:
    """Raises Malformed. Ids are integers; whether they are in the vocabulary is the judge's question."""
    meta = _meta(reply)
    ids = reply.get("output_ids")
    if not isinstance(ids, list):
        raise Malformed("output_ids is missing or not a list")
    finish, matched = _finish(meta)
    return Generation(
        output_ids=tuple(_integer(value, f"output_ids[{i}]") for i, value in enumerate(ids)),
        finish=finish,
        matched=matched,
        prompt_tokens=_count(meta, "prompt_tokens"),
        completion_tokens=_count(meta, "completion_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        verify_steps=_count(meta, "spec_verify_ct"),
        accept_length=_number(meta.get("spec_accept_length")),
        logprobs=_output_logprobs(meta, ids),
    )


def scored(reply: dict[str, object], *, with_top: bool) -> Scored:
    """Raises Malformed. ``with_top``: top_logprobs_num was asked for."""
    meta = _meta(reply)
    tokens = meta.get("input_token_logprobs")
    if not isinstance(tokens, list) or not tokens:
        raise Malformed("meta_info.input_token_logprobs is missing or empty")
    tops: list[object] = [None] * len(tokens)
    if with_top:
        given = meta.get("input_top_logprobs")
        if not isinstance(given, list) or len(given) != len(tokens):
            length = len(given) if isinstance(given, list) else "none"
            raise Malformed(f"input_top_logprobs has {length} entries, input_token_logprobs {len(tokens)}")
        tops = given
    entries = []
    for i, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        logprob, token_id, text = _triple(token, f"input_token_logprobs[{i}]")
        ranked = None
        if top is not None:
            if not isinstance(top, list):
                raise Malformed(f"input_top_logprobs[{i}] is not a list")
            ranked = tuple(_triple(entry, f"input_top_logprobs[{i}]") for entry in top)
        entries.append(Entry(token=token_id, logprob=logprob, text=text, top=ranked))
    return Scored(tuple(entries), _count(meta, "prompt_tokens"), _count(meta, "cached_tokens"))


def _output_logprobs(meta: dict[str, object], ids: list[object]) -> tuple[float | None, ...] | None:
    given = meta.get("output_token_logprobs")
    if not isinstance(given, list) or not given:
        return None
    entries = [_triple(entry, f"output_token_logprobs[{i}]") for i, entry in enumerate(given)]
    named = [token for _, token, _ in entries]
    if named[: len(ids)] != ids[: len(named)]:
        raise Malformed("output_token_logprobs names other tokens than output_ids")
    return tuple(logprob for logprob, _, _ in entries)


def tokens(reply: dict[str, object]) -> tuple[int, ...]:
    """The ids of /tokenize's answer to one text. Raises Malformed."""
    ids = reply.get("tokens")
    if not isinstance(ids, list):
        raise Malformed("tokens is missing or not a list")
    return tuple(_integer(value, f"tokens[{i}]") for i, value in enumerate(ids))


def _meta(reply: dict[str, object]) -> dict[str, object]:
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise Malformed("meta_info is missing or not an object")
    return meta


def _finish(meta: dict[str, object]) -> tuple[str, int | str | None]:
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or not isinstance(reason.get("type"), str):
        raise Malformed("meta_info.finish_reason has no type")
    matched = reason.get("matched")
    if not (
        matched is None or isinstance(matched, str) or (isinstance(matched, int) and not isinstance(matched, bool))
    ):
        raise Malformed("meta_info.finish_reason.matched is neither a token id nor a text")
    return str(reason["type"]), matched


def _integer(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Malformed(f"{field} is not an integer")
    return value


def _count(meta: dict[str, object], key: str) -> int | None:
    value = meta.get(key)
    if value is None:
        return None
    count = _integer(value, f"meta_info.{key}")
    if count < 0:
        raise Malformed(f"meta_info.{key} is {count}")
    return count


def _number(value: object) -> float | None:
    """A finite float; JSON's null and Python's NaN and Infinity are what a JSON library makes of a non-finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _triple(value: object, field: str) -> tuple[float | None, int, str]:
    if not isinstance(value, list) or len(value) < 2:
        raise Malformed(f"{field} is not [logprob, token id, text]")
    if isinstance(value[0], bool | str | list | dict):
        raise Malformed(f"{field}: the logprob is not a number")
    text = value[2] if len(value) > 2 and isinstance(value[2], str) else ""
    # JSON can carry lone surrogates, which no UTF-8 output can.
    text = text.encode(errors="replace").decode()
    return _number(value[0]), _integer(value[1], f"{field}: the token id"), text
