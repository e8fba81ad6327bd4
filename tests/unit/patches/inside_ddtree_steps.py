"""Inside a tree's Python with Triton's interpreter: whole decode steps of the server of toy_server, and its start."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch

from .bases import here
from .configured import configured
from .planting import plant
from .real_target import alone
from .sampling import Absent, ar_text, batch_info, requests, sampler
from .toy import VOCABULARY
from .toy_server import Server, Setting


class Lengths(torch.Tensor):
    def record_stream(self, stream: object) -> None:
        pass


def decoded(
    setting: dict[str, Any],
    prompts: list[int],
    tokens: int,
    fault: str | None = None,
    sampling: list[dict[str, Any]] | None = None,
    split: bool = True,
    turns: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Decode as many requests as there are prompt lengths, ``tokens`` each and more; what came and what is wrong.

    {"wrong": first difference from AR's text, the pool, the appended features, or None, "commits": tokens a step and
    request, "executed": the last step's trees}. fault: a patch of tests/gpu/faults to plant; the worker's own dear
    checks are then off, so that the fault goes as far as it does in service. sampling: each request's parameters
    (default: greedy). split: without it, SGLang's own attention kernel.
    turns: which requests each step has (default: all, until all have ``tokens``).
    """
    restore = plant(fault) if fault else lambda: None
    given = sampling or [{"temperature": 0.0}] * len(prompts)
    try:
        with (
            configured(**Setting(**setting).arguments(), sampling_backend="pytorch", attention_backend="triton"),
            torch.inference_mode(),
            alone(),
            mock.patch.dict(os.environ, {} if split else {"SGLANG_DDTREE_SPLIT_PREFIX": "0"}),
        ):
            return decode(Setting(**setting), prompts, tokens, fault is None, given, turns)
    finally:
        restore()


def launched() -> list[str]:
    """The Triton kernels of some decode steps with and without graphs and a split prefix, and of the canary."""
    from triton.runtime.interpreter import GridExecutor

    names: set[str] = set()
    launch = GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    some = {"block": 4, "budget": 6, "topk": 3, "graphs": 3}
    with mock.patch.object(GridExecutor, "__call__", noted):
        decoded(some, [5], 2)
        decoded({**some, "graphs": 0}, [5], 2, split=True)
        started(some)
    return sorted(names)


def started(setting: dict[str, Any], fault: str | None = None) -> dict[str, Any]:
    """The start-up canary: what it says, None when it passes, and what it leaves behind of the table."""
    restore = plant(fault) if fault else lambda: None
    try:
        with (
            configured(**Setting(**setting).arguments(), attention_backend="triton"),
            torch.inference_mode(),
            alone(),
        ):
            server = Server(Setting(**setting), Setting(**setting).toy(5), 9, False)
            server.runner.canary_manager = None
            setattr(server.runner, here().READ_DONE, "the canary's")
            said = None
            try:
                server.worker._run_canary(server.setting.width)
            except RuntimeError as error:
                said = str(error)
            same = torch.equal(server.table, server.true_table)
            return {"said": said, "table": same, "event": getattr(server.runner, here().READ_DONE)}
    finally:
        restore()


def decode(
    setting: Setting,
    prompts: list[int],
    tokens: int,
    debug: bool,
    sampling: list[dict[str, Any]],
    turns: list[list[int]] | None = None,
    head: Any = None,
) -> dict[str, Any]:
    """What `decoded` does, configured already. head: this rank's, where there are ranks."""
    toy = setting.toy(5)
    server = Server(setting, toy, 9, debug, head=head)
    beginnings = [[(7 * i + 3 * j + 2) % VOCABULARY for j in range(length)] for i, length in enumerate(prompts)]
    server.runner.sampler = sampler()
    server.texts = [
        ar_text(toy, prompt, (tokens + 3) * setting.block, given)
        for prompt, given in zip(beginnings, sampling, strict=True)
    ]
    for row, prompt in enumerate(beginnings, 1):
        server.prefill(row, prompt)
    lens = list(prompts)
    got = [[text[length]] for text, length in zip(server.texts, prompts, strict=True)]
    commits: list[int] = []
    shapes: list[int] = []
    everyone = list(range(len(prompts)))
    while len(shapes) < len(turns) if turns else min(len(g) for g in got) < tokens:
        rows = turns[len(shapes)] if turns else everyone
        server.rows = rows
        info = batch_info([sampling[i] for i in rows])
        batch = _batch(setting, rows, [lens[i] for i in rows], [got[i][-1] for i in rows])
        batch.sampling_info, batch.reqs = info, requests([sampling[i] for i in rows])
        result = server.worker.forward_batch_generation(batch)
        out = result.next_token_ids.view(len(rows), result.speculative_num_draft_tokens).tolist()
        taken = result.accept_lens.tolist()
        for place, i in enumerate(rows):
            got[i] += out[place][: taken[place]]
            lens[i] += taken[place]
        bonus = result.next_draft_input.bonus_tokens.tolist()
        if result.new_seq_lens.tolist() != [lens[i] for i in rows] or bonus != [got[i][-1] for i in rows]:
            return {"wrong": "lengths or bonus tokens"}
        commits += taken
        wrong = _wrong(server, rows, got, lens, prompts)
        wrong = wrong or _other_logprobs(server, rows, result, got, lens, prompts, info)
        if wrong:
            return {"wrong": wrong, "commits": commits}
        shapes.append(server.worker.executed_shape().nodes)
    shape = server.worker.executed_shape()
    return {
        "wrong": None,
        "commits": commits,
        "executed": [shape.nodes, shape.max_children, shape.max_depth],
        "nodes": shapes,
    }


def decoding(lens: torch.Tensor, draft_input: Any) -> dict[str, Any]:
    """What the worker reads of any batch that decodes."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return {
        "forward_mode": ForwardMode.DECODE,
        "is_extend_in_batch": False,
        "has_grammar": False,
        "spec_algorithm": SpeculativeAlgorithm.DDTREE,
        "spec_info": draft_input,
        "seq_lens": lens.as_subclass(Lengths),
    }


def _batch(setting: Setting, rows: list[int], lens: list[int], bonus: list[int]) -> Any:
    from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

    seq_lens = torch.tensor(lens)
    draft_input = make_draft_input_v2(bonus_tokens=torch.tensor(bonus), new_seq_lens=seq_lens)
    here().reserve(draft_input, seq_lens + 2 * max(setting.width, setting.block))
    return Absent(
        **decoding(seq_lens, draft_input),
        return_logprob=True,
        req_pool_indices=torch.tensor(rows) + 1,
        batch_size=lambda: len(lens),
    )


def _wrong(server: Server, here: list[int], got: list[list[int]], lens: list[int], prompts: list[int]) -> str | None:
    """The texts, the KV behind them, and what the last step gave the drafter."""
    hidden, loc, positions, commit_lens = server.appended[-1]
    block = loc.shape[1]
    for place, i in enumerate(here):
        text = server.texts[i]
        mine = text[: prompts[i]] + got[i]
        if mine != text[: len(mine)]:
            return f"text of request {i}: {mine} is not {text[: len(mine)]}"
        slots = server.true_table[i + 1, : lens[i]].long()
        apart = server.apart(i + 1, mine[: lens[i]])
        if apart > 1e-4:
            return f"KV of request {i}: {apart:.3g} apart"
        count = int(commit_lens[place])
        features = server.toy.dense(mine[: lens[i]]).features[-count:]
        rows = hidden.view(len(here), block, -1)[place, :count]
        if float((rows - features).abs().max()) > 1e-3:
            return f"features of request {i}"
        where = list(range(lens[i] - count, lens[i]))
        if (
            positions.view(len(here), block)[place, :count].tolist() != where
            or loc[place, :count].tolist() != slots[where].tolist()
        ):
            return f"places of request {i}"
    return None


def _other_logprobs(
    server: Server,
    here: list[int],
    result: Any,
    got: list[list[int]],
    lens: list[int],
    prompts: list[int],
    info: Any,
) -> str | None:
    """The log-probabilities told of the step's tokens are the target's own, after the text before each."""
    told = result.logits_output.next_token_logprobs
    for place, count in enumerate(result.accept_lens.tolist()):
        i = here[place]
        text = server.texts[i][: prompts[i]] + got[i]
        logits = server.toy.dense(text[: lens[i]]).logits[-count:]
        if info.logit_bias is not None:
            logits = logits + info.logit_bias[place]
        rows = (logits / info.temperatures[place]).log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(got[i][-count:]).unsqueeze(1)).squeeze(1)
        if float((told[place, :count] - wanted).abs().max()) > 1e-3:
            return f"logprobs of request {i}"
    return None
