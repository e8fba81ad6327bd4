"""The exactness gate's requests against SGLang 0.5.17's own request schema, as released and as patched here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddtree_ops.exactness import GatePlan, golden, run_gate
from ddtree_ops.exactness.plan import METHODS
from tests.unit.exactness.conftest import PROMPTS
from tests.unit.exactness.toy import VOCAB, Toy

from . import inside_gate_requests
from .marks import every_base
from .trees import Tree


@pytest.fixture(scope="module")
def asked() -> Iterator[list[dict[str, Any]]]:
    """Every body that the gate posts to /generate by all its methods, the default and --record among them."""
    toy, plain = Toy(), Toy()
    toy.info["page_size"] = 16
    plain.info["speculative_algorithm"] = None

    def run(recording: golden.Recording | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "url": toy.url, "algorithm": "ddtree", "dtype": "float32", "policy": "exact", "epsilon_roundings": 0,
            "concurrency": (1, 8), "max_new_tokens": 12, "prompts": PROMPTS, "time_limit_s": 60,
        }  # fmt: skip
        run_gate(GatePlan(**(fields | changes)), recording=recording)

    run(golden.Recording())
    for method in METHODS:
        given = {"baseline": plain.url} if method == "same-seed" else {}
        if method != "golden":
            run(methods=(method,), **given)
    # the server tells its tokenizer is off: texts become ids on this side
    toy.info["skip_tokenizer_init"] = True
    run()
    for server in (toy, plain):
        server.close()
    posted = [
        {key: value for key, value in request.items() if key not in ("kind", "headers")}
        for request in (*toy.requests, *plain.requests)
        if request["kind"] in ("generate", "score", "namespaces")
    ]
    yield posted


def test_the_gate_asks_in_every_way_that_it_has(asked: list[dict[str, Any]]) -> None:
    """So that the check below looks at what matters: scores, replays, stops, seeds, filters, penalties, streams."""
    sampling = [body["sampling_params"] for body in asked]
    assert {params["max_new_tokens"] for params in sampling} >= {0, 1, 12}
    assert {"top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"} <= {
        key for params in sampling for key in params
    }
    assert any("stop_token_ids" in params for params in sampling)
    assert any(body.get("stream") for body in asked) and any("text" in body for body in asked)
    assert any("logprob_start_len" in body and body["top_logprobs_num"] for body in asked)


@every_base
def test_sglang_takes_every_request(asked: list[dict[str, Any]], stock: Tree, patched: Tree) -> None:
    distinct = list({repr(sorted({**body, "extra_key": ""}.items())): body for body in asked}.values())
    for tree in (stock, patched):
        said = tree(inside_gate_requests.refused, distinct, VOCAB)
        assert [(word, body) for word, body in zip(said, distinct, strict=True) if word] == []


@every_base
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"logprob_start": 3}, "unknown keys"),
        ({"logprob_start_len": "three"}, "logprob_start_len"),
        ({"sampling_params": {"max_new_token": 1}}, "max_new_token"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"top_p": 1.5}}, "top_p"),
    ],
)
def test_the_check_finds_what_sglang_would_not_take(stock: Tree, change: dict[str, Any], word: str) -> None:
    assert word in stock(inside_gate_requests.refused, [{"input_ids": [1, 2]} | change], VOCAB)[0]
