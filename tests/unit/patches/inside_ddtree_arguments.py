"""Inside a tree's Python: DDTREE's arguments as a server resolves them, and the widths that follow."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

from .bases import here
from .configured import configured

GIVEN: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "speculative_algorithm": "DDTREE",
    "speculative_draft_model_path": "drafter",
    "speculative_ddtree_budget": 16,
    "speculative_ddtree_topk": 4,
}


def resolved(block_size: int | None, arguments: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """{"refused": why} or the speculative arguments after the hook, for a drafter of this block size."""
    from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding
    from sglang.srt.environ import envs
    from sglang.srt.speculative import spec_utils
    from sglang.srt.utils import hf_transformers_utils

    config = SimpleNamespace(architectures=["DFlashDraftModel"], num_hidden_layers=3, block_size=block_size)
    config.dflash_config = {"mask_token_id": 1, "target_layer_ids": [1, 2], "block_size": block_size}
    hf_transformers_utils.get_config = lambda *_, **__: config
    switches = {name: getattr(envs, name) for name in environment if name != "SIMULATE_ACC_LEN"}
    spec_utils.SIMULATE_ACC_LEN = float(environment.get("SIMULATE_ACC_LEN", "-1"))
    for name, switch in switches.items():
        switch.set(environment[name] == "1")
    try:
        with here().resolving({**GIVEN, **arguments}) as (server_args, resolution):
            try:
                handle_speculative_decoding(server_args)
            except ValueError as error:
                return {"refused": str(error)}
            names = ("num_draft_tokens", "dflash_block_size", "eagle_topk", "num_steps", "ddtree_budget", "ddtree_topk")
            return {name: resolution(f"speculative_{name}") for name in names} | {
                "draft_backend": resolution("speculative_draft_attention_backend")
            }
    finally:
        for switch in switches.values():
            switch.clear()
        spec_utils.SIMULATE_ACC_LEN = -1.0


def refused_target(change: dict[str, Any]) -> list[str]:
    """What of a loaded target is refused."""
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.speculative import ddtree_args

    named = {"attn_backend": "TritonAttnBackend", "token_to_kv_pool": "MHATokenToKVPool", **change}
    made = {name: type(named[name], (), {})() for name in ("attn_backend", "token_to_kv_pool")}
    for name, value in named.get("pool", {}).items():
        setattr(made["token_to_kv_pool"], name, value)
    kept = hybrid_arch.mambaish_config
    hybrid_arch.mambaish_config = lambda _: named.get("mamba")
    try:
        runner = SimpleNamespace(
            **made,
            sliding_window_size=named.get("window"),
            model_config=SimpleNamespace(vocab_size=100),
            model=SimpleNamespace(
                lm_head=SimpleNamespace(**{"num_added_embeddings": 0, "tp_size": 2, **named.get("head", {})})
            ),
        )
        with here().of_two_ranks(runner, named.get("topk", 8)):
            return list(ddtree_args.unsupported_runner(runner))
    finally:
        hybrid_arch.mambaish_config = kept


def widths() -> dict[str, Any]:
    """What the algorithm answers where SGLang asks: predicates, widths of both runners, dummy inputs, the relay."""
    import torch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm, create_dummy_verify_input
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo
    from sglang.srt.speculative.spec_utils import resolve_num_tokens_per_req, spec_need_hidden_states

    arguments = {**GIVEN, "speculative_num_draft_tokens": 17, "speculative_dflash_block_size": 8}
    with configured(**arguments) as server_args:
        algorithm = SpeculativeAlgorithm.from_string("ddtree")
        given = here().handed(server_args)
        told: dict[str, Any] = {
            "predicates": [algorithm.is_ddtree(), algorithm.is_dflash_family(), algorithm.is_dflash()],
            "plugin": CustomSpecAlgo.is_ddtree(SimpleNamespace()),
            "worker": algorithm.create_worker(server_args).__name__,
            "relay": spec_need_hidden_states(*given),
        }
        for name, draft in (("target", False), ("draft", True)):
            asked = partial(resolve_num_tokens_per_req, spec_algorithm=algorithm, is_draft_worker=draft)
            width = here().verify_width(asked, server_args)
            mask = torch.ones(10, dtype=torch.bool)
            dummy = create_dummy_verify_input(algorithm, *given, mask, width, draft)
            told[name] = [width, type(dummy).__name__, dummy.draft_token_num, dummy.custom_mask is mask]
        try:
            create_dummy_verify_input(algorithm, *given, None, 17, False)
        except ValueError as error:
            told["maskless"] = str(error)
    return told


def flags() -> list[str]:
    """What a command line may say about trees."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return [word for word in parser._option_string_actions if "ddtree" in word]


def mask_padding() -> str:
    """What a backend is told that would pad a mask of the wrong size."""
    import torch
    from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput

    made = DDTreeVerifyInput(
        draft_token=None, positions=None, draft_token_num=4, custom_mask=torch.ones(3, dtype=torch.bool)
    )
    try:
        made.generate_attn_arg_prefill(torch.zeros(1), torch.zeros(1), 1, torch.zeros(1, 1))
    except NotImplementedError as error:
        return str(error)
    return json.dumps("padded")


def refused_request(sampling: dict[str, Any], more: dict[str, Any]) -> str | None:
    """What the scheduler answers a request with under DDTREE and overlap."""
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.dflash_utils import validate_dflash_request
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    params = SamplingParams(**{"max_new_tokens": 4, "temperature": 0.0, **sampling})
    params.normalize(SimpleNamespace(encode=lambda *_, **__: [0]))
    plain = {
        **dict.fromkeys(("custom_logit_processor", "input_embeds", "positional_embed_overrides")),
        **dict.fromkeys(("return_logprob", "return_hidden_states", "return_sampling_mask"), False),
    }
    req = SimpleNamespace(sampling_params=params, **{**plain, **more})
    return validate_dflash_request(req, True, SpeculativeAlgorithm.DDTREE)
