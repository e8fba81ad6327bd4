"""Inside a tree's Python with Triton's interpreter: the DDTREE worker with memory and backend, over a toy target.

SGLang's own: the worker from its decode entry on, the verify input, the forward batch, the Triton backend (its
metadata, offsets and buffers, and the attention kernel), the KV pool. Given: the toy's arithmetic around attention, and
a drafter whose logits favour the text that the target will write, more or less. While the target runs, the table of
slots is overwritten, as the scheduler may do from then on.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from .backend import triton_backend
from .bases import here
from .toy import Toy
from .toy_latent import LatentToy

SLOTS, COLUMNS = 400, 96
FAVOUR = (4, 7)
"""Of a few words, and of hundreds, whose noise reaches higher."""


class _Event:
    """On a CPU everything has happened."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


@dataclass
class Setting:
    """One server: ``graphs`` is the largest captured batch size, 0 for none; ``latent``: a target with MLA; ``page``:
    tokens of a page of KV; ``real``: a target of SGLang's own (real_target), which needs `real_target.alone`."""

    block: int
    budget: int
    topk: int
    graphs: int
    ladder: str | None = None
    latent: bool = False
    page: int = 1
    real: str | None = None
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
            "page_size": self.page,
        }

    def toy(self, seed: int) -> Toy:
        if self.real is not None:
            from .real_target import RealTarget

            return RealTarget(self.real)
        return (LatentToy if self.latent else Toy)(seed)


class Graphs:
    """A captured verify: the metadata is made once, and replayed for as many requests as were captured."""

    def __init__(self, runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int) -> None:
        """As SGLang's runner of graphs is made."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.ddtree_base import decode_graphs
        from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput

        self.capture_bs, width, backend = decode_graphs(runner).bs, speculative_num_draft_tokens, attn_backend
        self.runner, self.max_bs, self.captured_req_width, self.backend = runner, max(self.capture_bs), width, backend
        backend.init_cuda_graph_state(self.max_bs, self.max_bs * width)
        spec_info = DDTreeVerifyInput(
            draft_token=None, positions=None, draft_token_num=width, custom_mask=backend.verify_mask.buffer
        )
        self.mode = ForwardMode.TARGET_VERIFY
        backend.init_forward_metadata_out_graph(self._view(spec_info, [0] * self.max_bs, [1] * self.max_bs), True)
        self.metadata = backend.forward_metadata

    def _view(self, spec_info: Any, rows: list[int], lens: list[int]) -> Any:
        view = SimpleNamespace(
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(lens),
            seq_lens_sum=None,
            forward_mode=self.mode,
            spec_info=spec_info,
            encoder_lens=None,
            out_cache_loc=None,
        )
        return here().bound(view, self.runner)

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

    def __init__(
        self,
        setting: Setting,
        toy: Toy,
        seed: int,
        debug: bool,
        table: torch.Tensor | None = None,
        slots: int = SLOTS,
        head: Any = None,
    ) -> None:
        """table: req_to_token over a pool of so many slots (default: three rows that are full). head: this rank's part
        of the drafter's, where there are ranks; the worker then looks for it itself.
        """
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.setting, self.toy, self.debug, self.ranked = setting, toy, debug, head is not None
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = kv_pool(toy, setting.page, slots)
        if table is None:
            table = torch.zeros(4, COLUMNS, dtype=torch.int32)
            table[1:] = (torch.randperm(SLOTS, generator=self.generator)[: 3 * COLUMNS] + 1).view(3, COLUMNS).int()
        self.table = table
        self.true_table = self.table.clone()
        self.appended: list[tuple[torch.Tensor, ...]] = []
        self.texts: list[list[int]] = []
        self.rows: list[int] = []
        #: of each slot the token and the position that the drafter has KV of, where somebody keeps it
        self.drafter: torch.Tensor | None = None
        self.faults: list[str] = []
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
            model_config=SimpleNamespace(model_is_mrope=False, vocab_size=toy.vocabulary),
            server_args=SimpleNamespace(enable_lora=False, enable_return_hidden_states=False),
            model=SimpleNamespace(
                get_input_embeddings=lambda: torch.nn.Embedding(toy.vocabulary, toy.hidden),
                lm_head=head or SimpleNamespace(weight=torch.eye(toy.vocabulary)),
            ),
        )
        here().server_runner(self.runner, setting.graphs)
        if setting.graphs:
            self.runner.decode_cuda_graph_runner = Graphs(
                self.runner, attn_backend=self.runner.attn_backend, speculative_num_draft_tokens=setting.width
            )
        self.worker = self._worker()

    def _backend(self, init_new_workspace: bool = False) -> Any:
        from sglang.srt.configs.model_config import AttentionArch

        shape = self.toy.shape
        return triton_backend(
            self.pool,
            self.table,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            v_head_dim=shape.values,
            context_len=self.table.shape[1] - 20,
            arch=None if self.toy.latents is None else AttentionArch.MLA,
            page_size=self.setting.page,
        )

    def _worker(self) -> Any:
        from sglang.srt.speculative import ddtree_worker
        from sglang.srt.speculative.ddtree_checks import AGREEMENTS, Checks
        from sglang.srt.speculative.ddtree_ladder import Ladder, parse_ladder
        from sglang.srt.speculative.ddtree_verify import PathMover

        vars(torch.cpu)["Event"] = _Event
        setting = self.setting
        levels = min(setting.block - 1, setting.budget)
        checks = Checks(setting.block, levels)
        checks._debug, checks._agreements = self.debug, AGREEMENTS if self.ranked else 0
        worker = object.__new__(ddtree_worker.DDTreeWorker)
        worker.__dict__.update(
            block_size=setting.block,
            device="cpu",
            model_runner=self.runner,
            _target_worker=SimpleNamespace(model_runner=self.runner, forward_batch_generation=self._target),
            draft_model_runner=here().draft_runner(self.runner, self._draft),
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
            **here().worker_fields(),
        )
        worker._ladder.build()
        if self.ranked:
            worker._draft_sampler = worker._maybe_build_draft_sampler()
            return worker
        words = self.toy.vocabulary
        head = {"weight": torch.eye(words), "num_org": words, "org_vocab_start": 0, "max_bs": 3}
        worker._draft_sampler = worker._make_draft_sampler(block_size=setting.block, **head)
        return worker

    def _draft(self, batch: Any) -> Any:
        """Hidden states that are logits: noise, and a preference for what the target will write at each place."""
        bs, block = batch.batch_size, self.setting.block
        if self.drafter is not None:
            self._draft_context(batch, self.drafter)
        logits = torch.randn(bs, block, self.toy.vocabulary, generator=self.generator)
        for place, start in enumerate(batch.positions.view(bs, block)[:, 0].tolist()):
            i = self.rows[place]
            for j in range(1, block):
                favour = FAVOUR[self.toy.vocabulary > 100] * float(torch.rand((), generator=self.generator)) - 0.5
                logits[place, j, self.texts[i][start + j]] += favour
        hidden = logits.view(bs * block, -1)
        if self.setting.graphs:
            self.worker._draft_sampler(hidden, batch.input_ids)
        return SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=hidden), can_run_graph=bool(self.setting.graphs)
        )

    def _draft_context(self, batch: Any, drafter: torch.Tensor) -> None:
        """The drafter's KV of each prefix, and where its block's goes: into the first slots behind it."""
        places = batch.out_cache_loc.view(batch.batch_size, -1)
        for place, length in enumerate(batch.seq_lens.tolist()):
            row, text = self.table[batch.req_pool_indices[place]].long(), self.texts[self.rows[place]]
            wanted = torch.stack((torch.tensor(text[:length]), torch.arange(length)), 1)
            if not torch.equal(drafter[row[:length]], wanted):
                self.faults.append(f"the drafter's KV of request {self.rows[place]}")
            if places[place].tolist() != row[length : length + self.setting.block].tolist():
                self.faults.append(f"the places of the drafted block of request {self.rows[place]}")
        drafter[places.flatten().long()] = -1

    def _append(self, **given: torch.Tensor) -> None:
        self.appended.append(tuple(given[n] for n in ("target_hidden", "cache_loc_2d", "positions", "commit_lens")))

    def _target(self, *, forward_batch: Any, skip_attn_backend_init: bool = False, **_: Any) -> Any:
        """The toy over the backend as it is now, which for a graph is as it was captured."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        here().check_planned(forward_batch)
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
        batch = copy(forward_batch)
        batch.out_cache_loc = loc

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            given = (q.reshape(len(tokens), -1), k, v, self.toy.radix(layer), batch)
            return backend.forward_extend(*given)  # type: ignore[no-any-return]

        rows = self.toy.forward(tokens, positions, attend)
        self.table.copy_(kept)
        output = LogitsProcessorOutput(next_token_logits=rows.logits[:real], hidden_states=rows.features[:real])
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=captured)

    def prefill(self, row: int, prompt: list[int], begin: int = 0) -> None:
        """The prompt's KV from the token ``begin`` on, densely."""
        loc = self.table[row, begin : len(prompt)].long()
        for layer, kept in enumerate(self.toy.kept(prompt)):
            for buffer, values in zip(self.buffers(layer), kept, strict=True):
                buffer[loc] = values[begin:]

    def buffers(self, layer: int) -> list[torch.Tensor]:
        """Of the pool, those that hold what `Toy.kept` says of a layer."""
        if self.toy.latents is not None:
            return [self.pool.kv_buffer[layer]]
        return [self.pool.k_buffer[layer], self.pool.v_buffer[layer]]

    def apart(self, row: int, text: list[int]) -> float:
        """How far the KV of a row is from the text's."""
        slots = self.true_table[row, : len(text)].long()
        return max(
            float((buffer[slots] - values).abs().max())
            for layer, kept in enumerate(self.toy.kept(text))
            for buffer, values in zip(self.buffers(layer), kept, strict=True)
        )


def kv_pool(toy: Toy, page: int, slots: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {
        "size": slots,
        "page_size": page,
        "dtype": torch.float32,
        "layer_num": toy.depth,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if toy.latents is not None:
        return MLATokenToKVPool(**common, kv_lora_rank=toy.latents[0], qk_rope_head_dim=toy.latents[1])
    return MHATokenToKVPool(**common, head_num=toy.shape.kv_heads, head_dim=toy.shape.keys)
