"""A tiny deterministic "model" behind SGLang's HTTP API on loopback, which tests can make misbehave.

The next token is a hash of the last three; the runner-up lies ``gap`` nats below. Prefixes are cached by extra_key.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 200
EOS = 0
LENGTH = "length"

Json = dict[str, Any]
Alter = Callable[[str, Json, Json], Json | bytes | str]
Choose = Callable[[list[int], int, int], int]


def ranked(ids: list[int]) -> tuple[int, int]:
    """The target's first and second choice after ``ids``."""
    digest = hashlib.sha256(repr(ids[-3:]).encode()).digest()
    first = digest[0] * 256 + digest[1]
    return first % VOCAB, (first + 1 + digest[2] % (VOCAB - 1)) % VOCAB


class Toy:
    """``alter(kind, request, reply)`` may return another reply, raw bytes, "hang", "close" or an HTTP status as "400",
    which may have words behind it; kind is server_info, model_info, tokenize, namespaces, generate or score.
    ``choose(ids, index, in_flight)`` picks output token ``index``.
    """

    def __init__(self) -> None:
        self.info: Json = {"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 8, "vocab_size": VOCAB}
        self.gap = 0.7
        self.accept = 4
        self.takes_s = 0.004
        self.cache_hits = True
        self.one_namespace = False
        self.include_stop = True
        self.tokenizes = False
        self.ignore_stops = False
        self.logprob_error = 0.0
        self.choose: Choose = lambda ids, index, in_flight: ranked(ids)[0]
        self.alter: Alter = lambda kind, request, reply: reply
        self.released = threading.Event()
        self.requests: list[Json] = []
        self._in_flight = 0
        self._kept: dict[str, list[list[int]]] = {}
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, request: Json) -> tuple[str, Json]:
        if path.endswith("server_info"):
            return "server_info", dict(self.info)
        if path.endswith("model_info"):
            return "model_info", {}
        if path.endswith("tokenize"):
            return "tokenize", {"tokens": [ord(c) % VOCAB for c in request["prompt"]]}
        ids = request.get("input_ids") or [ord(c) % VOCAB for c in request["text"]]
        if request.get("return_logprob") and "logprob_start_len" in request:
            return "score", self._score(ids, request)
        asks_for_namespaces = ids[:4] == [0, 1, 2, 3] and request["sampling_params"]["max_new_tokens"] == 1
        return "namespaces" if asks_for_namespaces else "generate", self._generate(ids, request)

    def _generate(self, prompt: list[int], request: Json) -> Json:
        limit = request["sampling_params"]["max_new_tokens"]
        with self._lock:
            self._in_flight += 1
            in_flight = self._in_flight
        time.sleep(self.takes_s)
        key = "one" if self.one_namespace else request["extra_key"]
        cached = self._cached(key, prompt)
        stops = {EOS, *request["sampling_params"].get("stop_token_ids", [])}
        if self.ignore_stops:
            stops = {EOS}
        ids, finish = list(prompt), {"type": LENGTH, LENGTH: limit}
        for index in range(limit):
            ids.append(self.choose(ids, index, in_flight))
            if ids[-1] in stops:
                finish = {"type": "stop", "matched": ids[-1]}
                break
        with self._lock:
            self._in_flight -= 1
            self._kept.setdefault(key, []).append(ids)
        output = ids[len(prompt) :]
        steps = max(1, math.ceil((len(output) - 1) / self.accept))
        if not self.include_stop and finish["type"] == "stop":
            output = output[:-1]
        meta: Json = {"finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(output)}
        meta["cached_tokens"] = cached
        if request.get("return_logprob"):
            scored = self._score(ids, {"logprob_start_len": len(prompt) - 1})["meta_info"]["input_token_logprobs"]
            meta["output_token_logprobs"] = [
                [entry[0] + self.logprob_error, *entry[1:]] for entry in scored[1 : len(output) + 1]
            ]
        if self.accept > 0 and self.info.get("speculative_algorithm"):
            meta |= {"spec_verify_ct": steps, "spec_accept_length": len(output) / steps}
        return {"text": "", "output_ids": output, "meta_info": meta}

    def _cached(self, key: str, prompt: list[int]) -> int:
        if not self.cache_hits:
            return 0
        best = 0
        for kept in self._kept.get(key, []):
            same = next(
                (i for i, (a, b) in enumerate(zip(kept, prompt, strict=False)) if a != b), min(len(kept), len(prompt))
            )
            best = max(best, min(same, len(prompt) - 1))
        return best

    def _score(self, ids: list[int], request: Json) -> Json:
        start = request["logprob_start_len"]
        tokens: list[Any] = [[None, ids[start], f"<{ids[start]}>"]]
        tops: list[Any] = [None]
        for i in range(start + 1, len(ids)):
            first, second = ranked(ids[:i])
            logprobs = {first: math.log(0.45), second: math.log(0.45) - self.gap}
            tokens.append([logprobs.get(ids[i], math.log(1e-4)), ids[i], f"<{ids[i]}>"])
            tops.append([[logprobs[first], first, f"<{first}>"], [logprobs[second], second, f"<{second}>"]])
        meta: Json = {"finish_reason": {"type": LENGTH, LENGTH: 0}, "prompt_tokens": len(ids), "completion_tokens": 0}
        meta |= {"cached_tokens": 0, "input_token_logprobs": tokens}
        if request.get("top_logprobs_num"):
            meta["input_top_logprobs"] = tops
        return {"text": "", "output_ids": [], "meta_info": meta}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        toy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, request: Json) -> None:
                kind, reply = toy.answer(self.path, request)
                toy.requests.append({"kind": kind, "headers": dict(self.headers), **request})
                altered = toy.alter(kind, request, reply)
                if kind == "tokenize" and not toy.tokenizes:
                    altered = "404"
                status = 200
                if altered == "hang":
                    toy.released.wait()
                    self.close_connection = True
                    return
                if altered == "close":
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(b'{"text": ')
                    self.close_connection = True
                    return
                if isinstance(altered, str):
                    code, _, words = altered.partition(" ")
                    status = int(code)
                    altered = {"error": {"message": words or "does not support return_logprob yet"}}
                body = altered if isinstance(altered, bytes) else json.dumps(altered).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler
