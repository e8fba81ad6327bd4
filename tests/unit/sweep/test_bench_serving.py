"""Given a stand-in for SGLang's bench_serving that takes its options, the comparison sends it what the sweep sends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_serving import main

#: Options, data set, shuffle, namespace and result file as sglang.benchmark.serving has them; one request at a time.
STAND_IN = """
import argparse, json, os, random, time, urllib.request

p = argparse.ArgumentParser()
for word in ("backend", "base-url", "model", "tokenizer", "dataset-name", "dataset-path", "output-file"):
    p.add_argument("--" + word, required=True)
for word in ("ready-check-timeout-sec", "num-prompts", "sharegpt-output-len", "max-concurrency", "warmup-requests"):
    p.add_argument("--" + word, type=int, required=True)
p.add_argument("--seed", type=int)
p.add_argument("--extra-request-body", type=json.loads)
p.add_argument("--disable-tqdm", action="store_true")
p.add_argument("--output-details", action="store_true")
a = p.parse_args()
assert (a.backend, a.dataset_name, a.warmup_requests) == ("sglang", "custom", 0)
random.seed(a.seed)
rows = [json.loads(line) for line in open(a.dataset_path)]
random.shuffle(rows)
prompts = [row["conversations"][0]["content"] for row in rows]
assert len(prompts) == a.num_prompts
with open(os.environ["STAND_IN_LOG"], "a") as log:
    log.write(json.dumps({"prompts": prompts, "key": a.extra_request_body["extra_key"]}) + "\\n")
texts, tokens, began = [], 0, time.perf_counter()
for prompt in prompts:
    sampling = {"temperature": 0.0, "max_new_tokens": a.sharegpt_output_len, "ignore_eos": True}
    body = {"text": prompt, "sampling_params": sampling, "stream": True, **a.extra_request_body}
    with urllib.request.urlopen(urllib.request.Request(a.base_url + "/generate", json.dumps(body).encode())) as reply:
        events = [line[6:] for line in reply.read().split(b"\\n\\n") if line.startswith(b"data: {")]
    last = json.loads(events[-1])
    texts.append(last["text"])
    tokens += last["meta_info"]["completion_tokens"]
seconds = time.perf_counter() - began
result = {key: 1000 * seconds / len(prompts) for key in ("median_e2e_latency_ms", "mean_tpot_ms", "median_itl_ms")}
result |= {"median_ttft_ms": 1.0, "output_throughput": tokens / seconds, "completed": len(prompts)}
result |= {"generated_texts": texts, "total_output_tokens": tokens, "errors": [""] * len(prompts)}
result |= json.loads(os.environ.get("STAND_IN_SAYS", "{}"))
with open(a.output_file, "a") as out:
    out.write(json.dumps(result) + "\\n")
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = tmp_path / "site" / "sglang" / "bench_serving.py"
    module.parent.mkdir(parents=True)
    module.write_text(STAND_IN)
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    return tmp_path / "site"


def compare(site: Path, *words: str) -> int:
    out = str(site.parent / "out")
    return main(
        ["compare", "--site", str(site), "--step-ms", "1", "-c", "2", "--max-tokens", "9", "--out", out, *words]
    )


def test_both_get_the_same_prompts_in_the_same_order_each_pass_in_a_namespace_of_its_own(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SAYS", json.dumps({"output_throughput": 1.0}))
    prompts = [f"Say {n}." for n in range(20)]
    file = site.parent / "own.jsonl"
    file.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
    assert compare(site, "--prompts", str(file)) == 1
    passes = [json.loads(line) for line in (site.parent / "log").read_text().splitlines()]
    assert [one["prompts"] for one in passes] == [prompts[:16]] * 3
    assert len({one["key"] for one in passes}) == 3
    told = json.loads((site.parent / "out.json").read_text())
    (cell,) = told["cells"]
    assert cell["texts alike"] == cell["requests"] == 16 and told["rounds"] == 3
    assert cell["figures"][0]["bench_serving"]["median"] == 1.0 and cell["figures"][0]["kept"] is False
    text = (site.parent / "out.txt").read_text()
    assert "NOT within 3 %" in text and "What the two count differently" in text and str(site.parent) not in text


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"total_output_tokens": 100}, "tokens: .* there"),
        ({"completed": 15}, "15 of 16 answers"),
        ({"errors": ["Timeout"]}, "Timeout"),
    ],
)
def test_a_peer_that_lost_requests_or_tokens_is_not_compared(
    site: Path, monkeypatch: pytest.MonkeyPatch, says: dict[str, object], why: str
) -> None:
    monkeypatch.setenv("STAND_IN_SAYS", json.dumps(says))
    with pytest.raises(SystemExit, match=why):
        compare(site)
    assert not (site.parent / "out.json").exists()


def test_two_rounds_are_refused(site: Path) -> None:
    with pytest.raises(SystemExit, match="at least 3"):
        compare(site, "--rounds", "2")
