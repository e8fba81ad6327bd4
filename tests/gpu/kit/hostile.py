"""Selection ``requests``: what must be refused, by name, with the server alive afterwards.

Selection ``load``: flushes, scoring and aborts while others decode. Selection ``fatal``: what ends a stock server.
"""

from __future__ import annotations

import asyncio

from .ask import JSON
from .lab import Lab, Running
from .scoring import fresh
from .tokens import HeldOut, ask_all, differing

GOOD = [300, 301, 302]
#: case -> (body without sampling_params, sampling_params, what the refusal must name)
REFUSED: dict[str, tuple[JSON, JSON, str]] = {
    "id = vocabulary": ({"input_ids": [300, 2048, 301]}, {}, "2048"),
    "id far beyond": ({"input_ids": [300, 999999]}, {}, "999999"),
    "id beyond 64 bits": ({"input_ids": [1 << 70]}, {}, ""),
    "id below 0": ({"input_ids": [300, -1]}, {}, "-1"),
    "one bad id in a batch": ({"input_ids": [GOOD, [301, 4000]]}, {}, "4000"),
    "bad id, streamed": ({"input_ids": [2048], "stream": True}, {}, "2048"),
    "stop id beyond": ({"input_ids": GOOD}, {"stop_token_ids": [2048]}, "2048"),
    "stop id below 0": ({"input_ids": GOOD}, {"stop_token_ids": [-7]}, "-7"),
    "logprob_start_len -5": ({"input_ids": GOOD, "return_logprob": True, "logprob_start_len": -5}, {}, "-5"),
    "logprob_start_len beyond": ({"input_ids": GOOD, "return_logprob": True, "logprob_start_len": 9}, {}, "9"),
    "top_logprobs_num beyond": ({"input_ids": GOOD, "return_logprob": True, "top_logprobs_num": 5000}, {}, "5000"),
    "ranks without logprobs": ({"input_ids": GOOD, "top_logprobs_num": 5000}, {}, "5000"),
    "token_ids_logprob beyond": ({"input_ids": GOOD, "return_logprob": True, "token_ids_logprob": [2048]}, {}, "2048"),
}


async def run_requests(lab: Lab, names: tuple[str, ...]) -> None:
    for name in names:
        async with lab.hold(name) as (running,):
            before = await running.ask.generate(GOOD, 16)
            for case, (body, sampling, named) in REFUSED.items():
                params = {"temperature": 0, "max_new_tokens": 4, **sampling}
                answer = await running.ask.post("/generate", {**body, "sampling_params": params})
                streamed = bool(body.get("stream")) and answer.status == 200 and '"error"' in answer.text
                refused = (400 <= answer.status < 500 or streamed) and named in answer.text
                alive = await running.ask.alive()
                lab.results.add("requests", name, case, refused and alive, status=answer.status, said=answer.text[:150])
                if not alive:
                    return
            after = await running.ask.generate(GOOD, 16)
            ok = before.status == after.status == 200 and before.ids == after.ids
            lab.results.add("requests", name, "same tokens as before", ok)


async def run_load(lab: Lab, prompts: list[HeldOut], names: tuple[str, ...]) -> None:
    for name in names:
        async with lab.hold(name) as (running,):
            ask = running.ask
            others = prompts[:64]
            decoding = asyncio.create_task(ask_all(ask, [p.ids for p in others], 32, 128))
            flushes: list[int] = []
            scores: list[int] = []
            while not decoding.done():
                flushes.append((await ask.post("/flush_cache", {})).status)
                scores.append((await ask.score(prompts[0].ids, 0, extra_key=fresh())).status)
                await asyncio.sleep(0.05)
            got = await decoding
            compared, wrong = differing(got, [list(p.expected) for p in others])
            exact = wrong == 0 or running.spec.dtype != "float32"
            ok = exact and compared == len(others) and set(scores) == {200} and await ask.alive()
            figures = {"differ": f"{wrong}/{compared}", "flushes": sorted(set(flushes)), "scores": len(scores)}
            lab.results.add("load", name, "flush_cache and scoring", ok, **figures)
            await _beside_each_other(lab, running, prompts)
            await _aborted(lab, name, prompts)


async def _beside_each_other(lab: Lab, running: Running, prompts: list[HeldOut]) -> None:
    """Requests that ask for the logprobs of some ids, of ranks, and of none, in one batch; each gets its own."""
    more: list[JSON] = [
        {"return_logprob": True, "token_ids_logprob": [2, 0]},
        {"return_logprob": True, "top_logprobs_num": 3},
        {},
    ]
    asked = (
        running.ask.generate(prompt.ids, 48, extra_key=fresh(), **more[i % len(more)])
        for i, prompt in enumerate(prompts[:24])
    )
    wrong: list[str] = []
    for i, answer in enumerate(await asyncio.gather(*asked)):
        kind = i % len(more)
        if answer.status != 200:
            wrong.append(f"{i}: {answer.status} {answer.text[:100]}")
        elif kind == 0 and [len(row) for row in answer.meta["output_token_ids_logprobs"]] != [2] * len(answer.ids):
            wrong.append(f"{i}: logprobs of ids")
        elif kind == 1 and [len(row) for row in answer.meta["output_top_logprobs"]] != [3] * len(answer.ids):
            wrong.append(f"{i}: ranks")
    ok = not wrong and await running.ask.alive()
    lab.results.add("load", running.spec.name, "ids, ranks and none in a batch", ok, wrong=wrong[:2])


async def _aborted(lab: Lab, name: str, prompts: list[HeldOut]) -> None:
    """Everything in flight given up; afterwards the pool must be empty, which flush_cache answers with 200."""
    ask = lab.servers[name].ask
    decoding = asyncio.create_task(ask_all(ask, [p.ids for p in prompts[:32]], 32, 1024))
    await asyncio.sleep(0.7)
    aborted = (await ask.post("/abort_request", {"abort_all": True})).status
    got = await decoding
    alive = await ask.alive()
    for _ in range(20):
        flushed = (await ask.post("/flush_cache", {})).status
        if flushed == 200:
            break
        await asyncio.sleep(0.25)
    info = (await ask.get("/server_info")).body.get("internal_states") or [{}]
    usage = {key: value for key, value in info[0].items() if "usage" in key or "accept" in key}
    ended = sum(output is not None and len(output) < 1024 for output in got.outputs)
    ok = aborted == 200 and alive and flushed == 200
    lab.results.add("load", name, "abort all", ok, ended_early=ended, flush=flushed, told=usage)


async def run_fatal(lab: Lab, names: tuple[str, ...]) -> None:
    """A bad id on stock servers, last of all: what the patch is for."""
    for name in names:
        async with lab.hold(name) as (running,):
            answer = await running.ask.generate([300, 999999], 4)
            await asyncio.sleep(2.0)
            alive = await running.ask.alive()
            lab.results.add(
                "fatal", name, "id far beyond", None, status=answer.status, alive=alive, said=answer.text[:100]
            )
