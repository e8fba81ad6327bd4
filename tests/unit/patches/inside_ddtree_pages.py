"""Inside a tree's Python with Triton's interpreter: requests from prefill to end over SGLang's own memory.

Beside what toy_server has of SGLang's: its request, table of slots, allocators, radix cache, reservation before a step,
estimate of that, release. A small scheduler of ours admits, retracts and ends as SGLang's does; with ``lag`` it hears
of a step's result after it has launched the next, as under overlap.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import torch

from .configured import configured
from .planting import plant
from .sampling import Absent, batch_info, sampler
from .toy import VOCABULARY
from .toy_server import Server, Setting

ROWS = 3


@dataclass
class Asked:
    """A request. after: the one whose text it goes on from, of which its prompt is then the text and a little more.
    tokens: that it wants, or as many as the context has; aborted: after so many of them."""

    prompt: int
    tokens: int
    after: int | None = None
    aborted: int | None = None
    number: int = field(init=False, default=-1)


@dataclass
class Running:
    asked: Asked
    req: Any
    got: list[int]
    length: int
    """Of the text whose KV there is on the device."""


class Memory:
    """Of one server. size: slots."""

    def __init__(self, setting: Setting, context: int, size: int, server_args: Any, debug: bool) -> None:
        from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        length = context + get_req_to_token_extra_context_len(server_args)
        self.rows = ReqToTokenPool(ROWS, length, "cpu", False)
        self.server = Server(setting, setting.toy(5), 9, debug, self.rows.req_to_token, size)
        self.server.true_table = self.rows.req_to_token
        common = {"dtype": torch.float32, "device": "cpu", "kvcache": self.server.pool, "need_sort": False}
        if setting.page == 1:
            self.slots = TokenToKVPoolAllocator(size, **common)
        else:
            self.slots = PagedTokenToKVPoolAllocator(size, setting.page, **common)
        self.cache = RadixCache(CacheInitParams(False, self.rows, self.slots, setting.page))

    def batch(self, reqs: list[Any], **more: Any) -> Any:
        return Absent(
            reqs=reqs,
            device="cpu",
            batch_size=lambda: len(reqs),
            tree_cache=self.cache,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            **more,
        )

    def missing(self) -> list[str]:
        """What is not given back when nothing runs."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        found = [] if self.cache.protected_size() == 0 else ["a part of the cache is still locked"]
        size = self.slots.size // self.slots.page_size * self.slots.page_size
        if self.slots.available_size() + self.cache.evictable_size() != size:
            found.append(f"{self.slots.available_size()} free, {self.cache.evictable_size()} cached of {size}")
        self.cache.evict(EvictParams(num_tokens=size))
        free = self.slots.free_pages.tolist()
        if sorted(free) != list(range(1, size // self.slots.page_size + 1)):
            found.append(f"after all is evicted {len(free)} pages are free, {len(set(free))} different ones")
        return found if self.rows.available_size() == ROWS else [*found, "a row is taken"]


def served(
    setting: dict[str, Any], asked: list[dict[str, int]], context: int, size: int, lag: bool, fault: str | None = None
) -> dict[str, Any]:
    """{"wrong": the first thing, or None, "commits": tokens a step and request, "cached": tokens that prompts found in
    the cache, "retracted": how often, "lengths": of the texts}. size: of the pool, in tokens. fault: as in
    inside_ddtree_steps.decoded."""
    restore = plant(fault) if fault else lambda: None
    given = Setting(**setting)
    try:
        with (
            configured(**given.arguments(), sampling_backend="pytorch", attention_backend="triton") as server_args,
            torch.inference_mode(),
        ):
            scheduler = Scheduler(given, context, size, server_args, lag, fault is None)
            return scheduler.run([Asked(**one) for one in asked])
    finally:
        restore()


class Scheduler:
    def __init__(self, setting: Setting, context: int, size: int, server_args: Any, lag: bool, debug: bool) -> None:
        self.setting, self.context, self.server_args, self.lag = setting, context, server_args, lag
        self.memory = Memory(setting, context, size, server_args, debug)
        self.server = self.memory.server
        self.server.runner.sampler = sampler()
        self.server.drafter = torch.full((size + setting.page, 2), -1)
        self.waiting: list[Asked] = []
        self.running: list[Running] = []
        self.texts: dict[int, list[int]] = {}
        self.told: dict[str, Any] = {"wrong": None, "commits": [], "cached": 0, "retracted": 0}

    def run(self, asked: list[Asked]) -> dict[str, Any]:
        for number, one in enumerate(asked):
            one.number = number
        self.waiting = list(asked)
        self.server.texts = [[] for _ in asked]
        late: list[tuple[Running, list[int]]] = []
        while self.waiting or self.running:
            self._admit()
            for one, taken in late if not self.running else []:
                self._hear(one, taken)
            if not self.running:
                late = []
                continue
            launched = self._step()
            if self.lag:
                launched, late = late, launched
            for one, taken in launched:
                self._hear(one, taken)
            if self.told["wrong"] is not None:
                return self.told
        lost = self.memory.missing()
        self.told["wrong"] = "; ".join(lost) or None
        self.told["lengths"] = [len(self.texts[number]) for number in range(len(asked))]
        return self.told

    def _admit(self) -> None:
        """Those whose prompt fits beside a step's reserve, as SGLang's admission has it, in their order."""
        while self.waiting and self.memory.rows.available_size():
            one = self.waiting[0]
            if one.after is not None and one.after not in self.texts:
                return
            prompt = self._prompt(one)
            reserve = 2 * max(self.setting.width, self.setting.block) + 2 * self.setting.page
            there = self.memory.slots.available_size() + self.memory.cache.evictable_size()
            if len(prompt) + reserve > there:
                return
            self.waiting.pop(0)
            self._prefill(one, prompt)

    def _prompt(self, one: Asked) -> list[int]:
        if one.number in self.texts:
            # it was retracted, with what it had said
            return self.texts[one.number]
        own = [(7 * one.number + 3 * j + 2) % VOCABULARY for j in range(one.prompt)]
        return own if one.after is None else [*self.texts[one.after], *own]

    def _prefill(self, one: Asked, prompt: list[int]) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.allocation import alloc_for_extend
        from sglang.srt.sampling.sampling_params import SamplingParams

        if not self.server.texts[one.number]:
            self.server.texts[one.number] = self.server.toy.greedy(prompt, one.tokens + 3 * self.setting.block)
        params = SamplingParams(max_new_tokens=one.tokens, temperature=0.0)
        req = Req(str(one.number), "", array("q", prompt), params, vocab_size=VOCABULARY)
        req.init_next_round_input(self.memory.cache)
        cached, total = len(req.prefix_indices), len(prompt)
        self.told["cached"] += cached
        self.memory.cache.inc_lock_ref(req.last_node)
        req.set_extend_range(cached, total)
        lens = torch.tensor([total])
        batch = self.memory.batch(
            [req],
            prefix_lens=[cached],
            extend_lens=[total - cached],
            extend_num_tokens=total - cached,
            seq_lens=lens,
            seq_lens_cpu=lens,
        )
        alloc_for_extend(batch)
        req.kv_committed_len = total
        self.server.prefill(req.req_pool_idx, prompt, cached)
        row = self.memory.rows.req_to_token[req.req_pool_idx].long()
        self.server.drafter[row[cached:total], 0] = torch.tensor(prompt[cached:])
        self.server.drafter[row[cached:total], 1] = torch.arange(cached, total)
        self.memory.cache.cache_unfinished_req(req)
        # the first token comes with the prefill
        said = self.server.texts[one.number][total]
        req.output_ids.append(said)
        self.running.append(Running(one, req, [said], total))

    def _step(self) -> list[tuple[Running, list[int]]]:
        """Reserve for a step and run it: (request, its tokens) of each."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

        self._make_room()
        here = list(self.running)
        reqs = [one.req for one in here]
        lens = torch.tensor([one.length for one in here])
        draft_input = make_draft_input_v2(bonus_tokens=torch.tensor([one.got[-1] for one in here]), new_seq_lens=lens)
        batch = self.memory.batch(reqs, req_pool_indices=torch.tensor([req.req_pool_idx for req in reqs]))
        estimate = ScheduleBatch._new_tokens_required_next_decode_spec_v2(batch, reqs, self.setting.page)
        before = self.memory.slots.available_size() + self.memory.cache.evictable_size()
        draft_input.prepare_for_decode(batch)
        taken = before - self.memory.slots.available_size() - self.memory.cache.evictable_size()
        if taken != estimate:
            self._wrong(f"{taken} slots reserved, {estimate} estimated")
        if any(req.kv.kv_allocated_len % self.setting.page for req in reqs):
            self._wrong(f"reserved to {[req.kv.kv_allocated_len for req in reqs]}")
        self._owners()
        self.server.rows = [one.asked.number for one in here]
        _complete(batch, lens, draft_input, len(here))
        result = self.server.worker.forward_batch_generation(batch)
        commits = result.accept_lens.tolist()
        out = result.next_token_ids.view(len(here), -1).tolist()
        self.told["commits"] += commits
        if self.server.faults:
            self._wrong(self.server.faults[0])
        loc = self.server.appended[-1][1]
        heard = []
        for place, (one, count) in enumerate(zip(here, commits, strict=True)):
            one.got += out[place][:count]
            row = self.memory.rows.req_to_token[one.req.req_pool_idx].long()
            where = torch.arange(one.length, one.length + count)
            if loc[place, :count].tolist() != row[where].tolist():
                self._wrong(f"places of request {one.asked.number}")
            text = self.server.texts[one.asked.number]
            self.server.drafter[loc[place, :count].long(), 0] = torch.tensor(text)[where]
            self.server.drafter[loc[place, :count].long(), 1] = where
            one.length += count
            heard.append((one, out[place][:count]))
            self._check(one)
        return heard

    def _check(self, one: Running) -> None:
        text = self.server.texts[one.asked.number]
        mine = [*one.req.origin_input_ids, *one.got]
        if mine != text[: len(mine)]:
            self._wrong(f"text of request {one.asked.number}: {mine} is not {text[: len(mine)]}")
        elif self.server.apart(one.req.req_pool_idx, mine[: one.length]) > 1e-4:
            self._wrong(f"KV of request {one.asked.number}")

    def _make_room(self) -> None:
        """Retract from the last one on until the rest's step fits, by SGLang's own estimate."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch, release_req
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        while True:
            reqs = [one.req for one in self.running]
            batch = self.memory.batch(reqs)
            needed = ScheduleBatch._new_tokens_required_next_decode_spec_v2(batch, reqs, self.setting.page)
            evict_from_tree_cache(self.memory.cache, needed)
            if self.memory.slots.available_size() >= needed:
                return
            one = self.running.pop()
            # what the device has done and nobody has heard of is lost with it
            heard = one.asked.number, [*one.req.origin_input_ids, *one.req.output_ids]
            release_req(
                req=one.req,
                remaing_req_count=len(self.running),
                server_args=self.server_args,
                req_to_token_pool=self.memory.rows,
                token_to_kv_pool_allocator=self.memory.slots,
                tree_cache=self.memory.cache,
                hisparse_coordinator=None,
            )
            self.texts[heard[0]] = heard[1]
            self.waiting.insert(0, one.asked)
            self.told["retracted"] += 1

    def _hear(self, one: Running, taken: list[int]) -> None:
        """A step's result, as SGLang's processor has it: nothing for a request that has ended meanwhile."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if one not in self.running:
            return
        req, asked = one.req, one.asked
        req.kv_committed_len += len(taken)
        req.output_ids.extend(taken)
        said = len(req.origin_input_ids) + len(req.output_ids) - self._begun(asked)
        ended = said >= asked.tokens or len(req.origin_input_ids) + len(req.output_ids) >= self.context
        if ended or (asked.aborted is not None and said >= asked.aborted):
            self.running.remove(one)
            self.texts[asked.number] = [*req.origin_input_ids, *req.output_ids][: self.context]
            release_kv_cache(req, self.memory.cache)

    def _begun(self, asked: Asked) -> int:
        return asked.prompt + (0 if asked.after is None else len(self.texts[asked.after]))

    def _owners(self) -> None:
        """No page has two owners but those that the cache has lent to several, and none is free."""
        page, owned = self.setting.page, []
        for one in self.running:
            row = self.memory.rows.req_to_token[one.req.req_pool_idx].long()
            own = row[one.req.cache_protected_len : one.req.kv.kv_allocated_len] // page
            owned += own.unique().tolist()
        if len(owned) != len(set(owned)) or set(owned) & set(self.memory.slots.free_pages.tolist()):
            self._wrong("a page has two owners")

    def _wrong(self, what: str) -> None:
        self.told["wrong"] = self.told["wrong"] or what


def _complete(batch: Any, lens: torch.Tensor, draft_input: Any, count: int) -> None:
    """What the worker reads of a scheduler's batch."""
    from .inside_ddtree_steps import decoding

    batch.__dict__.update(
        decoding(lens, draft_input),
        return_logprob=False,
        sampling_info=batch_info([{"temperature": 0.0}] * count),
    )
