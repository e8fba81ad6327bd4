"""10-ddtree-arguments: requests that a tree cannot serve exactly get a 400 that names what they asked."""

from __future__ import annotations

from typing import Any

import pytest

from . import inside_ddtree_arguments, inside_requests
from .marks import every_base
from .trees import Tree

pytestmark = every_base

SAMPLING: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": -0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_new_tokens": {"min_new_tokens": 2},
    "json_schema": {"json_schema": "{}"},
    "regex": {"regex": "a+"},
    "ebnf": {"ebnf": "root ::= 'a'"},
    "structural_tag": {"structural_tag": "{}"},
    "custom_params ddtree_budget other than 0": {"custom_params": {"ddtree_budget": 4}},
}
MORE: dict[str, dict[str, Any]] = {
    "custom_logit_processor": {"custom_logit_processor": "processor"},
    "return_hidden_states": {"return_hidden_states": True},
    "return_sampling_mask": {"return_sampling_mask": True},
    "input embeddings": {"input_embeds": [[0.0]]},
}
SERVED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.5, "min_p": 0.1, "sampling_seed": 3},
    {"top_p": 0.5, "stop_token_ids": [3], "logit_bias": {"3": 1.0}},
    {"custom_params": {"ddtree_budget": 0}},
    {"custom_params": {"of_another": 1}},
]


def wanted(*names: str) -> str:
    return f"DDTREE speculative decoding does not support {', '.join(names)} yet."


@pytest.mark.parametrize("name", SAMPLING)
def test_parameters_that_no_node_is_given_are_named(name: str, patched: Tree) -> None:
    assert patched(inside_ddtree_arguments.refused_request, SAMPLING[name], {}) == wanted(name)


@pytest.mark.parametrize("name", MORE)
def test_other_wishes_are_named(name: str, patched: Tree) -> None:
    assert patched(inside_ddtree_arguments.refused_request, {}, MORE[name]) == wanted(name)


def test_all_that_is_asked_is_named_at_once(patched: Tree) -> None:
    both = {**SAMPLING["min_new_tokens"], **SAMPLING["regex"]}
    assert patched(inside_ddtree_arguments.refused_request, both, {}) == wanted("min_new_tokens", "regex")


@pytest.mark.parametrize("more", [{}, {"return_logprob": True}])
@pytest.mark.parametrize("sampling", SERVED)
def test_greedy_and_sampled_requests_are_served_logprobs_too(
    sampling: dict[str, Any], more: dict[str, Any], patched: Tree
) -> None:
    assert patched(inside_ddtree_arguments.refused_request, sampling, more) is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_prompt_scoring_is_queued(tokens: int, patched: Tree) -> None:
    asked = {"max_new_tokens": tokens, "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    assert patched(inside_requests.queued, "DDTREE", asked)["aborted"] is None
