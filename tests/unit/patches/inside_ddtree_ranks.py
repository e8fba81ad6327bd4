"""Inside a tree's Python: DDTREE on tensor-parallel ranks, each a process, over heads that SGLang itself shards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from .bases import here
from .configured import configured
from .planting import plant_words
from .ranks import on_ranks
from .sampling import batch_info, sampler
from .toy import VOCABULARY

BLOCK, BATCH, HIDDEN, TOPK, BUDGET = 5, 3, 6, 4, 16
LOUD = 1e4
"""The logit of a row of padding, were one looked at: above all others."""

Changes = list[tuple[str, str]]


def drawn(cases: list[dict[str, Any]], ranks: int, changes: dict[str, Changes]) -> list[dict[str, Any]]:
    """Trees of one draft, on ``ranks`` ranks with these words of overlay modules changed, and on one rank as it is.

    case: vocab, padding (the whole head's rows are padded to a multiple), ties (logits repeat), half (bfloat16), topk,
    seed. Of each case {"ranks": what each drew, "one": what one rank alone draws, "logprobs": of a full softmax}.
    """
    from sglang.srt.speculative import ddtree_worker  # noqa: F401  so that no fork has to import it

    several, one = on_ranks(ranks, _draw_all, cases, changes), on_ranks(1, _draw_all, cases, {})
    return [
        {
            "ranks": [mine[i] if isinstance(mine, list) else mine for mine in several],
            "one": one[0][i],
            "logprobs": _logits(case).float().log_softmax(-1).tolist(),
        }
        for i, case in enumerate(cases)
    ]


def _bonus() -> torch.Tensor:
    return torch.arange(BATCH) + 1000


def _states(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the whole head [vocab, HIDDEN], hidden states [BATCH * BLOCK, HIDDEN]). The last column is the padding's."""
    generator = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(case["vocab"], HIDDEN, generator=generator)
    states = torch.randn(BATCH * BLOCK, HIDDEN, generator=generator)
    if case.get("ties"):
        weight, states = weight.round(), states.round()
    weight[:, -1], states[:, -1] = 0.0, 1.0
    dtype = torch.bfloat16 if case.get("half") else torch.float32
    return weight.to(dtype), states.to(dtype)


def _logits(case: dict[str, Any]) -> torch.Tensor:
    """[BATCH, BLOCK - 1, vocab]"""
    weight, states = _states(case)
    return states.view(BATCH, BLOCK, HIDDEN)[:, 1:] @ weight.T


def _draw_all(rank: int, cases: list[dict[str, Any]], changes: dict[str, Changes]) -> list[dict[str, Any]]:
    for module, words in changes.items():
        plant_words(module, words)
    return [_draw(rank, case) for case in cases]


def _draw(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """By the real worker's own sampler, over its own shard of SGLang's head."""
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker

    weight, states = _states(case)
    topk = case.get("topk", TOPK)
    with server(), torch.inference_mode():
        head = sharded_head(weight, case["padding"])
        worker = object.__new__(DDTreeWorker)
        worker.__dict__.update(
            **here().worker_fields(),
            block_size=BLOCK,
            _target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(lm_head=head))),
            _topk=topk,
            _budget=BUDGET if topk > 1 else BLOCK - 1,
        )
        made = worker._maybe_build_draft_sampler()
        block_ids = torch.zeros(BATCH, BLOCK, dtype=torch.int64)
        block_ids[:, 0] = _bonus()
        made(states, block_ids.view(-1))
        logprobs, ids = made._candidates(states.view(BATCH, BLOCK, HIDDEN)[:, 1:].reshape(-1, HIDDEN))
        return {
            "trees": [array.tolist() for array in made.captured(BATCH).arrays],
            "ids": ids.view(BATCH, BLOCK - 1, topk).tolist(),
            "logprobs": logprobs.view(BATCH, BLOCK - 1, topk).tolist(),
            "rows": [head.shard_indices.num_org_elements, head.weight.shape[0]],
        }


def server(**arguments: Any) -> AbstractContextManager[Any]:
    """As these ranks were started."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig

    graphs = CudaGraphConfig(decode=PhaseConfig(backend=Backend.FULL, bs=[1, BATCH]))
    return configured(alone=False, cuda_graph_config=graphs, sampling_backend="pytorch", **arguments)


def sharded_head(weight: torch.Tensor, padding: int) -> Any:
    """SGLang's head with this rank's rows of ``weight``, and padding rows that would win every draft."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead(weight.shape[0], weight.shape[1], params_dtype=weight.dtype, padding_size=padding)
    head.weight_loader(head.weight, weight)
    head.weight[head.shard_indices.num_org_elements :, -1] = LOUD
    return head


def decoded(
    ranks: int,
    setting: dict[str, int],
    prompts: list[int],
    tokens: int,
    sampling: list[dict[str, Any]],
    changes: dict[str, Changes],
) -> list[Any]:
    """Whole decode steps on each rank: see inside_ddtree_steps."""
    return on_ranks(ranks, _decode, setting, prompts, tokens, sampling, changes)


def _decode(
    rank: int,
    setting: dict[str, int],
    prompts: list[int],
    tokens: int,
    sampling: list[dict[str, Any]],
    changes: dict[str, Changes],
) -> dict[str, Any]:
    from .inside_ddtree_steps import decode
    from .toy_server import Setting

    for module, words in changes.items():
        plant_words(module, words)
    with server(**Setting(**setting).arguments()), torch.inference_mode():
        # 23 rows padded to 24: the last of two or three ranks has a row of padding
        head = sharded_head(torch.eye(VOCABULARY), 2)
        return decode(Setting(**setting), prompts, tokens, not changes, sampling, head=head)


def shared_draws(ranks: int, changes: Changes) -> list[Any]:
    """Tokens that each rank takes for the target's, without seeds, its generator in a state of its own."""
    return on_ranks(ranks, _draw_freely, changes)


def _draw_freely(rank: int, changes: Changes) -> list[int]:
    from sglang.srt.speculative import ddtree_sampling

    plant_words("ddtree_sampling", changes)
    with server(), torch.inference_mode():
        info = batch_info([{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}])
        logits = torch.randn(3 * 7, 23, generator=torch.Generator().manual_seed(3))
        torch.manual_seed(rank)
        drawn_tokens: list[int] = ddtree_sampling.sampled_nodes(sampler(), logits, info, torch.arange(3 * 7)).tolist()
    return drawn_tokens


def disagreeing(ranks: int, differ: bool) -> list[Any]:
    """What the worker's check of the first steps says, where one rank's tree differs from the others', or none's."""
    return on_ranks(ranks, _compare, ranks, differ)


def _compare(rank: int, ranks: int, differ: bool) -> str | None:
    from sglang.srt.speculative.ddtree_build import build_trees
    from sglang.srt.speculative.ddtree_checks import Checks

    logprobs = torch.tensor([[[-0.5, -1.0], [-0.4, -1.5]]])
    ids = torch.arange(4).view(1, 2, 2)
    if differ and rank == ranks - 1:
        ids = ids + 1
    with server():
        try:
            Checks(3, 2).trees(build_trees(logprobs, ids, torch.tensor([9]), 3), torch.tensor([9]), None, None)  # type: ignore[arg-type]
        except RuntimeError as error:
            return str(error)
    return None
