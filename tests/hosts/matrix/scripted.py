"""A server that the gate finds exact and that starts in a moment: its "model" says a hash of the last tokens.

It stands where the release's engine stands, takes the same arguments, and speaks SGLang's HTTP as far as the gate asks.
Standard library only. ``--script WORD`` makes it misbehave: ``sick`` (never healthy), ``wrong`` (tokens that are not
the model's), ``die`` (ends soon after it is healthy).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

VOCABULARY = 2048
CONTEXT = 4
DEPTH = 3  # tokens a pretended verify step adds


def next_token(ids: list[int]) -> int:
    """What the "model" says next, by its last tokens alone."""
    tail = ",".join(map(str, ids[-CONTEXT:]))
    return int.from_bytes(hashlib.sha256(tail.encode()).digest()[:4], "big") % VOCABULARY


def continuation(ids: list[int], count: int) -> list[int]:
    """The exact greedy answer."""
    found = list(ids)
    for _ in range(count):
        found.append(next_token(found))
    return found[len(ids) :]


def arguments(words: list[str]) -> dict[str, str]:
    """``--key value`` pairs; the last one counts."""
    return {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}


class Handler(BaseHTTPRequestHandler):
    given: ClassVar[dict[str, str]]

    def do_GET(self) -> None:
        script = self.given.get("script", "")
        if self.path == "/health":
            self.answer(503 if script == "sick" else 200, {})
        elif self.path == "/server_info":
            self.answer(200, self.info())
        elif self.path == "/model_info":
            self.answer(200, {"vocab_size": VOCABULARY})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = asked.get("input_ids") or list(asked["text"].encode())
        sampling = asked["sampling_params"]
        stops = set(sampling.get("stop_token_ids") or ())
        output = continuation(ids, sampling["max_new_tokens"])
        if self.given.get("script") == "wrong" and len(output) > 5:
            output[5] = (output[5] + 1) % VOCABULARY
        stop = next((index for index, token in enumerate(output) if token in stops), None)
        finish: dict[str, Any] = {"type": "length", "length": len(output)}
        if stop is not None:
            finish, output = {"type": "stop", "matched": output[stop]}, output[: stop + 1]
        steps = -(-max(len(output) - 1, 0) // DEPTH)
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "cached_tokens": 0,
            "spec_verify_ct": steps,
        }
        if asked.get("return_logprob"):
            meta["output_token_logprobs"] = [entry for entry, _ in scores(ids + output, len(ids))]
            start = asked.get("logprob_start_len", len(ids))
            found = scores(ids, start)
            meta["input_token_logprobs"] = [entry for entry, _ in found]
            meta["input_top_logprobs"] = [top for _, top in found]
            if found:
                found[0][0][0], meta["input_top_logprobs"][0] = None, None
        self.answer(200, {"text": "", "output_ids": output, "meta_info": meta})

    def info(self) -> dict[str, Any]:
        given = self.given
        budget = given.get("speculative-ddtree-budget")
        key = Path(given["api-key-file"]).read_text() if "api-key-file" in given else None
        return {
            "dtype": given.get("dtype"),
            "max_running_requests": int(given.get("max-running-requests", 16)),
            "speculative_algorithm": given.get("speculative-algorithm"),
            "speculative_num_draft_tokens": int(budget) + 1 if budget else None,
            "speculative_ddtree_budget": int(budget) if budget else None,
            "speculative_ddtree_topk": int(given["speculative-ddtree-topk"]) if budget else None,
            "skip_tokenizer_init": True,
            "api_key": key,
            "served_model_name": f"tiny {key}",
        }

    def answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


def scores(ids: list[int], start: int) -> list[tuple[list[Any], list[Any]]]:
    """For each token from ``start`` on: its [logprob, id, text], and the two best ones."""
    found = []
    for index in range(start, len(ids)):
        best = next_token(ids[:index])
        other = (best + 1) % VOCABULARY
        logprob = -0.01 if ids[index] == best else -9.0
        found.append(([logprob, ids[index], None], [[-0.01, best, None], [-9.0, other, None]]))
    return found


def main() -> None:
    Handler.given = arguments(sys.argv[1:])
    ThreadingHTTPServer.allow_reuse_address = True
    server = ThreadingHTTPServer((Handler.given["host"], int(Handler.given["port"])), Handler)
    if "api-key-file" in Handler.given:  # as some engines do
        key = Path(Handler.given["api-key-file"]).read_text()
        print(f"server_args: api_key={key!r}, warming up with {key}", flush=True)
    print("ready on http://" + Handler.given["host"], flush=True)
    if Handler.given.get("script") == "die":
        threading.Timer(1, os._exit, (3,)).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
