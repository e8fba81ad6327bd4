"""Faults that can be planted on purpose, to show that the exactness gate catches them. Never on by default.

`python -m ddtree_ops.engine.faults` lists them.
"""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """A planted fault; the text in FAULTS says what breaks, where such a fault comes from, and what hides it."""

    MASK_ROWS_BY_BLOCK_SIZE = "mask-rows-by-block-size"
    MASK_OF_FIRST_REQUEST = "mask-of-first-request"
    MASK_ALL_BLOCKED = "mask-all-blocked"
    ROPE_BY_INDEX = "rope-by-index"
    DUPLICATE_SIBLINGS = "duplicate-siblings"
    BUDGET_CLAMPED = "budget-clamped"
    TOPK_IGNORED = "topk-ignored"
    STALE_KV = "stale-kv"
    BONUS_KV_KEPT = "bonus-kv-kept"
    DRAFT_HIDDEN_OF_WRONG_NODE = "draft-hidden-of-wrong-node"
    BONUS_FROM_PARENT = "bonus-from-parent"
    WALK_PAST_MISMATCH = "walk-past-mismatch"
    LENIENT_ACCEPTANCE = "lenient-acceptance"
    PAD_NODE_ACCEPTED = "pad-node-accepted"
    PADDED_ROWS_WRITE_LIVE_SLOTS = "padded-rows-write-live-slots"
    SLOT_REUSED_AFTER_ABORT = "slot-reused-after-abort"
    ROW_SPILL = "row-spill"
    CACHED_PREFIX_OF_ANOTHER = "cached-prefix-of-another"
    EXTRA_KEY_IGNORED = "extra-key-ignored"
    LOGITS_OF_ANOTHER = "logits-of-another"
    STOP_IN_PATH_IGNORED = "stop-in-path-ignored"
    OVERLONG_OUTPUT = "overlong-output"
    TEMPERATURE_IGNORED = "temperature-ignored"
    GREEDY_ROWS_SAMPLED = "greedy-rows-sampled"
    PARAMETERS_OF_NEIGHBOUR = "parameters-of-neighbour"
    FILTER_ORDER = "filter-order"
    MIN_P_IGNORED = "min-p-ignored"
    PENALTIES_FROZEN = "penalties-frozen"
    RANK_LOCAL_IDS = "rank-local-ids"
    RANK_LOCAL_DRAFT_IDS = "rank-local-draft-ids"


FAULTS: dict[Fault, str] = {
    Fault.MASK_ROWS_BY_BLOCK_SIZE: "mask rows are written block_size apart, read W apart (the Triton backend sized its "
    "buffer for chains); harmless if W == block_size",
    Fault.MASK_OF_FIRST_REQUEST: "every request reads the first one's tree mask (mask_indptr not advanced); harmless "
    "alone, and in a chain, where all masks are one",
    Fault.MASK_ALL_BLOCKED: "tree cells stay closed, so that a node sees the prefix only (a mask buffer zeroed between "
    "its build and its use, as a graph replay does)",
    Fault.ROPE_BY_INDEX: "tree nodes sit at RoPE position L + node index, not L + depth (positions made for a chain); "
    "harmless in a chain and at topk 1",
    Fault.DUPLICATE_SIBLINGS: "the second candidate of every position repeats the first (top-k over shards that were "
    "gathered twice); changes no token, only how many are accepted; harmless in a chain and at topk 1",
    Fault.BUDGET_CLAMPED: "trees have at most block_size - 1 nodes (num_draft_tokens overwritten by the drafter's "
    "block_size, as in SGLang's argument checks); changes no token; harmless in a chain and up to that budget",
    Fault.TOPK_IGNORED: "one candidate a position (SGLang 0.5.17 forces eagle_topk to 1 for DFLASH with a warning); "
    "changes no token; harmless in a chain and at topk 1",
    Fault.STALE_KV: "the accepted path's KV is not moved to the slots after the prefix (a commit made for chains, "
    "where it lies there already); harmless in a chain",
    Fault.BONUS_KV_KEPT: "a finished request keeps one token too many in the cache, the last one, whose KV was never "
    "written (an off-by-one in cache_finished_req); shows in a later turn only, and if the tokens fill whole pages",
    Fault.DRAFT_HIDDEN_OF_WRONG_NODE: "the drafter hears the hidden states of the first nodes, not of the accepted "
    "ones (hidden_states[:accept_length]); changes no token, only how many are accepted; harmless in a chain",
    Fault.BONUS_FROM_PARENT: "the bonus token is the choice after the last accepted node's parent (accept_index read "
    "one early)",
    Fault.WALK_PAST_MISMATCH: "acceptance skips one node that does not match if the node under it does (matches summed "
    "instead of multiplied up to the first miss)",
    Fault.LENIENT_ACCEPTANCE: "a draft within 0.5 nat of the argmax is accepted (typical acceptance, or an accept "
    "threshold below 1 left in the launch command)",
    Fault.PAD_NODE_ACCEPTED: "where no child matches, the mark -1 (no sibling) is taken as an index: the last node of "
    "the tree is accepted",
    Fault.PADDED_ROWS_WRITE_LIVE_SLOTS: "a batch is padded to a power of two with rows that write to the first "
    "request's slots (graph padding with stale out_cache_loc); harmless while 1, 2, 4, 8 or 16 requests run",
    Fault.SLOT_REUSED_AFTER_ABORT: "an abort frees cached pages that can still be found (the abort path releases what "
    "the radix tree owns); shows in whoever shares that prefix after others took the slots",
    Fault.ROW_SPILL: "rows of a verify beyond the context limit are written to the next request's first slots (a "
    "row of req_to_token without reserve); harmless alone and away from the limit",
    Fault.CACHED_PREFIX_OF_ANOTHER: "a cached page is found by its first token alone (children keyed by it, the "
    "rest not compared); harmless where texts that share it are the same",
    Fault.EXTRA_KEY_IGNORED: "all cache namespaces are one (extra_key lost between the API and the radix tree); "
    "changes no token of a healthy cache, but makes a scoring pass adopt what it should check",
    Fault.LOGITS_OF_ANOTHER: "from eight requests on the last one reads the first one's logits (an index taken modulo "
    "a graph's batch size); harmless below C = 8",
    Fault.STOP_IN_PATH_IGNORED: "only the last token of a step is checked for a stop (a check made for one token "
    "a step)",
    Fault.OVERLONG_OUTPUT: "the last step is not cut at max_new_tokens (the same)",
    Fault.TEMPERATURE_IGNORED: "requests that sample are verified greedily (SGLang's DFLASH worker falls back with one "
    "warning where its sampling kernel is missing); harmless at temperature 0",
    Fault.GREEDY_ROWS_SAMPLED: "in a batch with requests that sample, greedy ones are drawn at temperature 1 (SGLang "
    "stores greedy as temperature 1, top_k 1, and the top_k is lost); harmless in a batch of greedy requests",
    Fault.PARAMETERS_OF_NEIGHBOUR: "each request is verified with the next one's sampling parameters (filter_batch "
    "applied to the requests, not to the tensors); harmless alone and where all ask the same",
    Fault.FILTER_ORDER: "top_p is measured on what top_k left, renormalised, where AR applies both jointly (SGLang "
    "0.5.17's DFLASH verify against its sampler); harmless unless both are set",
    Fault.MIN_P_IGNORED: "min_p is not applied (SGLang 0.5.17's DFLASH verify never reads it); harmless at min_p 0",
    Fault.PENALTIES_FROZEN: "all nodes are penalised for the tokens before the step and none for those on their path "
    "(SGLang 0.5.17's DFLASH verify adds one penalty row to all draft rows); harmless without penalties and in AR",
    Fault.RANK_LOCAL_IDS: "two ranks hold half the vocabulary each and the second one's ids lack its offset (a "
    "vocab-parallel argmax)",
    Fault.RANK_LOCAL_DRAFT_IDS: "the same in the drafter's head; changes no token, only how many are accepted",
}

if __name__ == "__main__":
    for fault, text in FAULTS.items():
        print(f"{fault}: {text}")
