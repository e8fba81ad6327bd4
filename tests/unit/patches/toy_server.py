"""Inside a tree's Python with Triton's interpreter: the DDTREE worker with memory and backend, over a toy target.

SGLang's own: the worker from its decode entry on, the verify input, the forward batch, the Triton backend (its
metadata, offsets and buffers, and the attention kernel), the KV pool. Given: the toy's arithmetic around attention, and
a drafter whose logits favour the text that the target will write, more or less. While the target runs, the table of
slots is overwritten, as the scheduler may do from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from .backend import triton_backend
from .toy import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, Toy

SLOTS, COLUMNS = 400, 96


class _Event:
    """On a CPU everything has happened."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


@dataclass
class Setting:
    """One server: ``graphs`` is the largest captured batch size, 0 for none."""

    block: int
    budget: int
    topk: int
    graphs: int
    ladder: str | None = None
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.budget + 1

    def arguments(self) -> dict[str, Any]:
        return {
            "speculative_algorithm": "DDTREE",
            "speculative_ddtree_budget": self.budget,
            "speculative_ddtree_topk": self.topk,
            "speculative_ddtree_ladder": self.ladder,
            "speculative_num_draft_tokens": self.width,
            "speculative_dflash_block_size": self.block,
            "speculative_eagle_topk": 1,
            "speculative_num_steps": 1,
        }


class Graphs:
    """A captured verify: the metadata is made once, and replayed for as many requests as were captured."""

    def __init__(self, runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int) -> None:
        """As SGLang's runner of graphs is made."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput

        self.capture_bs, width, backend = (
            runner.server_args.cuda_graph_config.decode.bs,
            *(
                speculative_num_draft_tokens,
                attn_backend,
            ),
        )
        self.max_bs, self.captured_req_width, self.backend = max(self.capture_bs), width, backend
        backend.init_cuda_graph_state(self.max_bs, self.max_bs * width)
        spec_info = DDTreeVerifyInput(
            draft_token=None, positions=None, draft_token_num=width, custom_mask=backend.verify_mask.buffer
        )
        self.mode = ForwardMode.TARGET_VERIFY
        backend.init_forward_metadata_out_graph(self._view(spec_info, [0] * self.max_bs, [1] * self.max_bs), True)
        self.metadata = backend.forward_metadata

    def _view(self, spec_info: Any, rows: list[int], lens: list[int]) -> Any:
        return SimpleNamespace(
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(lens),
            seq_lens_sum=None,
            forward_mode=self.mode,
            spec_info=spec_info,
            encoder_lens=None,
            out_cache_loc=None,
        )

    def can_run_graph(self, batch: Any) -> bool:
        return bool(batch.batch_size <= self.max_bs)

    def load_batch(self, batch: Any) -> None:
        more = self.max_bs - batch.batch_size
        view = self._view(
            batch.spec_info, batch.req_pool_indices.tolist() + [0] * more, batch.seq_lens.tolist() + [1] * more
        )
        self.backend.init_forward_metadata_out_graph(view)


class Server:
    """The worker after an ``__init__`` that loaded nothing, and the memory that it works on."""

    def __init__(self, setting: Setting, toy: Toy, seed: int, debug: bool, head: Any = None) -> None:
        """head: this rank's part of the drafter's, where there are ranks; the worker then looks for it itself."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.setting, self.toy, self.debug, self.ranked = setting, toy, debug, head is not None
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = MHATokenToKVPool(
            size=SLOTS,
            page_size=1,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.table = torch.zeros(4, COLUMNS, dtype=torch.int32)
        self.table[1:] = (torch.randperm(SLOTS, generator=self.generator)[: 3 * COLUMNS] + 1).view(3, COLUMNS).int()
        self.true_table = self.table.clone()
        self.appended: list[tuple[torch.Tensor, ...]] = []
        self.texts: list[list[int]] = []
        self.rows: list[int] = []
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            _get_attention_backend=self._backend,
            attn_backend=self._backend(),
            decode_cuda_graph_runner=None,
            device="cpu",
            dtype=torch.float32,
            is_draft_worker=False,
            spec_algorithm=SpeculativeAlgorithm.DDTREE,
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            model_config=SimpleNamespace(model_is_mrope=False, vocab_size=VOCABULARY),
            server_args=SimpleNamespace(
                enable_lora=False,
                enable_return_hidden_states=False,
                cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=list(range(1, setting.graphs + 1)))),
            ),
            model=SimpleNamespace(
                get_input_embeddings=lambda: torch.nn.Embedding(VOCABULARY, HIDDEN),
                lm_head=head or SimpleNamespace(weight=torch.eye(VOCABULARY)),
            ),
        )
        if setting.graphs:
            self.runner.decode_cuda_graph_runner = Graphs(
                self.runner, attn_backend=self.runner.attn_backend, speculative_num_draft_tokens=setting.width
            )
        self.worker = self._worker()

    def _backend(self, init_new_workspace: bool = False) -> Any:
        return triton_backend(
            self.pool, self.table, heads=HEADS, kv_heads=KV_HEADS, v_head_dim=HEAD_DIM, context_len=COLUMNS - 20
        )

    def _worker(self) -> Any:
        from sglang.srt.speculative import ddtree_worker, dflash_worker_v2
        from sglang.srt.speculative.ddtree_checks import AGREEMENTS, Checks
        from sglang.srt.speculative.ddtree_ladder import Ladder, parse_ladder
        from sglang.srt.speculative.ddtree_verify import PathMover

        def block(**out: Any) -> None:
            """What the Triton kernel writes (kernels/ops/speculative/dflash.py)."""
            offsets = torch.arange(self.setting.block)
            out["block_ids_out"].fill_(out["mask_token_id"])
            out["block_ids_out"][:, 0] = out["bonus_tokens"]
            out["positions_out"].copy_(out["prefix_lens"][:, None] + offsets)

        dflash_worker_v2._prepare_dflash_draft_block_unchecked = block
        vars(torch.cpu)["Event"] = _Event
        setting = self.setting
        levels = min(setting.block - 1, setting.budget)
        checks = Checks(setting.block, levels)
        checks._debug, checks._agreements = self.debug, AGREEMENTS if self.ranked else 0
        worker = object.__new__(ddtree_worker.DDTreeWorker)
        worker.__dict__.update(
            block_size=setting.block,
            device="cpu",
            ps=SimpleNamespace(tp_rank=0),
            model_runner=self.runner,
            _target_worker=SimpleNamespace(model_runner=self.runner, forward_batch_generation=self._target),
            draft_model_runner=SimpleNamespace(forward=self._draft, decode_cuda_graph_runner=None),
            _append_target_hidden_to_draft_kv_by_loc=self._append,
            _draft_block_ids_buf=None,
            _draft_block_spec_info=None,
            _mask_token_id=1,
            _need_mamba_verify_commit=False,
            _use_triton_prepare_block=True,
            _warned_sampling_fallback=True,
            use_compact_draft_cache=False,
            _topk=setting.topk,
            _budget=setting.budget,
            _width=setting.width,
            _levels=levels,
            _reserved=max(setting.width, setting.block),
            _offsets=torch.arange(max(setting.width, setting.block)),
            _steps=[],
            _mover=PathMover(ddtree_worker.kv_buffers(self.pool)),
            _checks=checks,
            _ladder=Ladder(self.runner, parse_ladder(setting.ladder, setting.budget)),
        )
        worker._ladder.build()
        if self.ranked:
            worker._draft_sampler = worker._maybe_build_draft_sampler()
            return worker
        head = {"weight": torch.eye(VOCABULARY), "num_org": VOCABULARY, "org_vocab_start": 0, "max_bs": 3}
        worker._draft_sampler = worker._make_draft_sampler(block_size=setting.block, **head)
        return worker

    def _draft(self, batch: Any) -> Any:
        """Hidden states that are logits: noise, and a preference for what the target will write at each place."""
        bs, block = batch.batch_size, self.setting.block
        logits = torch.randn(bs, block, VOCABULARY, generator=self.generator)
        for place, start in enumerate(batch.positions.view(bs, block)[:, 0].tolist()):
            i = self.rows[place]
            for j in range(1, block):
                favour = 4 * float(torch.rand((), generator=self.generator)) - 0.5
                logits[place, j, self.texts[i][start + j]] += favour
        hidden = logits.view(bs * block, -1)
        if self.setting.graphs:
            self.worker._draft_sampler(hidden, batch.input_ids)
        return SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=hidden), can_run_graph=bool(self.setting.graphs)
        )

    def _append(self, **given: torch.Tensor) -> None:
        self.appended.append(tuple(given[n] for n in ("target_hidden", "cache_loc_2d", "positions", "commit_lens")))

    def _target(self, *, forward_batch: Any, skip_attn_backend_init: bool = False, **_: Any) -> Any:
        """The toy over the backend as it is now, which for a graph is as it was captured."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        graphs, backend = self.runner.decode_cuda_graph_runner, self.runner.attn_backend
        captured = graphs is not None and graphs.can_run_graph(forward_batch)
        if not skip_attn_backend_init and captured:
            graphs.load_batch(forward_batch)
        elif not skip_attn_backend_init:
            backend.init_forward_metadata(forward_batch)
        if captured:
            backend.forward_metadata = graphs.metadata
        # From here on the scheduler may do with the table what it likes.
        kept = self.table.clone()
        self.table.fill_(SLOTS)
        tokens, positions, loc = forward_batch.input_ids, forward_batch.positions, forward_batch.out_cache_loc
        real = len(tokens)
        if captured:
            more = (0, graphs.max_bs * graphs.captured_req_width - real)
            tokens, positions, loc = (torch.nn.functional.pad(x, more) for x in (tokens, positions, loc))
        batch = SimpleNamespace(forward_mode=forward_batch.forward_mode, out_cache_loc=loc)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return backend.forward_extend(q.reshape(len(tokens), -1), k, v, attention(layer), batch)  # type: ignore[no-any-return]

        rows = self.toy.forward(tokens, positions, attend)
        self.table.copy_(kept)
        output = LogitsProcessorOutput(next_token_logits=rows.logits[:real], hidden_states=rows.features[:real])
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=captured)

    def prefill(self, row: int, prompt: list[int]) -> None:
        """The prompt's KV, densely."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        loc = self.table[row, : len(prompt)].long()
        for layer, (k, v) in enumerate(dense_kv(self.toy, prompt)):
            self.pool.set_kv_buffer(attention(layer), KVWriteLoc(loc), k, v)


def attention(layer: int) -> Any:
    """What the backend reads of a RadixAttention."""
    from sglang.srt.layers.radix_attention import AttentionType

    return SimpleNamespace(
        layer_id=layer,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        head_dim=HEAD_DIM,
        k_scale=None,
        v_scale=None,
        logit_cap=0.0,
        logit_capping_method="tanh",
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        sliding_window_size=-1,
        scaling=HEAD_DIM**-0.5,
        xai_temperature_len=-1,
    )


def dense_kv(toy: Toy, text: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, [len(text), KV_HEADS, HEAD_DIM] each."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found.append((k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k.expand(-1, HEADS, -1)) * HEAD_DIM**-0.5
        weights = scores.masked_fill(torch.ones(len(text), len(text)).triu(1).bool(), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.expand(-1, HEADS, -1)).reshape(len(text), -1)

    toy.forward(torch.tensor(text), torch.arange(len(text)), attend)
    return found
