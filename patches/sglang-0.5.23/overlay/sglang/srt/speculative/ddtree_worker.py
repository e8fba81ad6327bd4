"""DDTREE: the worker. DFLASH's draft, then a verify of trees instead of a chain.

Two widths: B, the drafter's block (``block_size``), is the width of the draft pass, of the longest path, of the
result's stride and of what is appended to the drafter's KV; W = budget + 1 is the width of the verify. No step waits
for the device; what a step decides (the trees, the walk, the path's rows) stays there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.ddtree_args import unsupported_runner
from sglang.srt.speculative.ddtree_build import DraftTrees, root_trees
from sglang.srt.speculative.ddtree_canary import canary_tree, run_canary, unwatched
from sglang.srt.speculative.ddtree_checks import Checks, check_graphs
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput, Executed, snapshot_lists
from sglang.srt.speculative.ddtree_ladder import Ladder, parse_ladder
from sglang.srt.speculative.ddtree_mask import mask_cells, write_mask
from sglang.srt.speculative.ddtree_sampler import DDTreeDraftSampler
from sglang.srt.speculative.ddtree_sampling import plain_rows, sampled_nodes
from sglang.srt.speculative.ddtree_verify import PathMover, path_rows, walk
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

logger = logging.getLogger(__name__)

CANARY_PREFIXES = (1, 3)
"""Prefix lengths of the canary's requests: different, so that a second request's mask offset counts."""


class DDTreeWorker(DFlashWorkerV2):
    """DFLASH's worker with trees. Prefill, the draft pass and the drafter's KV are the parent's."""

    verifies_tree = True
    _draft_sampler: DDTreeDraftSampler | None
    _mover: PathMover
    _ladder: Ladder

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        """Raises ValueError for a target that DDTREE does not serve."""
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if self.selector is not None or self.lilicorr is not None or self._is_domino:
            raise ValueError("DDTREE does not support drafts with a selector or a head of their own yet.")
        self._topk = int(get_spec().speculative_ddtree_topk)
        self._budget = int(get_spec().speculative_ddtree_budget)
        self._width = self._budget + 1
        self._levels = min(int(self.block_size) - 1, self._budget)
        self._reserved = max(self._width, int(self.block_size))
        # What the metrics call the active number of draft tokens.
        self.speculative_num_draft_tokens = self._width
        self._offsets = torch.arange(self._reserved, dtype=torch.int64, device=self.device)
        self._steps: deque[tuple[Any, tuple[Tensor, Tensor, Tensor]]] = deque(maxlen=2)
        self._checks = Checks(int(self.block_size), self._levels)

    @staticmethod
    def _drafted_block() -> int:
        return int(get_spec().speculative_dflash_block_size)

    def _defer_target_verify_gather(self) -> None:
        """The logits of all nodes are read on every rank, so they are gathered where they are made."""

    def prewarm_sampling(self) -> Any:
        """The parent rehearses, over the most nodes that a step can have, kernels that no verify here runs."""
        return self.model_runner.prewarm_sampling()

    def _make_draft_sampler(self, **head: Any) -> DDTreeDraftSampler:
        return DDTreeDraftSampler(budget=self._budget, topk=self._topk, **head)

    def init_attention_backends(self) -> None:
        """Raises ValueError for what only the loaded target tells."""
        super().init_attention_backends()
        if found := unsupported_runner(self.model_runner):
            raise ValueError(f"DDTREE does not support {', '.join(found)} yet.")

    def init_cuda_graphs(self) -> None:
        """Raises RuntimeError where the graphs are not what a tree needs, or where the canary does not come back."""
        super().init_cuda_graphs()
        if self._draft_sampler is None:
            self._draft_sampler = self._maybe_build_draft_sampler()
        if self._draft_sampler is None:
            raise RuntimeError("DDTREE needs the target's head for its draft; the line above says what is in the way.")
        self._mover = PathMover(kv_buffers(self.model_runner.token_to_kv_pool))
        rungs = parse_ladder(get_spec().speculative_ddtree_ladder, self._budget)
        self._ladder = Ladder(self.model_runner, rungs)
        self._ladder.build()
        for built in self._ladder.built:
            self._ladder.take(built.rung.first)
            check_graphs(self.model_runner, self.draft_model_runner, built.rung.budget + 1, int(self.block_size))
            self._run_canary(built.rung.budget + 1)
        self._ladder.take(1)

    def executed_shape(self) -> Executed | None:
        """What the last step verified; None before the first. Waits only if no step is done yet."""
        if not self._steps:
            return None
        done = next((arrays for event, arrays in reversed(self._steps) if event.query()), None)
        if done is None:
            event, done = self._steps[-1]
            event.synchronize()
        return snapshot_lists(done)

    def skips_draft(self, bs: int) -> bool:
        """Whether a batch of so many requests is decoded without drafts. Asked by the parent's decode step."""
        return self._ladder.rung(bs).budget == 0

    def _verify_tree(
        self,
        batch: ScheduleBatch,
        draft_input: DFlashDraftInputV2,
        draft_out: Any,
        on_publish: Callable[[Tensor], None] | None,
    ) -> GenerationBatchResult:
        """The rest of a decode step after the draft pass. Called by the parent's ``forward_batch_generation``.

        draft_out: None where the draft was skipped.
        """
        bs, prefix_lens = len(batch.seq_lens), batch.seq_lens
        self._checks.request(batch)
        width = self._ladder.take(bs).budget + 1
        if draft_out is None:
            trees = root_trees(draft_input.bonus_tokens)
        else:
            trees = self._draft_trees(bs, draft_input, draft_out).cut(width)
        # Before the verify: from then on the scheduler may rewrite the table.
        slots = self._slots(batch.req_pool_indices, prefix_lens)
        verify_input = self._verify_input(trees, prefix_lens, self._prefix_bound(batch, draft_input))
        self._checks.trees(trees, draft_input.bonus_tokens, verify_input, prefix_lens)
        logits_output, can_run_cuda_graph = self._target_verify(batch, draft_input, verify_input, slots)

        logits = logits_output.next_token_logits
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits, sampling_info=batch.sampling_info, draft_token_num=width
        )
        target_predict = sampled_nodes(
            self.model_runner.sampler, logits, batch.sampling_info, verify_input.positions
        ).view(bs, width)
        next_token = trees.next_token
        plain = plain_rows(batch.reqs, logits.device)
        if plain is not None:
            next_token = torch.where(plain.unsqueeze(1), -1, next_token)
        accepted = walk(trees.tokens, next_token, trees.next_sibling, target_predict, block_size=int(self.block_size))
        self._checks.accepted(accepted, trees)
        new_seq_lens = prefix_lens + accepted.commit_lens.to(prefix_lens.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._mover.move(slots, accepted)
        rows = path_rows(accepted, width)
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, target_predict.reshape(-1), accept_index=rows)
        self._append(logits_output.hidden_states, rows, slots, prefix_lens, accepted.commit_lens, width)
        # Avoid copying large hidden-state buffers to CPU in overlap scheduling.
        logits_output.hidden_states = None
        self._remember(trees)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=accepted.commit_lens,
            can_run_cuda_graph=can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens),
            # The stride of next_token_ids, not the width of the verify.
            speculative_num_draft_tokens=int(self.block_size),
            new_seq_lens=new_seq_lens,
        )

    def _draft_trees(self, bs: int, draft_input: DFlashDraftInputV2, draft_out: Any) -> DraftTrees:
        sampler = self._draft_sampler
        assert sampler is not None
        if draft_out.can_run_graph:
            return sampler.captured(bs)
        self._checks.eager(self.draft_model_runner.decode_cuda_graph_runner, bs, "draft")
        hidden = draft_out.logits_output.hidden_states
        with torch.inference_mode():
            return sampler.draw(hidden, draft_input.bonus_tokens.view(-1))

    def _slots(self, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
        """int64 [bs, max(W, B)]: the KV slots that follow each prefix, which the scheduler has reserved."""
        table: Tensor = self.model_runner.req_to_token_pool.req_to_token
        columns = prefix_lens.long().unsqueeze(1) + self._offsets
        return table[req_pool_indices.long().unsqueeze(1), columns.clamp(max=table.shape[1] - 1)].long()

    def _prefix_bound(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2) -> int:
        """No fewer tokens than all prefixes have together, known without asking the device."""
        if draft_input.nxt_kv_lens_sum is not None:
            return int(draft_input.nxt_kv_lens_sum)
        return int(batch.seq_lens_cpu.sum()) + len(batch.seq_lens) * self._reserved

    def _verify_input(self, trees: DraftTrees, prefix_lens: Tensor, prefix_bound: int) -> DDTreeVerifyInput:
        """The verify of these trees, its mask written: into the captured buffer, or a new one where no graph runs."""
        bs = prefix_lens.shape[0]
        captured = self.model_runner.attn_backend.verify_mask
        if captured is not None and captured.fits(bs):
            mask = captured.buffer
        else:
            cells = mask_cells(bs, trees.parents.shape[1], prefix_bound)
            mask = torch.empty((cells,), dtype=torch.uint8, device=prefix_lens.device)
        write_mask(mask, trees.parents, prefix_lens, self._levels)
        return DDTreeVerifyInput(
            draft_token=trees.tokens.reshape(-1),
            positions=(prefix_lens.long().unsqueeze(1) + trees.depths).reshape(-1),
            draft_token_num=trees.parents.shape[1],
            topk=self._topk,
            custom_mask=mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def _target_verify(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, verify_input: DDTreeVerifyInput, slots: Tensor
    ) -> tuple[Any, bool]:
        """(logits and hidden states of all nodes, whether a graph ran)."""
        batch.out_cache_loc = slots[:, : verify_input.draft_token_num].reshape(-1)
        known_lens, known_sum = batch.seq_lens_cpu, batch.seq_lens_sum
        # Upper bounds on the host, which lags the device by one step under overlap.
        if known_lens is not None:
            batch.seq_lens_cpu = known_lens + int(self.block_size)
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        elif draft_input.nxt_kv_lens_cpu is not None:
            batch.seq_lens_cpu = draft_input.nxt_kv_lens_cpu
            batch.seq_lens_sum = int(draft_input.nxt_kv_lens_sum)
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = known_lens, known_sum
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        if not out.can_run_cuda_graph:
            self._checks.eager(self.model_runner.decode_cuda_graph_runner, len(batch.seq_lens), "verify")
        return out.logits_output, out.can_run_cuda_graph

    def _append(
        self, hidden: Tensor | None, rows: Tensor, slots: Tensor, prefix_lens: Tensor, commit_lens: Tensor, width: int
    ) -> None:
        """The accepted path's hidden states, in the text's order, into the drafter's KV."""
        if hidden is None:
            raise RuntimeError("DDTREE verify requires target hidden states, but got None.")
        # No path is longer than what was verified: with budget 0, one node.
        longest = min(int(self.block_size), width)
        cache_loc, rows = slots[:, :longest].contiguous(), rows[:, :longest]
        positions = prefix_lens.long().unsqueeze(1) + self._offsets[:longest]
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.index_select(0, rows.reshape(-1)),
            cache_loc=cache_loc.reshape(-1),
            cache_loc_2d=cache_loc,
            positions=positions.reshape(-1),
            commit_lens=commit_lens,
        )

    def _remember(self, trees: DraftTrees) -> None:
        """Keep what was verified, for whoever asks later; the next draft overwrites the originals."""
        arrays = (trees.tokens.clone(), trees.next_token.clone(), trees.next_sibling.clone())
        event = torch.get_device_module(self.device).Event()
        event.record()
        self._steps.append((event, arrays))

    @torch.inference_mode()
    def _run_canary(self, width: int) -> None:
        """Raises RuntimeError with all that is wrong. Slots and table rows that it uses are free before and after.

        width: of a rung's trees; those of one node have no mask that could be wrong.
        """
        if width == 1:
            return
        pool, table = self.model_runner.token_to_kv_pool, self.model_runner.req_to_token_pool.req_to_token
        vocab_size = int(self.model_runner.model_config.vocab_size)
        prefixes = CANARY_PREFIXES[: min(table.shape[0] - 1, len(CANARY_PREFIXES))]
        tree = canary_tree(width, self._levels, vocab_size)
        rows = torch.arange(1, len(prefixes) + 1, device=self.device)
        length = max(prefixes) + width
        if len(prefixes) * length > pool.size or length > table.shape[1]:
            raise RuntimeError(f"DDTREE: {pool.size} KV slots are too few for the start-up canary, let alone to serve.")
        kept = table[1 : len(prefixes) + 1, :length].clone()
        table[1 : len(prefixes) + 1, :length] = torch.arange(
            1, len(prefixes) * length + 1, dtype=table.dtype, device=table.device
        ).view(len(prefixes), length)
        for buffer in kv_buffers(pool):
            buffer[1 : len(prefixes) * length + 1] = 0
        lens = torch.tensor(prefixes, dtype=torch.int64, device=self.device)
        shape = (len(prefixes), width)
        parents, depths = (torch.tensor(a, device=self.device).expand(shape) for a in (tree.parents, tree.depths))

        def forward(tokens: Tensor) -> Tensor:
            none = torch.full_like(parents, -1)
            trees = DraftTrees(parents.contiguous(), depths, none, none, none, tokens.to(self.device))
            verify_input = self._verify_input(trees, lens, sum(prefixes))
            forward_batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(prefixes),
                input_ids=verify_input.draft_token,
                req_pool_indices=rows,
                seq_lens=lens,
                orig_seq_lens=lens,
                out_cache_loc=self._slots(rows, lens)[:, :width].reshape(-1),
                seq_lens_sum=sum(prefixes),
                seq_lens_cpu=torch.tensor(prefixes, dtype=torch.int64),
                positions=verify_input.positions,
                spec_algorithm=self.model_runner.spec_algorithm,
                spec_info=verify_input,
                capture_hidden_mode=CaptureHiddenMode.FULL,
            )
            self.model_runner.kv_index_translator.bind_own_plan(forward_batch)
            out = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
            if not out.can_run_cuda_graph:
                self._checks.eager(self.model_runner.decode_cuda_graph_runner, len(prefixes), "canary")
            logits: Tensor = out.logits_output.next_token_logits
            return logits.view(*shape, -1).clone()

        half = self.model_runner.dtype != torch.float32
        with unwatched(self.model_runner.canary_manager):
            faults = run_canary(tree, len(prefixes), vocab_size, half, forward)
        table[1 : len(prefixes) + 1, :length] = kept
        # Else the scheduler would take it for the first batch's, and not wait for that one.
        self.model_runner.shared_read_done_event = None
        if faults:
            raise RuntimeError("DDTREE start-up canary: " + "; ".join(faults))
        if get_parallel().tp_rank == 0:
            logger.info("DDTREE start-up canary passed: %d nodes, %d requests.", width, len(prefixes))


def kv_buffers(pool: Any) -> list[Tensor]:
    """The tensors of a KV pool, [slots, ...] each: keys and values of all layers, or MLA's latents."""
    latents = getattr(pool, "kv_buffer", None)
    return list(latents) if latents is not None else [*pool.k_buffer, *pool.v_buffer]
