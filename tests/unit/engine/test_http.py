"""The real process: uvicorn on loopback, real requests, real signals."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import prompts
from .pairs import Plain
from .process import Engine, tree, until
from .test_schema import MALFORMED


@pytest.fixture(scope="module")
def engine(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One DDTREE engine for the tests that leave it as it was."""
    running = Engine(tmp_path_factory.mktemp("http") / "log", *tree(pair), "--max-running-requests", "4")
    try:
        yield running.wait_ready()
        assert running.process.poll() is None and running.client.get("/health").status_code == 200
        assert "Traceback" not in running.log.read_text()
    finally:
        running.close()


@pytest.fixture
def start(pair: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines of its own for a test."""
    started: list[Engine] = []

    def begin(*arguments: str) -> Engine:
        started.append(Engine(tmp_path / f"log{len(started)}", *(arguments or tree(pair))))
        return started[-1]

    yield begin
    for running in started:
        running.close()


LONG = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 90, "ignore_eos": True}}


def test_a_reply_has_sglangs_shape(engine: Engine, plain: Plain) -> None:
    reply = engine.generate(
        input_ids=[4, 9, 2],
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
        rid="mine",
        extra_key="fresh",
    )
    meta = reply["meta_info"]
    assert reply["output_ids"] == plain.greedy([4, 9, 2], 12)
    assert reply["text"].split() == [f"t{t}" for t in reply["output_ids"] if t > 1]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 3, 12, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["spec_accept_length"] == 12 / meta["spec_verify_ct"]
    accepted = meta["spec_correct_drafts_histogram"]
    assert sum(accepted) == meta["spec_verify_ct"]
    assert sum((drafts + 1) * steps for drafts, steps in enumerate(accepted)) >= 11
    assert meta["e2e_latency"] > 0
    assert meta["input_token_logprobs"][0] == [None, 4, "t4"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [4, 9, 2]
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"][1]) == 2
    for (logprob, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0][:2] == [logprob, token]


def test_text_is_tokenized_and_a_batch_answers_in_order(engine: Engine, plain: Plain) -> None:
    replies = engine.generate(
        text=["t4 t9", "t7"], sampling_params=[{"max_new_tokens": 3, "ignore_eos": True}, {"max_new_tokens": 0}]
    )
    assert replies[0]["output_ids"] == plain.greedy([4, 9], 3)
    assert replies[1]["output_ids"] == [] and replies[1]["text"] == ""
    assert "spec_accept_length" not in replies[1]["meta_info"]


def test_a_self_score_of_what_was_generated_finds_no_gap(engine: Engine) -> None:
    prompt = [4, 9, 2, 6]
    output = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 60, "ignore_eos": True})["output_ids"]
    scored = engine.generate(
        input_ids=prompt + output,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=3,
        top_logprobs_num=1,
    )["meta_info"]
    emitted, best = scored["input_token_logprobs"][1:], scored["input_top_logprobs"][1:]
    assert [token for _, token, _ in emitted] == output
    assert all(top[0][:2] == found[:2] for found, top in zip(emitted, best, strict=True))


def test_a_seed_fixes_a_sampled_reply_and_logprobs_are_the_tempered_ones(engine: Engine) -> None:
    params = {"temperature": 1.5, "top_k": 8, "sampling_seed": 3, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": [4, 9, 2], "return_logprob": True, "top_logprobs_num": 16}
    first, again = (engine.generate(**body, sampling_params=params) for _ in range(2))
    other = engine.generate(**body, sampling_params={**params, "sampling_seed": 4})
    free = [engine.generate(**body, sampling_params={**params, "sampling_seed": None})["output_ids"] for _ in range(2)]
    assert first["output_ids"] == again["output_ids"] != other["output_ids"] and free[0] != free[1]
    cool = engine.generate(**body, sampling_params={**params, "max_new_tokens": 1, "temperature": 0})
    hot = first["meta_info"]["output_top_logprobs"][0]
    scores = {token: logprob for logprob, token, _ in cool["meta_info"]["output_top_logprobs"][0]}
    shift = hot[0][0] - scores[hot[0][1]] / 1.5
    assert all(abs(logprob - scores[token] / 1.5 - shift) < 1e-4 for logprob, token, _ in hot)
    # A prefix asked again goes on as the text did: draws hang on the position, not on how it was reached.
    text = [4, 9, 2, *first["output_ids"][:10]]
    assert engine.generate(input_ids=text, sampling_params=params)["output_ids"][:30] == first["output_ids"][10:]


def test_many_at_once_are_exact(engine: Engine, plain: Plain) -> None:
    batch = prompts(12, seed=17)

    def ask(prompt: list[int]) -> list[int]:
        output: list[int] = engine.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 20 + len(prompt), "ignore_eos": True}
        )["output_ids"]
        return output

    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(ask, batch))
    assert outputs == [plain.greedy(prompt, 20 + len(prompt)) for prompt in batch]


def test_a_stop_token_ends_the_output_and_is_not_part_of_the_text(engine: Engine, plain: Plain) -> None:
    whole = plain.greedy([4, 9], 9)
    reply = engine.generate(input_ids=[4, 9], sampling_params={"stop_token_ids": [whole[5]], "ignore_eos": True})
    expected = whole[: whole.index(whole[5]) + 1]
    assert reply["output_ids"] == expected
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[5]}
    assert reply["text"].split() == [f"t{t}" for t in expected[:-1] if t > 1]


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_grows_until_done(engine: Engine, plain: Plain) -> None:
    with engine.client.stream("POST", "/generate", json={**LONG, "stream": True}) as answer:
        chunks = events(answer)
    whole = plain.greedy([4, 5], 90)
    sizes = [len(chunk["output_ids"]) for chunk in chunks]
    assert sizes == sorted(set(sizes)) and len(sizes) == chunks[-1]["meta_info"]["spec_verify_ct"] + 1
    assert all(chunk["output_ids"] == whole[:size] for chunk, size in zip(chunks, sizes, strict=True))
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 90}
    # As SGLang's: a client that reads steps out of earlier chunks would work here and nowhere else.
    assert not any("spec_verify_ct" in chunk["meta_info"] for chunk in chunks[:-1])


def test_a_streamed_batch_names_the_index(engine: Engine, plain: Plain) -> None:
    body = {"input_ids": [[4], [7, 8]], "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}, "stream": True}
    with engine.client.stream("POST", "/generate", json=body) as answer:
        last = {chunk["index"]: chunk["output_ids"] for chunk in events(answer)}
    assert last == {0: plain.greedy([4], 9), 1: plain.greedy([7, 8], 9)}


def test_every_malformed_request_gets_a_400_and_the_engine_lives(engine: Engine) -> None:
    for body, field in MALFORMED:
        answer = engine.client.post("/generate", content=json.dumps(body).replace("Infinity", "1e999"))
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["field"] == field and error["code"] == 400 and field in error["message"]
    for raw in (b"", b"{", b"[" * 100_000, b'{"input_ids": [NaN]}', b"\xff", b'{"input_ids": [' + b"9" * 9999 + b"]}"):
        assert engine.client.post("/generate", content=raw).status_code == 400
    assert engine.client.post("/generate", content=b" " * (17 << 20)).status_code == 413
    assert engine.client.get("/generate").status_code == 405
    assert engine.client.get("/nothing").json()["error"]["code"] == 404
    for raw in (b"{}", b"[]", b'{"rid": 5}', b'{"rid": ""}', b'{"abort_all": "yes"}'):
        assert engine.client.post("/abort_request", content=raw).status_code == 400
    assert engine.generate(input_ids=[4], sampling_params={"max_new_tokens": 2})["output_ids"]
    assert engine.idle()


def test_bytes_that_are_no_http_do_no_harm(engine: Engine) -> None:
    host, port = engine.client.base_url.host, engine.client.base_url.port
    assert port is not None
    for garbage in (
        b"\x16\x03\x01\x02\x00",
        b"POST /generate HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
        b"GET " + b"x" * 99999,
    ):
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(garbage)
    assert engine.generate(input_ids=[4], sampling_params={"max_new_tokens": 2})["output_ids"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(engine: Engine, stream: bool) -> None:
    before = engine.client.get("/metrics").text
    host, port = engine.client.base_url.host, engine.client.base_url.port
    assert port is not None
    body = json.dumps({**LONG, "input_ids": [[4, 5]] * 200, "stream": stream}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(head + body)
        until(lambda: engine.state()["num_queue_reqs"] > 0)
    until(engine.idle)
    generated = re.compile(r"^sglang:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)
    spent = [
        float(found[1]) for text in (before, engine.client.get("/metrics").text) if (found := generated.search(text))
    ]
    assert spent[1] - spent[0] < 200 * 90 / 2


def test_a_request_can_be_aborted_by_its_rid(engine: Engine) -> None:
    body = {**LONG, "input_ids": [[4, 5]] * 200, "rid": "batch"}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(lambda: engine.generate(**body))
        until(lambda: engine.state()["num_queue_reqs"] > 100)
        assert engine.client.post("/flush_cache").status_code == 400
        answer = engine.client.post("/generate", json={**LONG, "rid": "batch_199"})
        assert answer.status_code == 400 and answer.json()["error"]["field"] == "rid"
        assert engine.client.post("/abort_request", json={"rid": "batch_199"}).status_code == 200
        assert engine.client.post("/abort_request", json={"abort_all": True}).status_code == 200
        replies = pending.result(timeout=20)
    assert replies[199]["meta_info"]["finish_reason"]["type"] == "abort"
    until(engine.idle)
    assert engine.client.post("/flush_cache").status_code == 200


def test_a_prefix_is_found_again_until_the_cache_is_flushed(engine: Engine) -> None:
    params = {"max_new_tokens": 8, "ignore_eos": True}

    def cached(key: str | None = None) -> int:
        reply = engine.generate(input_ids=[7, 3] * 20, sampling_params=params, extra_key=key)
        found: int = reply["meta_info"]["cached_tokens"]
        return found

    assert [cached(), cached(), cached("k"), cached("k")] == [0, 32, 0, 32]
    assert engine.state()["kv_slots_cached"] > 0
    assert engine.client.post("/flush_cache").status_code == 200
    assert engine.state()["kv_slots_cached"] == 0 == cached()


def test_the_engine_says_what_it_runs(engine: Engine, pair: Path) -> None:
    engine.generate(**LONG)
    info = engine.client.get("/server_info").json()
    assert engine.client.get("/get_server_info").json().keys() == info.keys()
    expected = {
        "model_path": str(pair / "target"),
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": str(pair / "draft"),
        "speculative_num_draft_tokens": 9,
        "speculative_ddtree_budget": 8,
        "speculative_ddtree_topk": 4,
        "block_size": 5,
        "dtype": "float32",
        "port": engine.client.base_url.port,
        "max_running_requests": 4,
        "context_length": 96,
        "vocab_size": 16,
        "skip_tokenizer_init": False,
        "page_size": 16,
        "disable_radix_cache": False,
        "speculative_sampling": "per-node",
        "fault": None,
    }
    assert expected.items() <= info.items()
    state = info["internal_states"][0]
    assert state["executed"]["nodes"] == 8 and 1 <= state["avg_spec_accept_length"] <= 5
    model = engine.client.get("/model_info").json()
    assert (model["vocab_size"], model["context_length"], model["is_generation"]) == (16, 96, True)
    assert engine.client.get("/get_model_info").json() == model
    assert engine.client.get("/health_generate").status_code == 200
    metrics = engine.client.get("/metrics").text
    for name in (
        *("spec_accept_length", "spec_accept_rate", "gen_throughput", "num_running_reqs", "num_queue_reqs"),
        *("prompt_tokens_total", "generation_tokens_total", "spec_verify_calls_total"),
        "time_to_first_token_seconds_bucket",
    ):
        assert re.search(rf"^sglang:{name}\{{.*\}} \S+$", metrics, re.MULTILINE), name


def test_a_planted_fault_is_announced(start: Callable[..., Engine], pair: Path) -> None:
    engine = start(*tree(pair), "--fault", "mask-rows-by-block-size", "--served-model-name", "bad").wait_ready()
    assert "FAULT PLANTED: mask-rows-by-block-size" in engine.log.read_text()
    info = engine.client.get("/server_info").json()
    assert (info["fault"], info["served_model_name"]) == ("mask-rows-by-block-size", "bad")


@pytest.mark.alone
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_two_seconds_also_under_load(
    start: Callable[..., Engine], pair: Path, sign: signal.Signals
) -> None:
    engine = start(*tree(pair), "--max-running-requests", "1").wait_ready()
    answers: list[int | str] = []

    def ask() -> None:
        try:
            answers.append(engine.client.post("/generate", json={**LONG, "input_ids": [[4, 5]] * 500}).status_code)
        except httpx.TransportError as error:
            answers.append(type(error).__name__)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: engine.state()["num_queue_reqs"] > 0)
    began = time.monotonic()
    engine.process.send_signal(sign)
    assert engine.process.wait(timeout=10) == 0
    assert time.monotonic() - began < 2
    asking.join(timeout=5)
    assert len(answers) == 1


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_load_ends_it_also_where_an_import_catches_all(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals
) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, time\n"
        f"try:\n    os.kill(os.getpid(), {sign:d})\n    time.sleep(1)\nexcept BaseException:\n    pass\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert start().process.wait(timeout=60) == -sign


def test_a_crash_of_the_step_loop_ends_the_process(start: Callable[..., Engine], pair: Path, tmp_path: Path) -> None:
    """A model whose logits overflow: the weights are finite, what they compute is not."""
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (pair / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] *= 1e38
    save_file(weights, broken / "model.safetensors")
    engine = start("--model-path", str(broken)).wait_ready()
    answer = engine.client.post("/generate", json=LONG)
    assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]
    assert engine.process.wait(timeout=10) == 1
    assert "NumericError" in engine.log.read_text()


def test_a_key_guards_every_route_but_health(start: Callable[..., Engine], pair: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    engine = start(
        "--model-path", str(pair / "target"), "--skip-tokenizer-init", "--api-key-file", str(key)
    ).wait_ready()
    assert engine.client.get("/health").status_code == 200
    for given in (b"", b"Bearer wrong", b"s3cret", b"Bearer \xff", b"Bearer s3cret2"):
        for path in ("/server_info", "/metrics", "/health_generate", "/nothing"):
            assert engine.client.get(path, headers=[(b"Authorization", given)] if given else []).status_code == 401
    engine.client.headers["Authorization"] = "Bearer s3cret"
    info = engine.client.get("/server_info")
    assert info.status_code == 200 and "s3cret" not in info.text
    assert info.json()["speculative_algorithm"] is None
    reply = engine.generate(**LONG)
    assert "text" not in reply and "spec_accept_length" not in reply["meta_info"]
    assert engine.client.post("/generate", json={"text": "t4"}).json()["error"]["field"] == "text"


def ended(engine: Engine) -> tuple[int, str]:
    return engine.process.wait(timeout=30), engine.log.read_text()


def test_what_cannot_start_says_why_and_with_which_status(
    start: Callable[..., Engine], pair: Path, tmp_path: Path
) -> None:
    target = str(pair / "target")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (start("--model-path", str(tmp_path / "none")), 1, "config.json: cannot be read"),
            (start("--model-path", target, "--port", port), 1, f"127.0.0.1:{port}: Address already in use"),
            (start("--model-path", target, "--context-length", "999"), 2, "--context-length 999"),
            (start("--model-path", target, "--api-key-file", str(tmp_path / "none")), 1, "No such file"),
            (start("--model-path", target, "--tokenizer-path", str(tmp_path)), 1, "no tokenizer"),
            (start("--model-path", target, "--speculative-ddtree-topk", "4"), 2, "needs --speculative-algorithm"),
        ]
        for engine, status, why in cases:
            code, text = ended(engine)
            assert code == status and why in text and "Traceback" not in text
