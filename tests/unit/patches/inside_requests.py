"""Inside a tree's Python: what the tokenizer manager and the scheduler make of one request."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from .configured import configured
from .sampling import Absent

VOCABULARY = 2048


def refused(request: dict[str, Any], input_ids: list[int] | None) -> str | None:
    """What the tokenizer manager answers with 400 before the scheduler sees the request; None: it would be served."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    asked = GenerateReqInput(**request)
    asked.normalize_batch_and_arguments()
    manager = object.__new__(TokenizerManager)
    manager.__dict__.update(
        context_len=64,
        num_reserved_tokens=0,
        allow_auto_truncate=False,
        validate_total_tokens=True,
        is_generation=True,
        model_config=Absent(vocab_size=VOCABULARY),
    )
    with configured() as server_args:
        manager.server_args = server_args
        try:
            manager._validate_one_request(asked, input_ids)
        except ValueError as error:
            return str(error)
    return None


def refused_sampling(parameters: dict[str, Any]) -> str | None:
    """What the tokenizer manager says to sampling parameters, as `refused`."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    asked = SamplingParams(**parameters)
    asked.normalize(None)
    try:
        asked.verify(VOCABULARY)
    except ValueError as error:
        return str(error)
    return None


def queued(algorithm: str, request: dict[str, Any]) -> dict[str, Any]:
    """What the scheduler queues for a request of three tokens: why it will be aborted, if so, and what it wants."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    waiting: list[Any] = []
    more = request.pop("sampling", {})
    params = SamplingParams(max_new_tokens=request.pop("max_new_tokens"), temperature=0.0, **more)
    params.normalize(SimpleNamespace(encode=lambda *_, **__: [0]))
    plain = {
        **dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")),
        "input_text": "",
        "stream": False,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
    }
    asked = TokenizedGenerateReqInput(
        rid="one", input_ids=array("q", [5, 6, 7]), sampling_params=params, **{**plain, **request}
    )
    scheduler = object.__new__(Scheduler)
    scheduler.__dict__.update(
        spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        enable_overlap=True,
        enable_session_radix_cache=False,
        disaggregation_mode=DisaggregationMode.NULL,
        model_config=SimpleNamespace(vocab_size=VOCABULARY, hf_eos_token_id=set()),
        metrics_collector=None,
        metrics_reporter=SimpleNamespace(enable_metrics=False),
        dllm_config=None,
        tokenizer=None,
        max_new_tokens_limit=None,
        max_req_len=64,
        max_req_input_len=60,
        max_total_num_tokens=1024,
        page_size=1,
        kv_events_publisher=SimpleNamespace(enable_kv_cache_events=False),
        tree_cache=SimpleNamespace(cache_controller=None),
        kv_shard_widening=1,
        token_to_kv_pool_allocator=SimpleNamespace(max_new_tokens_for_memory=lambda prompt, wanted, **_: wanted),
        sliding_window_size=None,
        chunked_prefill_size=None,
        grammar_manager=SimpleNamespace(process_req_with_grammar=lambda req: False),
        _add_request_to_queue=waiting.append,
    )
    with configured() as scheduler.server_args:
        scheduler.handle_generate_request(asked)
    (req,) = waiting
    return {
        "aborted": None if req.to_finish is None else req.to_finish.message,
        "return_logprob": req.return_logprob,
        "logprob_start_len": req.logprob_start_len,
        "max_new_tokens": req.sampling_params.max_new_tokens,
    }
