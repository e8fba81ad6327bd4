"""02-dflash-prompt-scoring, 04-token-id-range, 05-logprob-bounds: which requests are served, and why others are not."""

from __future__ import annotations

from typing import Any

import pytest

from . import inside_requests
from .inside_requests import VOCABULARY
from .marks import every_base
from .trees import Tree

GOOD = [300, 0, VOCABULARY - 1]


def plain(**more: Any) -> dict[str, Any]:
    return {"input_ids": GOOD, "sampling_params": {"max_new_tokens": 4}, **more}


@every_base
@pytest.mark.parametrize("token", [VOCABULARY, 999_999, -1])
def test_an_id_without_an_embedding_is_named(token: int, patched: Tree, stock: Tree) -> None:
    ids = [300, 301, token]
    wanted = f"input_ids[2] is {token}, outside the vocabulary; valid range is [0, {VOCABULARY})."
    assert patched(inside_requests.refused, plain(), ids) == wanted
    # on a GPU it is then looked up, which ends the server
    assert stock(inside_requests.refused, plain(), ids) is None


@every_base
def test_good_ids_and_those_that_are_not_looked_up_are_served(patched: Tree) -> None:
    assert patched(inside_requests.refused, plain(), GOOD) is None
    beyond = [VOCABULARY + 7]
    embedded = {"input_embeds": [[0.0, 0.0]], "sampling_params": {"max_new_tokens": 4}}
    assert patched(inside_requests.refused, embedded, beyond) is None
    assert patched(inside_requests.refused, plain(lora_path="adapter"), beyond) is None
    assert patched(inside_requests.refused, plain(image_data=["picture"]), beyond) is None
    assert patched(inside_requests.refused, plain(), None) is None


@every_base
@pytest.mark.parametrize("token", [VOCABULARY, -7])
def test_a_stop_id_beyond_the_vocabulary_is_named(token: int, patched: Tree, stock: Tree) -> None:
    asked = {"max_new_tokens": 4, "stop_token_ids": [3, token]}
    wanted = f"stop_token_ids must be in [0, {VOCABULARY - 1}], got {token}."
    assert patched(inside_requests.refused_sampling, asked) == wanted
    assert stock(inside_requests.refused_sampling, asked) is None
    assert patched(inside_requests.refused_sampling, {**asked, "stop_token_ids": [0, VOCABULARY - 1]}) is None


@every_base
def test_logprob_numbers_that_end_the_scheduler_are_named(patched: Tree, stock: Tree) -> None:
    below = plain(return_logprob=True, logprob_start_len=-5)
    assert patched(inside_requests.refused, below, GOOD) == "logprob_start_len must be at least -1, got -5."
    assert stock(inside_requests.refused, below, GOOD) is None
    for asks in (True, False):
        ranks = plain(return_logprob=asks, top_logprobs_num=VOCABULARY + 1)
        wanted = f"top_logprobs_num must be at most the vocabulary size ({VOCABULARY}), got {VOCABULARY + 1}."
        assert patched(inside_requests.refused, ranks, GOOD) == wanted
        assert stock(inside_requests.refused, ranks, GOOD) is None


@every_base
def test_logprob_numbers_within_their_bounds_are_served(patched: Tree) -> None:
    for start in (-1, 0, 3):
        asked = plain(return_logprob=True, logprob_start_len=start, top_logprobs_num=VOCABULARY)
        assert patched(inside_requests.refused, asked, GOOD) is None
    # nobody reads it then
    assert patched(inside_requests.refused, plain(logprob_start_len=-5), GOOD) is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_prompt_scoring_is_queued_under_dflash_as_under_ar(tokens: int, patched: Tree, stock: Tree) -> None:
    asked = {"max_new_tokens": tokens, "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    wanted = {"aborted": None, "return_logprob": True, "logprob_start_len": 1, "max_new_tokens": tokens}
    assert patched(inside_requests.queued, "NONE", asked) == wanted
    assert patched(inside_requests.queued, "DFLASH", asked) == wanted
    refusal = stock(inside_requests.queued, "DFLASH", asked)["aborted"]
    assert refusal == "DFLASH speculative decoding does not support return_logprob yet."


def test_the_algorithm_that_still_has_no_logprobs_refuses_by_its_own_name(patched: Tree, stock: Tree) -> None:
    asked = {"max_new_tokens": 4, "return_logprob": True}
    refusal = patched(inside_requests.queued, "DSPARK", asked)["aborted"]
    assert refusal == "DSPARK speculative decoding does not support return_logprob yet."
    assert stock(inside_requests.queued, "DSPARK", asked)["aborted"].startswith("DFLASH")
    assert patched(inside_requests.queued, "DSPARK", {"max_new_tokens": 4})["aborted"] is None


@every_base
@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"])
def test_what_dflash_would_apply_wrongly_is_refused_by_name(name: str, patched: Tree, stock: Tree) -> None:
    asked = {"max_new_tokens": 4, "sampling": {name: 2}}
    assert patched(inside_requests.queued, "DFLASH", asked)["aborted"].endswith(f"does not support {name}.")
    assert stock(inside_requests.queued, "DFLASH", asked)["aborted"] is None
    assert patched(inside_requests.queued, "NONE", asked)["aborted"] is None


@every_base
def test_what_dflash_does_not_serve_is_still_refused(patched: Tree) -> None:
    asked = {"max_new_tokens": 4, "return_hidden_states": True}
    refusal = patched(inside_requests.queued, "DFLASH", asked)["aborted"]
    assert refusal == "DFLASH speculative decoding does not support return_hidden_states yet."
