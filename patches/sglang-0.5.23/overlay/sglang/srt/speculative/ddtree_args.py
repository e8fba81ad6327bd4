"""DDTREE: its server arguments, what follows from them, and by name all that it does not serve."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import attn_dp_enabled_of, get_parallel, get_spec
from sglang.srt.speculative.ddtree_build import node_count
from sglang.srt.speculative.ddtree_ladder import parse_ladder
from sglang.srt.speculative.ddtree_sampling import PLAIN, asked_budget

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.server_args import ServerArgs


def handle_ddtree(server_args: ServerArgs) -> None:
    """Check the arguments and declare what follows from them.

    Afterwards speculative_num_draft_tokens is W = budget + 1, which sizes the verify, and
    speculative_dflash_block_size is B, the width of one draft pass. Raises ValueError that names the argument.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.arg_groups.speculative_hook import _handle_dflash

    given = resolving_view(server_args)
    budget, topk = given.speculative_ddtree_budget, given.speculative_ddtree_topk
    for name, value in (("budget", budget), ("topk", topk)):
        if value is None or value < 1:
            raise ValueError(f"DDTREE needs --speculative-ddtree-{name} of at least 1, got {value}.")
    width = given.speculative_num_draft_tokens
    if width not in (None, budget + 1):
        raise ValueError(
            f"DDTREE verifies budget + 1 = {budget + 1} nodes; --speculative-num-draft-tokens {width} contradicts it."
        )
    if given.speculative_draft_model_path is None:
        raise ValueError("DDTREE requires setting --speculative-draft-model-path.")
    for why in unsupported(server_args):
        raise ValueError(f"DDTREE does not support {why} yet.")
    block = _block_size(given)
    there = node_count(block, topk, budget)
    if there < budget:
        raise ValueError(
            f"DDTREE: a block of {block} and --speculative-ddtree-topk {topk} give {there} nodes, not "
            f"--speculative-ddtree-budget {budget}; lower the budget or raise topk."
        )
    # a rung's budget is below the largest, so it has its nodes
    parse_ladder(given.speculative_ddtree_ladder, budget)
    widths = {"speculative_dflash_block_size": block, "speculative_num_draft_tokens": block}
    declare_resolution(server_args, "handle_ddtree", **widths)
    # What a draft pass needs is DFLASH's: the draft's attention backend, steps and topk of 1, running requests.
    _handle_dflash(server_args)
    declare_resolution(server_args, "handle_ddtree", speculative_num_draft_tokens=budget + 1)


def check_flags(server_args: ServerArgs) -> None:
    """Before anything is resolved. Raises ValueError where another algorithm, or none, is given DDTREE's flags, which
    nobody would read, and for what SGLang would turn off with a warning only."""
    if server_args.speculative_algorithm == "DDTREE" and server_args.speculative_adaptive:
        raise ValueError("DDTREE does not support --speculative-adaptive yet.")
    for name in ("speculative_ddtree_budget", "speculative_ddtree_topk", "speculative_ddtree_ladder"):
        if getattr(server_args, name) is not None and server_args.speculative_algorithm != "DDTREE":
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} needs --speculative-algorithm DDTREE, got {server_args.speculative_algorithm}.")


def unsupported(server_args: ServerArgs) -> list[str]:
    """What of these arguments DDTREE does not serve, by the names that an operator gave. What only the loaded model
    tells (sliding windows, recurrent layers, the KV pool) is `unsupported_runner`'s."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view, resolving_view
    from sglang.srt.environ import envs
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    view, given = resolved_view(server_args), resolving_view(server_args)
    prefill, decode = attention_backends_of(view)
    branches = given.speculative_ddtree_topk > 1
    steps, eagle_topk = given.speculative_num_steps, given.speculative_eagle_topk
    found = {
        f"device {given.device}": not given.device.startswith("cuda"),
        f"attention backends {prefill} and {decode} (--attention-backend triton)": {prefill, decode} != {"triton"},
        "--enable-dp-attention or --attn-dp-size": bool(attn_dp_enabled_of(view)),
        f"--attn-cp-size {given.attn_cp_size}": given.attn_cp_size != 1,
        f"--pp-size {given.pp_size}": given.pp_size != 1,
        f"--dcp-size {given.dcp_size}": given.dcp_size != 1,
        # SGLang's kernel that hands out pages counts within one by a power of two.
        f"--page-size {given.page_size}, no power of two,": not _is_power_of_two(given.page_size or 1),
        "--enable-deterministic-inference": bool(given.enable_deterministic_inference),
        "--enable-two-batch-overlap": bool(given.enable_two_batch_overlap),
        "--enable-pdmux": bool(given.enable_pdmux),
        "--enable-lora": bool(given.enable_lora),
        f"--disaggregation-mode {given.disaggregation_mode}": given.disaggregation_mode != "null",
        f"--speculative-num-steps {steps}": steps not in (None, 1),
        f"--speculative-eagle-topk {eagle_topk} (use --speculative-ddtree-topk)": eagle_topk not in (None, 1),
        "--speculative-use-rejection-sampling": bool(given.speculative_use_rejection_sampling),
        "--speculative-draft-window-size": given.speculative_draft_window_size is not None,
        "--disable-cuda-graph-padding": bool(given.disable_cuda_graph_padding),
        # Its slots are renamed between the table and the kernels, and drafts may live in the target's.
        "--enable-unified-memory": bool(given.enable_unified_memory),
        # Rows of nodes, where an answer wants its tokens'.
        "--enable-return-routed-experts": bool(given.enable_return_routed_experts),
        "--enable-return-indexer-topk": bool(given.enable_return_indexer_topk),
        # It keeps a note beside each slot, which does not move with the slot's KV.
        f"--kv-canary {given.kv_canary} with branches": given.kv_canary != "none" and branches,
        "SGLANG_SIMULATE_ACC_LEN": SIMULATE_ACC_LEN > 0,
        "SGLANG_DFLASH_EAGER_DRAFT_SAMPLER": bool(envs.SGLANG_DFLASH_EAGER_DRAFT_SAMPLER.get()),
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": bool(envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get()),
    }
    return [what for what, asked in found.items() if asked]


def unsupported_runner(runner: Any) -> list[str]:
    """What of the loaded target DDTREE does not serve. runner: the target's ModelRunner, its backend made."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    backend = type(runner.attn_backend).__name__
    pool = type(runner.token_to_kv_pool).__name__
    # Asked of the whole head: a rank that refused by its own shard alone would leave the others waiting for it.
    head = getattr(runner.model, "lm_head", None)
    vocabulary, topk = int(runner.model_config.vocab_size), int(get_spec().speculative_ddtree_topk)
    found = {
        f"the attention backend {backend}": backend != "TritonAttnBackend",
        f"a sliding window of {runner.sliding_window_size}": runner.sliding_window_size is not None,
        "a target with recurrent layers": mambaish_config(runner.model_config) is not None,
        f"a KV pool of type {pool}": pool not in ("MHATokenToKVPool", "MLATokenToKVPool"),
        "KV in the HND layout": bool(getattr(runner.token_to_kv_pool, "use_hnd", False)),
        f"--speculative-ddtree-topk {topk} over a vocabulary of {vocabulary}": topk > vocabulary,
        "a head with added vocabulary": getattr(head, "num_added_embeddings", 0) > 0,
        "a head that every rank has whole": get_parallel().tp_size > getattr(head, "tp_size", get_parallel().tp_size),
        "quantised KV with scales": getattr(runner.token_to_kv_pool, "k_scale_buffer", None) is not None,
    }
    return [what for what, there in found.items() if there]


def path_dependent(req: Req) -> list[str]:
    """The parameters of a request whose effect on a token depends on the tokens before it, by name: a verify would have
    to apply them node by node."""
    params = req.sampling_params
    found = {
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "min_new_tokens": params.min_new_tokens > 0,
    }
    return [name for name, there in found.items() if there]


def refused_request(req: Req) -> str | None:
    """Why a request is answered with 400, or None."""
    params = req.sampling_params
    budget = asked_budget(req)
    found = {
        f"custom_params {PLAIN} other than 0": budget is not None and (type(budget) is not int or budget != 0),
        "json_schema": params.json_schema is not None,
        "regex": params.regex is not None,
        "ebnf": params.ebnf is not None,
        "structural_tag": params.structural_tag is not None,
        "custom_logit_processor": req.custom_logit_processor is not None,
        "return_hidden_states": bool(req.return_hidden_states),
        "return_sampling_mask": bool(req.return_sampling_mask),
        "input embeddings": req.input_embeds is not None or req.positional_embed_overrides is not None,
    }
    asked = [*path_dependent(req), *(name for name, there in found.items() if there)]
    return f"DDTREE speculative decoding does not support {', '.join(asked)} yet." if asked else None


def longest_drafted_path(spec: Any) -> int:
    """The most drafts that one verify can accept: a tree's depth, a chain's length.

    spec: server arguments, or the ``spec`` part of the configuration. SGLang's accept rate divides by it.
    """
    budget = getattr(spec, "speculative_ddtree_budget", None)
    if budget is not None:
        return min(int(budget), int(spec.speculative_dflash_block_size) - 1)
    return int(spec.speculative_num_draft_tokens) - 1


def slots_per_step(spec: Any) -> int:
    """KV slots that one step writes for a request: a tree's W, and no fewer than the drafter's block, which uses the
    first of the same slots."""
    width = int(spec.speculative_num_draft_tokens)
    if getattr(spec, "speculative_ddtree_budget", None) is None:
        return width
    return max(width, int(spec.speculative_dflash_block_size))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _block_size(server_args: ServerArgs) -> int:
    """The drafter's own block size. Raises ValueError where it has none, or another is asked for."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )
    block = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    asked = server_args.speculative_dflash_block_size
    if block is None or int(block) < 2:
        raise ValueError(f"DDTREE: the drafter's configuration has no usable block_size, got {block}.")
    if asked not in (None, int(block)):
        raise ValueError(f"DDTREE: --speculative-dflash-block-size {asked} is not the drafter's {block}.")
    return int(block)
