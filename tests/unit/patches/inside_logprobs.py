"""Inside a tree's Python: one verify step of the DFLASH worker, and what the scheduler makes of its result.

The two models are given (their logits, the drafter's tokens); all between them and the request is SGLang's own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .bases import here
from .configured import configured
from .sampling import Absent, batch_info, sampler

BLOCK, VOCABULARY, WIDTH = 4, 11, 6
PREFIX = 9
"""Tokens of each request before the block."""


class _Lengths(torch.Tensor):
    """On a CPU there are no streams to record."""

    def record_stream(self, stream: object) -> None:
        pass


def logits(seed: int, requests: int) -> torch.Tensor:
    """The target's, a row for each position of each request's block: [requests * BLOCK, VOCABULARY]."""
    return 3 * torch.randn(requests * BLOCK, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def _batch(asked: dict[str, Any], given: list[dict[str, Any]]) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    count = len(given)
    return Absent(
        return_logprob=True,
        **asked,
        forward_mode=ForwardMode.DECODE,
        is_extend_in_batch=False,
        has_grammar=False,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=make_draft_input_v2(bonus_tokens=torch.full((count,), 2), new_seq_lens=torch.full((count,), PREFIX)),
        seq_lens=torch.full((count,), PREFIX, dtype=torch.int64).as_subclass(_Lengths),
        seq_lens_cpu=torch.full((count,), PREFIX, dtype=torch.int64),
        seq_lens_sum=PREFIX * count,
        req_pool_indices=torch.arange(count),
        out_cache_loc=None,
        batch_size=lambda: count,
        sampling_info=batch_info(given),
    )


def _block(**out: Any) -> None:
    """What the Triton kernel writes (kernels/ops/speculative/dflash.py)."""
    offsets = torch.arange(BLOCK)
    out["block_ids_out"].fill_(out["mask_token_id"])
    out["block_ids_out"][:, 0] = out["bonus_tokens"]
    out["positions_out"].copy_(out["prefix_lens"][:, None] + offsets)
    out["cache_loc_out"].copy_(out["req_pool_indices"][:, None] * 100 + out["prefix_lens"][:, None] + offsets)


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """The preparation of block and verify given, for as long as one step takes: other tests run the real ones."""
    from sglang.srt.speculative import dflash_worker_v2
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    with (
        mock.patch.object(dflash_worker_v2, "_prepare_dflash_draft_block_unchecked", _block),
        mock.patch.object(
            DFlashVerifyInput, "prepare_for_verify", lambda self, batch, target_worker, **_: (None, False)
        ),
    ):
        yield


def _worker(target: torch.Tensor, drafts: torch.Tensor) -> Any:
    """The worker after an ``__init__`` that loaded nothing: both models answer with what is given."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.speculative import dflash_worker_v2

    rows = drafts.numel() // (BLOCK - 1) * BLOCK

    answer = LogitsProcessorOutput(next_token_logits=target.clone(), hidden_states=torch.zeros(rows, WIDTH))
    draft = SimpleNamespace(hidden_states=torch.zeros(rows, WIDTH))
    worker = object.__new__(dflash_worker_v2.DFlashWorkerV2)
    model = SimpleNamespace(
        get_input_embeddings=lambda: torch.nn.Embedding(VOCABULARY, WIDTH),
        lm_head=SimpleNamespace(weight=torch.zeros(VOCABULARY, WIDTH)),
    )
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 64, dtype=torch.int32))
    runner = SimpleNamespace(req_to_token_pool=pool, model=model, sampler=sampler())
    here().plan_slots(runner)
    worker.__dict__.update(
        block_size=BLOCK,
        device="cpu",
        model_runner=runner,
        _target_worker=SimpleNamespace(
            model_runner=runner,
            forward_batch_generation=lambda **_: Absent(logits_output=answer, can_run_cuda_graph=False),
        ),
        draft_model_runner=here().draft_runner(
            runner, lambda _: SimpleNamespace(logits_output=draft, can_run_graph=False)
        ),
        _greedy_sample_from_vocab_parallel_head=lambda **_: drafts.reshape(-1),
        _append_target_hidden_to_draft_kv_by_loc=lambda **_: None,
        _draft_block_ids_buf=None,
        _draft_block_spec_info=None,
        _draft_sampler=None,
        _mask_token_id=1,
        _need_mamba_verify_commit=False,
        _use_triton_accept_bonus=False,
        _use_triton_prepare_block=True,
        use_compact_draft_cache=False,
        **here().worker_fields(),
    )
    return worker


def _requests(asked: dict[str, Any], count: int) -> list[Any]:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = []
    for i in range(count):
        params = SamplingParams(max_new_tokens=50, temperature=0.0)
        params.normalize(None)
        made.append(
            Req(
                f"request-{i}",
                "",
                array("q", [3] * 9),
                params,
                return_logprob=True,
                top_logprobs_num=asked["top_logprobs_nums"][i],
                token_ids_logprob=asked["token_ids_logprobs"][i],
                eos_token_ids=set(),
                vocab_size=VOCABULARY,
            )
        )
    return made


def _processor() -> Any:
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    def nothing(*_: object, **__: object) -> None:
        pass

    given = {
        "enable_overlap": True,
        "enable_overlap_mlx": False,
        "model_config": Absent(),
        "metrics_reporter": SimpleNamespace(
            num_generated_tokens=0,
            forward_ct_decode=0,
            update_spec_metrics=nothing,
            report_decode_stats=nothing,
            snapshot_spec_decode_metrics=nothing,
        ),
        "token_to_kv_pool_allocator": SimpleNamespace(free_group_begin=nothing, free_group_end=nothing),
        "output_streamer": SimpleNamespace(stream_output=nothing),
        "model_worker": SimpleNamespace(on_verify_complete_cpu=nothing),
    }
    names = [field.name for field in dataclasses.fields(SchedulerBatchResultProcessor)]
    return SchedulerBatchResultProcessor(**{name: given.get(name) for name in names})


def verified(
    seed: int, drafts: list[list[int]], given: list[dict[str, Any]], tops: list[int], ids: list[list[int] | None]
) -> list[dict[str, Any]]:
    """One verify of these drafts against `logits`, handed to one request each with the sampling parameters ``given``;
    what each request then holds."""
    asked = {"top_logprobs_nums": tops, "token_ids_logprobs": ids}
    with configured(sampling_backend="pytorch"), torch.inference_mode(), _without_kernels():
        batch = _batch(asked, given)
        result = _worker(logits(seed, len(drafts)), torch.tensor(drafts)).forward_batch_generation(batch)
        batch.reqs = _requests(asked, len(drafts))
        # as GenerationBatchResult.copy_to_cpu does for the next scheduler step
        _processor().process_batch_result_decode(batch, result)
    return [
        {
            "tokens": list(req.output_ids),
            "logprobs": req.logprob.output_token_logprobs_val,
            "logprob_tokens": req.logprob.output_token_logprobs_idx,
            "top": req.logprob.output_top_logprobs_val,
            "top_tokens": req.logprob.output_top_logprobs_idx,
            "chosen": req.logprob.output_token_ids_logprobs_val,
        }
        for req in batch.reqs
    ]


def drawn_alone(seed: int, given: list[dict[str, Any]]) -> list[list[int]]:
    """What the sampler without speculation draws from each row of `logits`, a row at a time: [requests][BLOCK]."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    rows = logits(seed, len(given)).view(len(given), BLOCK, -1)
    with configured(sampling_backend="pytorch"), torch.inference_mode():
        return [
            [
                int(
                    sampler()(
                        LogitsProcessorOutput(next_token_logits=rows[i, place : place + 1].clone()),
                        batch_info([one]),
                        False,
                        [],
                        [],
                        torch.tensor([PREFIX + place]),
                    )
                )
                for place in range(BLOCK)
            ]
            for i, one in enumerate(given)
        ]


def mixed(stage: str) -> list[list[float]]:
    """One request that asks for the logprobs of ids 2 and 0, one that does not, both under AR: what is read of each."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    rows, chosen = logits(3, 1)[:2], torch.tensor([1, 4])
    output = LogitsProcessorOutput(next_token_logits=rows)
    found = OutputLogprobProcessor().compute_logprobs(rows.log_softmax(-1), [0, 0], [[2, 0], None], chosen)
    found.write_output_to(output)
    batch = SimpleNamespace(return_logprob=True, spec_algorithm=SpeculativeAlgorithm.NONE)
    result = GenerationBatchResult(logits_output=output, next_token_ids=chosen)
    if stage == "decode":
        _processor()._normalize_decode_outputs(batch=batch, result=result, logits_output=output, next_token_ids=chosen)
    else:
        _processor().move_logprobs_to_cpu(batch=batch, logits_output=output)
    return [list(row) for row in output.next_token_token_ids_logprobs_val]


def echoed(ids: list[int], start: int) -> list[int]:
    """The ids that a scored prompt is reported with."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.logprob_result_processor import SchedulerLogprobResultProcessor
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req("scored", "", array("q", ids), SamplingParams(max_new_tokens=1), return_logprob=True)
    req.logprob_start_len = start
    processor = SchedulerLogprobResultProcessor(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    with configured():
        processor._process_input_token_logprobs(req, [0.0] * (len(ids) - start))
    return list(req.logprob.input_token_logprobs_idx)
