"""What /generate refuses, field by field, and what it accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddtree_ops.engine.request import Sampling
from ddtree_ops.engine.schema import Call, Limits, RequestError, parse_body, parse_generate

LIMITS = Limits(
    16, 96, (0,), 105, lambda prompt, new: prompt + (new + 9 if new > 1 else 0), lambda t: [5] * len(t.split())
)
NO_TOKENIZER = Limits(16, 96, (0,), 105, LIMITS.slots, None)
IDS: dict[str, Any] = {"input_ids": [3, 4]}


def generate(limits: Limits = LIMITS, **body: Any) -> Call:
    return parse_generate(body, limits)


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({}, "input_ids"),
    ({"text": "a", "input_ids": [1]}, "input_ids"),
    ({"text": None, "input_ids": None}, "input_ids"),
    ({"text": 5}, "text"),
    ({"text": {}}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", 5]}, "text[1]"),
    ({"text": "\ud800"}, "text"),
    ({"text": "a " * 200}, "text"),
    ({"input_ids": "3 4"}, "input_ids"),
    ({"input_ids": 3}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids[0]"),
    ({"input_ids": [[3], 4]}, "input_ids[1]"),
    ({"input_ids": [[3], []]}, "input_ids[1]"),
    ({"input_ids": [[3]] * 1025}, "input_ids"),
    ({"input_ids": [16]}, "input_ids[0]"),
    ({"input_ids": [3, -1]}, "input_ids[1]"),
    ({"input_ids": [3, 10**30]}, "input_ids[1]"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({"input_ids": [3.0]}, "input_ids[0]"),
    ({"input_ids": ["3"]}, "input_ids[0]"),
    ({"input_ids": [None]}, "input_ids[0]"),
    ({"input_ids": [{}]}, "input_ids[0]"),
    ({"input_ids": [[3, [4]]]}, "input_ids[0][1]"),
    ({"input_ids": [[3], [4, 16]]}, "input_ids[1][1]"),
    ({"input_ids": [3] * 97}, "input_ids"),
    ({"input_ids": [3] * 96}, "input_ids"),
    ({**IDS, "sampling_params": []}, "sampling_params"),
    ({**IDS, "sampling_params": "greedy"}, "sampling_params"),
    ({**IDS, "sampling_params": {"temperature": 1e999}}, "sampling_params.temperature"),
    ({**IDS, "sampling_params": {"temperature": 10**400}}, "sampling_params.temperature"),
    ({**IDS, "sampling_params": {"temperature": [1]}}, "sampling_params.temperature"),
    ({**IDS, "sampling_params": {"temperature": -0.1}}, "sampling_params.temperature"),
    ({**IDS, "sampling_params": {"temperature": "0"}}, "sampling_params.temperature"),
    ({**IDS, "sampling_params": {"temperature": False}}, "sampling_params.temperature"),
    ({**IDS, "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({**IDS, "sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens"),
    ({**IDS, "sampling_params": {"max_new_tokens": "9"}}, "sampling_params.max_new_tokens"),
    ({**IDS, "sampling_params": {"max_new_tokens": True}}, "sampling_params.max_new_tokens"),
    ({**IDS, "sampling_params": {"max_new_tokens": 10**400}}, "sampling_params.max_new_tokens"),
    ({**IDS, "sampling_params": {"stop_token_ids": 4}}, "sampling_params.stop_token_ids"),
    ({**IDS, "sampling_params": {"stop_token_ids": [16]}}, "sampling_params.stop_token_ids[0]"),
    ({**IDS, "sampling_params": {"stop_token_ids": [3, "4"]}}, "sampling_params.stop_token_ids[1]"),
    ({**IDS, "sampling_params": {"ignore_eos": 1}}, "sampling_params.ignore_eos"),
    ({**IDS, "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    ({**IDS, "sampling_params": {"top_p": 1.01}}, "sampling_params.top_p"),
    ({**IDS, "sampling_params": {"top_p": "0.9"}}, "sampling_params.top_p"),
    ({**IDS, "sampling_params": {"top_k": True}}, "sampling_params.top_k"),
    ({**IDS, "sampling_params": {"top_k": 0}}, "sampling_params.top_k"),
    ({**IDS, "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
    ({**IDS, "sampling_params": {"top_k": 2.0}}, "sampling_params.top_k"),
    ({**IDS, "sampling_params": {"min_p": -0.1}}, "sampling_params.min_p"),
    ({**IDS, "sampling_params": {"min_p": 1.1}}, "sampling_params.min_p"),
    ({**IDS, "sampling_params": {"frequency_penalty": 2.5}}, "sampling_params.frequency_penalty"),
    ({**IDS, "sampling_params": {"presence_penalty": -2.5}}, "sampling_params.presence_penalty"),
    ({**IDS, "sampling_params": {"repetition_penalty": 0}}, "sampling_params.repetition_penalty"),
    ({**IDS, "sampling_params": {"repetition_penalty": 1e-9}}, "sampling_params.repetition_penalty"),
    ({**IDS, "sampling_params": {"repetition_penalty": 2.1}}, "sampling_params.repetition_penalty"),
    ({**IDS, "sampling_params": {"sampling_seed": 1 << 63}}, "sampling_params.sampling_seed"),
    ({**IDS, "sampling_params": {"sampling_seed": 1.5}}, "sampling_params.sampling_seed"),
    ({**IDS, "sampling_params": {"seed": 1}}, "sampling_params.seed"),
    ({**IDS, "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({**IDS, "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
    ({**IDS, "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
    ({**IDS, "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
    ({**IDS, "sampling_params": [{}]}, "sampling_params"),
    ({"input_ids": [[3], [4]], "sampling_params": [{}]}, "sampling_params"),
    ({"input_ids": [[3], [4]], "sampling_params": [{}, {"n": 3}]}, "sampling_params[1].n"),
    ({**IDS, "return_logprob": 1}, "return_logprob"),
    ({**IDS, "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({**IDS, "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({**IDS, "return_logprob": True, "logprob_start_len": "0"}, "logprob_start_len"),
    ({**IDS, "logprob_start_len": 0.0}, "logprob_start_len"),
    ({"input_ids": [[3], [4]], "return_logprob": True, "logprob_start_len": [0, 1]}, "logprob_start_len[1]"),
    ({**IDS, "return_logprob": True, "top_logprobs_num": 17}, "top_logprobs_num"),
    ({**IDS, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({**IDS, "return_text_in_logprobs": "yes"}, "return_text_in_logprobs"),
    ({**IDS, "stream": "true"}, "stream"),
    ({**IDS, "rid": 5}, "rid"),
    ({**IDS, "rid": ""}, "rid"),
    ({**IDS, "rid": "a\nb"}, "rid"),
    ({**IDS, "rid": "x" * 257}, "rid"),
    ({**IDS, "rid": ["a"]}, "rid"),
    ({"input_ids": [[3], [4]], "rid": ["a"]}, "rid"),
    ({"input_ids": [[3], [4]], "rid": ["a", "a"]}, "rid[1]"),
    ({**IDS, "extra_key": 5}, "extra_key"),
    ({**IDS, "image_data": "x"}, "image_data"),
    ({**IDS, "\u202e" * 3: 1}, "'\\u202e\\u202e\\u202e'"),
]


@pytest.mark.parametrize("body, field", MALFORMED, ids=[f"{i}-{field}" for i, (_, field) in enumerate(MALFORMED)])
def test_a_malformed_request_is_refused_by_the_name_of_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        generate(**body)
    assert refused.value.field == field
    assert refused.value.status == 400
    assert str(refused.value).startswith(field) and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "body, why",
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 200_000 + b"]" * 200_000, "deep"),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "deep"),
        (b"[1, 2]", "must be a JSON object, got a list"),
        (b"null", "got null"),
        (b'"x"', "got a string"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        parse_body(body)


def test_without_a_tokenizer_text_is_refused() -> None:
    for body, field in (({"text": "a"}, "text"), ({**IDS, "return_text_in_logprobs": True}, "return_text_in_logprobs")):
        with pytest.raises(RequestError) as refused:
            generate(NO_TOKENIZER, **body)
        assert refused.value.field == field


def test_defaults_are_sglangs() -> None:
    call = generate(**IDS, sampling_params={"max_new_tokens": None, "ignore_eos": True}, extra_key="k", rid="r")
    (item,) = call.items
    assert (call.single, call.stream, item.rid, item.logprobs) == (True, False, "r", None)
    assert item.stop_token_ids == frozenset()
    assert generate(Limits(16, 999, (0,), 999, LIMITS.slots, None), **IDS).items[0].max_new_tokens == 128


def test_the_output_is_as_long_as_the_context_leaves_room() -> None:
    roomy = Limits(16, 20, (0,), 999, LIMITS.slots, None)
    assert generate(roomy, **IDS, sampling_params={"max_new_tokens": 999}).items[0].max_new_tokens == 18
    whole = generate(roomy, input_ids=[3] * 20, sampling_params={"max_new_tokens": 0})
    assert whole.items[0].max_new_tokens == 0
    with pytest.raises(RequestError, match="20 tokens, the context holds 20"):
        generate(roomy, input_ids=[3] * 20, sampling_params={"max_new_tokens": 1})


def test_what_never_fits_the_kv_slots_is_refused() -> None:
    tight = Limits(16, 96, (0,), 40, LIMITS.slots, None)
    assert generate(tight, **IDS, sampling_params={"max_new_tokens": 29}).items[0].max_new_tokens == 29
    with pytest.raises(RequestError, match=r"41 KV slots needed for 2 \+ 30 tokens, the server has 40"):
        generate(tight, **IDS, sampling_params={"max_new_tokens": 30})


def test_neutral_values_of_what_is_not_computed_are_accepted() -> None:
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "n": 1, "stop": None, "repetition_penalty": 1}
    item = generate(**IDS, sampling_params={**neutral, "stop_token_ids": [7], "max_new_tokens": 3}).items[0]
    assert item.stop_token_ids == {0, 7}
    with_fields = generate(**IDS, lora_path=None, return_routed_experts=False)
    assert list(with_fields.items[0].prompt) == IDS["input_ids"]
    with pytest.raises(RequestError, match=r"^lora_path: is not supported"):
        generate(**IDS, lora_path="a")


def test_sampling_parameters_are_read_and_absent_ones_are_greedy_and_neutral() -> None:
    given = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "sampling_seed": -3}
    penalties = {"frequency_penalty": -2, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    (item,) = generate(**IDS, sampling_params={**given, **penalties}).items
    assert item.sampling == Sampling(0.7, 5, 0.9, 0.1, -2.0, 0.5, 1.3, -3)
    assert item.sampling.penalises and not item.sampling.greedy
    nulls = dict.fromkeys({**given, **penalties})
    for params in ({}, nulls, {"temperature": 1e-7, "top_k": -1}, {"temperature": 0.5, "top_k": 1}):
        (plain,) = generate(**IDS, sampling_params=params).items
        assert plain.sampling.greedy and not plain.sampling.penalises
    first, second = generate(input_ids=[[3], [3]], sampling_params={"temperature": 1}).items
    assert first.sampling.seed != second.sampling.seed


def test_a_batch_spreads_and_lists_its_options() -> None:
    call = generate(
        text=["a b", "c"],
        rid="r",
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "ignore_eos": True}],
        return_logprob=[True, False],
        logprob_start_len=[1, -1],
        top_logprobs_num=2,
        stream=True,
    )
    first, second = call.items
    assert not call.single and call.stream
    assert (first.rid, second.rid) == ("r_0", "r_1")
    assert (first.prompt, second.prompt) == ([5, 5], [5])
    assert (first.max_new_tokens, second.max_new_tokens) == (1, 2)
    assert first.logprobs is not None and (first.logprobs.start, first.logprobs.top) == (1, 2)
    assert second.logprobs is None and second.stop_token_ids == frozenset()
    assert generate(**IDS, return_logprob=True).items[0].logprobs == type(first.logprobs)(1, 0)


def test_an_error_shows_little_of_a_hostile_value() -> None:
    with pytest.raises(RequestError) as refused:
        generate(**IDS, sampling_params={"temperature": "\x1b[31m" + "x" * 9999})
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 200
    assert json.dumps(str(refused.value))
