"""What /generate accepts, checked by hand field by field: an error names the field and what is allowed.

Fields are SGLang's GenerateReqInput and SamplingParams. What this engine does not compute is refused, never ignored;
SGLang's neutral values of it are accepted, so that a client written for SGLang needs no special case.
"""

from __future__ import annotations

import json
import random
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from .request import GREEDY, LogprobOptions, Sampling

MAX_BATCH = 1024
MAX_TOP_LOGPROBS = 64
DEFAULT_MAX_NEW_TOKENS = 128
_MAX_INT = (1 << 31) - 1

_FIELDS = frozenset({"text", "input_ids", "sampling_params", "rid", "extra_key", "stream"}) | frozenset(
    {"return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"}
)
#: What SGLang's own bench_serving sends with every request, and sglang-router 0.3.2 adds to every one.
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "lora_path": (None,),
    "return_routed_experts": (None, False),
    "model": (None,),
    "log_metrics": (True,),
    "return_hidden_states": (False,),
    "background": (False,),
    "no_logs": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
}
_SAMPLING_FIELDS = frozenset({"max_new_tokens", "stop_token_ids", "ignore_eos", "top_k", "sampling_seed"}) | frozenset(
    {"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (None, 0),
    "n": (None, 1),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "no_stop_trim": (None, False),
}


class RequestError(ValueError):
    """A request that is refused: HTTP status, the field at fault (None: the whole body) and why."""

    def __init__(self, field: str | None, why: str, status: int = 400) -> None:
        super().__init__(f"{field}: {why}" if field else why)
        self.field, self.status = field, status


@dataclass(frozen=True)
class Limits:
    """What the served model allows. max_slots bounds what one request may hold: slots(prompt, max_new_tokens)."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    max_slots: int
    slots: Callable[[int, int], int]
    tokenize: Callable[[str], list[int]] | None


@dataclass(frozen=True)
class Item:
    """One prompt of a /generate call, ready to run."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    logprobs: LogprobOptions | None
    sampling: Sampling = GREEDY
    namespace: str = ""


@dataclass(frozen=True)
class Call:
    """A whole /generate call; `single` says that the reply is an object and no list."""

    items: list[Item]
    single: bool
    stream: bool
    text_in_logprobs: bool


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises RequestError: not JSON, NaN or Infinity, too deep, no object."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError(None, "the body is nested too deeply") from None
    except ValueError as error:
        # Numbers of thousands of digits and bytes that are no UTF-8 are ValueErrors too.
        raise RequestError(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(None, f"the body must be a JSON object, got {_kind(value)}")
    return value


def parse_generate(body: dict[str, Any], limits: Limits) -> Call:
    """A checked call. Raises RequestError for the first thing that is wrong."""
    _known(body, _FIELDS, _NEUTRAL_FIELDS, "")
    prompts, single, source = _prompts(body, limits)
    count = len(prompts)
    stream = _boolean(body.get("stream", False), "stream")
    with_text = _boolean(body.get("return_text_in_logprobs", False), "return_text_in_logprobs")
    if with_text and limits.tokenize is None:
        raise RequestError("return_text_in_logprobs", "needs a tokenizer, and the server runs without one")
    keys = _spread(body, "extra_key", None, count, single)
    for i, key in enumerate(keys):
        if key is not None and not isinstance(key, str):
            raise RequestError(_at("extra_key", i, single), f"must be a string, got {_kind(key)}")
    rids = _rids(body, count, single)
    sampling = _spread(body, "sampling_params", {}, count, single)
    want = _spread(body, "return_logprob", False, count, single)
    start = _spread(body, "logprob_start_len", -1, count, single)
    top = _spread(body, "top_logprobs_num", 0, count, single)
    items = []
    for i, prompt in enumerate(prompts):
        options = _logprob_options(want[i], start[i], top[i], len(prompt), limits, None if single else i)
        listed = isinstance(body.get("sampling_params"), list) and not single
        name = f"sampling_params[{i}]" if listed else "sampling_params"
        params = _parameters(sampling[i], name)
        limit, stops = _ends(params, name, limits)
        limit = _room(prompt, limit, _at(source, i, single), limits)
        items.append(Item(rids[i], prompt, limit, stops, options, _sampling(params, name), keys[i] or ""))
    return Call(items, single, stream, with_text)


def _room(prompt: list[int], limit: int, source: str, limits: Limits) -> int:
    """max_new_tokens as far as the context reaches. Raises RequestError when the prompt leaves no room at all."""
    if not prompt:
        raise RequestError(source, "the prompt is empty")
    room = limits.context_length - len(prompt)
    if room < 0 or (limit and not room):
        raise RequestError(
            source, f"the prompt has {len(prompt)} tokens, the context holds {limits.context_length} with the output"
        )
    limit = min(limit, room)
    if (needed := limits.slots(len(prompt), limit)) > limits.max_slots:
        raise RequestError(
            source, f"{needed} KV slots needed for {len(prompt)} + {limit} tokens, the server has {limits.max_slots}"
        )
    return limit


def _prompts(body: dict[str, Any], limits: Limits) -> tuple[list[list[int]], bool, str]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("input_ids", "exactly one of text and input_ids must be given")
    if text is not None:
        if limits.tokenize is None:
            raise RequestError("text", "the server runs without a tokenizer; send input_ids")
        single = isinstance(text, str)
        texts = [text] if single else _batch(text, "text")
        return [_tokens_of(t, _at("text", i, single), limits) for i, t in enumerate(texts)], single, "text"
    if not isinstance(ids, list):
        raise RequestError("input_ids", f"must be a list of token ids or a list of such lists, got {_kind(ids)}")
    single = not any(isinstance(item, list) for item in ids)
    lists = [ids] if single else _batch(ids, "input_ids")
    for i, item in enumerate(lists):
        if not isinstance(item, list):
            raise RequestError(f"input_ids[{i}]", f"must be a list of token ids, got {_kind(item)}")
        _token_ids(item, _at("input_ids", i, single), limits)
    return lists, single, "input_ids"


def _batch(value: object, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(field, f"must be a string or a list, got {_kind(value)}")
    if not 1 <= len(value) <= MAX_BATCH:
        raise RequestError(field, f"a batch holds 1 to {MAX_BATCH} prompts, got {len(value)}")
    return value


def _tokens_of(text: object, field: str, limits: Limits) -> list[int]:
    if not isinstance(text, str):
        raise RequestError(field, f"must be a string, got {_kind(text)}")
    assert limits.tokenize is not None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(field, "holds a lone surrogate, which is no text") from None
    return limits.tokenize(text)


def _token_ids(value: list[Any], field: str, limits: Limits) -> None:
    for place, token in enumerate(value):
        if type(token) is not int:
            raise RequestError(f"{field}[{place}]", f"must be a token id, got {_kind(token)}")
        if not 0 <= token < limits.vocab_size:
            raise RequestError(f"{field}[{place}]", f"must be within 0..{limits.vocab_size - 1}, got {_short(token)}")


def _parameters(value: object, name: str) -> dict[str, Any]:
    params: object = {} if value is None else value
    if not isinstance(params, dict):
        raise RequestError(name, f"must be an object, got {_kind(value)}")
    _known(params, _SAMPLING_FIELDS, _NEUTRAL, f"{name}.")
    return params


def _ends(params: dict[str, Any], name: str, limits: Limits) -> tuple[int, frozenset[int]]:
    """(max_new_tokens, tokens that stop)."""
    limit = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    # SGLang reads null as "to the end of the context".
    limit = limits.context_length if limit is None else _integer(limit, f"{name}.max_new_tokens", 0, _MAX_INT)
    stops = params.get("stop_token_ids") or []
    if not isinstance(stops, list):
        raise RequestError(f"{name}.stop_token_ids", f"must be a list of token ids, got {_kind(stops)}")
    _token_ids(stops, f"{name}.stop_token_ids", limits)
    ignore_eos = _boolean(params.get("ignore_eos", False), f"{name}.ignore_eos")
    return limit, frozenset(stops) | (frozenset() if ignore_eos else frozenset(limits.eos_token_ids))


def _sampling(params: dict[str, Any], name: str) -> Sampling:
    """Bounds are SGLang 0.5.17's, but for repetition_penalty, which near 0 would overflow the logits.

    Unlike its 1.0 the default temperature is 0: this engine is greedy unless asked. Without a seed one is drawn.
    """

    def number(field: str, default: float, low: float, high: float, open_below: bool = False) -> float:
        value = params.get(field)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise RequestError(f"{name}.{field}", f"must be a number, got {_kind(value)}")
        if not low <= value <= high or (open_below and value == low):
            allowed = f"{'above' if open_below else 'at least'} {low:g} and at most {high:g}"
            raise RequestError(f"{name}.{field}", f"must be {allowed}, got {_short(value)}")
        return float(value)

    top_k, seed = params.get("top_k"), params.get("sampling_seed")
    top_k = -1 if top_k is None else _integer(top_k, f"{name}.top_k", -1, _MAX_INT)
    if top_k == 0:
        raise RequestError(f"{name}.top_k", "must be -1 (all) or at least 1, got 0")
    if seed is None:
        seed = random.SystemRandom().getrandbits(63)
    return Sampling(
        temperature=number("temperature", 0.0, 0.0, sys.float_info.max),
        top_k=top_k,
        top_p=number("top_p", 1.0, 0.0, 1.0, open_below=True),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=number("repetition_penalty", 1.0, 0.001, 2.0),
        seed=_integer(seed, f"{name}.sampling_seed", -(1 << 63), (1 << 63) - 1),
    )


def _logprob_options(
    want: object, start: object, top: object, prompt: int, limits: Limits, index: int | None
) -> LogprobOptions | None:
    def at(field: str) -> str:
        return _at(field, index or 0, index is None)

    wanted = _boolean(False if want is None else want, at("return_logprob"))
    highest = min(MAX_TOP_LOGPROBS, limits.vocab_size)
    alternatives = _integer(0 if top is None else top, at("top_logprobs_num"), 0, highest)
    # -1 is SGLang's "output only": the list then holds the last prompt token alone.
    first = _integer(-1 if start is None else start, at("logprob_start_len"), -1, _MAX_INT)
    if not wanted or not prompt:
        return None
    if first >= prompt:
        raise RequestError(at("logprob_start_len"), f"{first} is not below the prompt's length, {prompt}")
    return LogprobOptions(prompt - 1 if first < 0 else first, alternatives)


def _rids(body: dict[str, Any], count: int, single: bool) -> list[str]:
    value = body.get("rid")
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(value, str) and not single:
        value = [f"{value}_{i}" for i in range(count)]
    rids = [value] if single else value
    if not isinstance(rids, list) or len(rids) != count:
        raise RequestError("rid", f"must be a string, or a list of {count} for this batch")
    for i, rid in enumerate(rids):
        if not isinstance(rid, str) or not 1 <= len(rid) <= 256 or not rid.isprintable():
            raise RequestError(_at("rid", i, single), "must be a string of 1 to 256 printable characters")
        if rid in rids[:i]:
            raise RequestError(f"rid[{i}]", "repeats an earlier one of the batch")
    return rids


def _spread(body: dict[str, Any], field: str, default: object, count: int, single: bool) -> list[Any]:
    """One value a prompt: a list of a batch's length as it is, anything else for all of them."""
    value = body.get(field, default)
    if not isinstance(value, list) or single:
        return [value] * count
    if len(value) != count:
        raise RequestError(field, f"has {len(value)} entries for {count} prompts")
    return value


def _known(given: dict[str, Any], fields: frozenset[str], neutral: dict[str, tuple[Any, ...]], prefix: str) -> None:
    for name, value in given.items():
        if name in fields:
            continue
        field = prefix + (name if len(name) <= 64 and name.isprintable() else ascii(name[:64]))
        if name not in neutral:
            raise RequestError(field, f"is not a field that this engine knows; it knows {', '.join(sorted(fields))}")
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral[name]):
            raise RequestError(field, f"is not supported; the only value accepted is {neutral[name][-1]!r}")


def _integer(value: object, field: str, low: int, high: int) -> int:
    if type(value) is not int:
        raise RequestError(field, f"must be an integer, got {_kind(value)}")
    if not low <= value <= high:
        raise RequestError(field, f"must be within {low}..{high}, got {_short(value)}")
    return value


def _boolean(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(field, f"must be true or false, got {_kind(value)}")
    return value


def _at(field: str, index: int, single: bool) -> str:
    return field if single else f"{field}[{index}]"


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _short(value: object) -> str:
    text = "a very large number" if isinstance(value, int) and abs(value) > 1 << 64 else ascii(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
