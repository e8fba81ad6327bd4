"""The prefix cache: who owns a slot, what a hit finds, and that nobody's tokens change by it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from ddtree_ops.engine.cache import Lease, PrefixCache
from ddtree_ops.engine.kv import SlotTable
from ddtree_ops.engine.request import LogprobOptions, Sampling, Update

from .conftest import prompts
from .pairs import Plain
from .test_scheduler import Loop

PAGE = 4


def slots_in(cache: PrefixCache) -> list[int]:
    found, stack = [], list(cache._roots.values())
    while stack:
        page = stack.pop()
        found += page.slots
        stack += page.children.values()
    return found


def owned(table: SlotTable) -> list[int]:
    return [slot for slots in table._owned.values() for slot in slots]


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[int, list[int], int, str]]:
    """Requests (which of the running to end before it or -1, tokens, room, namespace) over few tokens."""
    text = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    event = st.tuples(st.integers(-3, 5), text, st.integers(0, 6), st.sampled_from(["", "a"]))
    return draw(st.lists(event, max_size=25))


@settings(max_examples=150, deadline=None)
@given(stories(), st.sampled_from([1, 3, 4]))
def test_given_any_story_every_slot_has_one_owner_and_hits_hold_the_very_tokens(
    story: list[tuple[int, list[int], int, str]], size: int
) -> None:
    total = 40
    table = SlotTable(6, 24, total + 1)
    cache = PrefixCache(table, size)
    running: list[tuple[Lease, list[int]]] = []
    written: dict[int, tuple[str, tuple[int, ...]]] = {}
    for ending, tokens, room, namespace in story:
        if 0 <= ending < len(running):
            lease, whole = running.pop(ending)
            cache.keep(lease, whole)
            cache.leave(lease)
        lease_or_none = cache.join(tokens, len(tokens) - 1, len(tokens) + room, namespace)
        if lease_or_none is not None:
            lease, whole = lease_or_none, tokens + [0] * room
            row = table._table[lease.row, : len(whole)].tolist()
            assert lease.cached <= len(tokens) - 1 and lease.cached % size == 0
            for place, slot in enumerate(row[: lease.cached]):
                assert written[slot] == (namespace, tuple(tokens[: place + 1]))
            assert not set(row[lease.cached :]) & set(slots_in(cache))
            written |= {slot: (namespace, tuple(whole[: p + 1])) for p, slot in enumerate(row) if p >= lease.cached}
            if room % 2:
                cache.keep(lease, tokens)
            running.append((lease, whole))
        everything = table._free_slots + owned(table) + slots_in(cache)
        assert sorted(everything) == list(range(1, total + 1))
        assert cache.cached == len(slots_in(cache))
    for lease, _ in running:
        cache.leave(lease)
    assert cache.free == total
    cache.flush()
    assert table.free == total and cache.cached == 0 and cache._roots == {}


def test_the_longest_cached_prefix_is_found_and_the_oldest_leaf_goes_first() -> None:
    cache = PrefixCache(SlotTable(4, 21, 22), PAGE)

    def run(tokens: list[int], namespace: str = "") -> int:
        lease = cache.join(tokens, len(tokens) - 1, len(tokens), namespace)
        assert lease is not None
        cache.keep(lease, tokens)
        cache.leave(lease)
        return lease.cached

    assert run([1] * 8) == 0
    assert run([1] * 8) == 4, "the last token is always computed"
    assert run([1] * 9) == 8
    assert run([1] * 8, "other") == 0
    assert run([1, 1, 1, 1, 2, 2, 2, 2, 2]) == 4
    assert cache.free == 21 and cache.cached == 8 + 8 + 4
    assert run([7] * 4) == 0, "21 slots are full: the least recently used leaf made room"
    assert run([1] * 9) == 4
    with pytest.raises(ValueError):
        cache.join([1], 0, 22, "")


def ask(loop: Loop, batch: list[list[int]], count: int = 24, **extra: object) -> list[Update]:
    """Outputs of a batch, all in flight together."""
    ids = [f"{len(loop.updates)}.{i}" for i in range(len(batch))]
    loop.scheduler.submit([loop.request(rid, prompt, count, **extra) for rid, prompt in zip(ids, batch, strict=True)])
    return loop.wait(*ids)


def started(pair: Path, mode: str, **extra: object) -> Loop:
    loop = Loop(pair, mode, **{"page_size": PAGE, **extra})
    loop.scheduler.start()
    return loop


SHARED = [prefix + rest for prefix in prompts(2, seed=31, low=17, high=17) for rest in prompts(4, seed=32, high=6)]


@pytest.mark.parametrize("mode", ["AR", "DFLASH", "8/4", "60/12"])
def test_prefixes_shared_by_eight_change_neither_tokens_nor_acceptance(pair: Path, plain: Plain, mode: str) -> None:
    loop, bare = started(pair, mode), started(pair, mode, disable_radix_cache=True)
    expected = [plain.greedy(prompt, 24) for prompt in SHARED]
    for turn in range(3):
        cached, fresh = ask(loop, SHARED), ask(bare, SHARED)
        assert [u.output_ids for u in cached] == [u.output_ids for u in fresh] == expected
        # The drafter's context is restored too: were it not, drafts would be worse and steps more.
        assert [u.verify_count for u in cached] == [u.verify_count for u in fresh]
        assert [u.cached_tokens for u in fresh] == [0] * 8
        assert [u.cached_tokens for u in cached] == [(len(p) - 1) // PAGE * PAGE if turn else 0 for p in SHARED]
    assert loop.scheduler.load() == (0, 0, loop.free)
    assert bare.decoder.cache.cached == 0 < loop.decoder.cache.cached


@pytest.mark.parametrize("mode", ["AR", "60/12"])
def test_a_second_turn_goes_on_from_what_the_first_one_committed(pair: Path, plain: Plain, mode: str) -> None:
    loop, batch = started(pair, mode), prompts(8, seed=33)
    for turn in range(3):
        updates = ask(loop, batch, 17)
        assert [u.output_ids for u in updates] == [plain.greedy(prompt, 17) for prompt in batch]
        for prompt, u in zip(batch, updates, strict=True):
            # The last token of an output has no KV yet, unless its step went further; the three after it are new.
            known = {(len(prompt) - 4) // PAGE * PAGE, (len(prompt) - (4 if mode == "AR" else 3)) // PAGE * PAGE}
            assert u.cached_tokens in (known if turn else {0})
        batch = [prompt + u.output_ids + [5, 6, 7] for prompt, u in zip(batch, updates, strict=True)]


def test_committed_pages_hold_what_a_fresh_prefill_writes(pair: Path) -> None:
    loop = started(pair, "60/12")
    for prompt in prompts(4, seed=34):
        (update,) = ask(loop, [prompt], 40)
        whole, cache = prompt + update.output_ids[:-1], loop.decoder.cache
        lease = cache.join(whole, len(whole), len(whole), "")
        assert lease is not None and lease.cached == len(whole) // PAGE * PAGE
        assert loop.decoder.drafter is not None
        pools = (loop.decoder.trunk.pool, loop.decoder.drafter._pool)
        slots = loop.decoder.table.prefix(torch.tensor([lease.row]), lease.cached)[0]
        kept = [pool._data[:, slots].clone() for pool in pools]
        cache.leave(lease)
        ask(loop, [[*whole, 3]], 2, namespace="fresh")
        again = cache.join(whole, len(whole), len(whole), "fresh")
        assert again is not None and again.cached == lease.cached
        slots = loop.decoder.table.prefix(torch.tensor([again.row]), again.cached)[0]
        for found, pool in zip(kept, pools, strict=True):
            assert_close(found, pool._data[:, slots], atol=2e-3, rtol=2e-3)
        cache.leave(again)


@pytest.mark.parametrize("mode", ["AR", "8/4"])
def test_under_pressure_pages_are_evicted_and_tokens_stay(pair: Path, plain: Plain, mode: str) -> None:
    loop = started(pair, mode, max_total_tokens=230, max_running_requests=8)
    source, hits = random.Random(5), 0
    for _ in range(6):
        batch = source.sample(SHARED, 5) + prompts(3, seed=source.randrange(99), low=20, high=40)
        updates = ask(loop, batch, 20)
        assert [u.output_ids for u in updates] == [plain.greedy(prompt, 20) for prompt in batch]
        hits += sum(u.cached_tokens > 0 for u in updates)
        assert loop.scheduler.load() == (0, 0, 230)
    assert hits >= 10 and loop.decoder.table.free < 230


def test_aborted_requests_leave_a_sound_cache(pair: Path, plain: Plain) -> None:
    loop = started(pair, "8/4", max_running_requests=8)
    for turn in range(5):
        ids = [f"gone{turn}.{i}" for i in range(8)]
        loop.scheduler.submit([loop.request(rid, p, 60, stream=True) for rid, p in zip(ids, SHARED, strict=True)])
        with loop.changed:
            assert loop.changed.wait_for(lambda ids=ids: all(loop.updates[rid] for rid in ids), timeout=30)
        loop.scheduler.abort_all("gone")
        loop.wait(*ids)
        assert loop.scheduler.load() == (0, 0, loop.free)
    assert [u.output_ids for u in ask(loop, SHARED)] == [plain.greedy(prompt, 24) for prompt in SHARED]


def test_namespaces_do_not_see_one_another_and_a_flush_forgets(pair: Path) -> None:
    loop, prompt = started(pair, "8/4"), SHARED[0]

    def cached(**extra: object) -> int:
        return ask(loop, [prompt], 3, **extra)[0].cached_tokens

    assert cached() == 0 < cached()
    assert cached(namespace="mine") == 0 < cached(namespace="mine")
    assert loop.scheduler.flush() and loop.decoder.table.free == loop.free
    assert cached() == cached(namespace="mine") == 0
    loop.scheduler.submit([loop.request("long", prompt, 60)])
    refused = loop.scheduler.flush()
    loop.wait("long")
    assert not refused
    assert loop.value("sglang:cached_tokens_total") == 2 * 16 + 16


def test_scores_are_computed_from_where_they_are_asked(pair: Path) -> None:
    loop, text = started(pair, "8/4"), SHARED[1]
    ask(loop, [text], 4)
    for start, cached in ((0, 0), (9, 8), (16, 16), (len(text) - 1, (len(text) - 1) // PAGE * PAGE)):
        options = LogprobOptions(start, 3)
        (hit,) = ask(loop, [text], 0, logprobs=options)
        (fresh,) = ask(loop, [text], 0, logprobs=options, namespace="fresh")
        assert (hit.cached_tokens, fresh.cached_tokens) == (cached, 0), "and a prompt that is only scored is not kept"
        assert [token for _, token in hit.input_logprobs] == text[start:]
        for a, b in zip(hit.input_logprobs[1:], fresh.input_logprobs[1:], strict=True):
            assert a[0] == pytest.approx(b[0], abs=1e-4)


def test_a_prompt_asked_for_one_token_is_kept_with_its_draft_context(pair: Path) -> None:
    loop, bare, text = started(pair, "8/4"), started(pair, "8/4", disable_radix_cache=True), SHARED[2]
    ask(loop, [text], 1)
    (hit,), (fresh,) = ask(loop, [text]), ask(bare, [text])
    assert hit.cached_tokens == 16 or hit.cached_tokens == 20
    assert (hit.output_ids, hit.verify_count) == (fresh.output_ids, fresh.verify_count)


def test_what_lies_behind_a_stop_is_not_kept(pair: Path, plain: Plain) -> None:
    loop, prompt = started(pair, "60/12", page_size=1), [4, 9, 2]
    whole = plain.greedy(prompt, 30)
    stop = whole[9]
    (update,) = ask(loop, [prompt], 30, stop_token_ids=frozenset({stop}))
    text = prompt + whole
    (again,) = ask(loop, [text], 2)
    assert again.cached_tokens <= len(prompt) + len(update.output_ids)


def test_a_sampled_text_is_the_same_with_and_without_the_cache(pair: Path) -> None:
    asked = Sampling(1.2, top_p=0.9, seed=9)
    bare = ask(started(pair, "AR", disable_radix_cache=True), SHARED, sampling=asked)
    loop = started(pair, "12/3")
    for _ in range(2):
        assert [u.output_ids for u in ask(loop, SHARED, sampling=asked)] == [u.output_ids for u in bare]
