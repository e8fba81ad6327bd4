"""The pure parts: epsilon, alignment, outputs, prompts, rendering."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness import builtin_prompts, judge, load_prompts, render_lines, wire
from ddtree_ops.exactness.prompts import stand_in_ids
from ddtree_ops.exactness.verdict import Counts, Finding, Kind, Reason, RunCounts, Verdict


def test_epsilon_covers_the_healthy_noise_and_no_more() -> None:
    """Given facts.md: healthy bf16 gaps reach 1/8 and wrong masks make whole nats; fp32 is a million times finer."""
    assert judge.epsilon("bfloat16", 2) == pytest.approx(0.125, rel=1e-4)
    assert judge.severity(0.125, judge.epsilon("bfloat16", 2)) == "near-tie"
    assert judge.severity(0.125 + 1 / 16, judge.epsilon("bfloat16", 2)) == "fail"
    assert judge.epsilon("float32", 2) < 1e-5
    assert judge.epsilon("auto", 2) == judge.epsilon("bfloat16", 2)
    assert judge.severity(0.0, judge.epsilon("float32", 0)) == "exact"
    assert judge.severity(None, 10.0) == "fail"


@given(st.integers(0, 4000), st.integers(1, 4000))
def test_few_near_ties_never_exceed_a_rate_and_many_always_do(near: int, judged: int) -> None:
    assert judge.rate_exceeded(near, judged, 0.02) == (near > 8 and near > 0.02 * judged)


def reply(ids: list[int], start: int, *, best: list[int] | None = None) -> wire.Scored:
    entries = [wire.Entry(ids[start], None, "", None)]
    for token, first in zip(ids[start + 1 :], (best or ids)[start + 1 :], strict=True):
        logprob = -0.5 if token == first else -1.5
        entries.append(wire.Entry(token, logprob, "", ((-0.5, first, ""), (-1.5, 77, ""))))
    return wire.Scored(tuple(entries), len(ids), 0)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=30), st.data())
def test_every_output_token_is_judged_once_and_at_its_place(ids: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(ids) - 1))
    wrong = data.draw(st.integers(first, len(ids) - 1))
    best = list(ids)
    best[wrong] = 99
    found = judge.positions(ids, first, reply(ids, first - 1, best=best), None)
    assert [p.index for p in found] == list(range(len(ids) - first))
    assert [p.emitted for p in found] == ids[first:]
    assert [p.index for p in found if p.gap] == [wrong - first]


def test_the_last_id_of_the_vocabulary_may_be_shown_as_zero() -> None:
    entries = list(reply([5, 9, 3], 0).entries)
    entries[1] = dataclasses.replace(entries[1], token=0)
    shown = wire.Scored(tuple(entries), 3, 0)
    assert len(judge.positions([5, 9, 3], 1, shown, 10)) == 2
    with pytest.raises(wire.Malformed):
        judge.positions([5, 9, 3], 1, shown, 11)


def test_a_stop_token_is_added_only_where_it_is_missing() -> None:
    def made(ids: tuple[int, ...], finish: str, matched: int | str | None) -> wire.Generation:
        return wire.Generation(ids, finish, matched, None, None, None, None, None)

    assert judge.sequence(made((1, 2), "stop", 0)) == (1, 2, 0)
    assert judge.sequence(made((1, 2, 0), "stop", 0)) == (1, 2, 0)
    assert judge.sequence(made((), "stop", 0)) == (0,)
    assert judge.sequence(made((1, 2), "length", None)) == (1, 2)
    assert judge.sequence(made((1, 2), "stop", "\n\n")) == (1, 2)


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_difference(left: list[int], right: list[int], at: int | None) -> None:
    assert judge.first_difference(left, right) == at


def test_cycles() -> None:
    assert judge.cycle_length([7] * 16) == 1
    assert judge.cycle_length([1, 2, 3] * 6) == 3
    assert judge.cycle_length([1, 2, 3, 4, 5] * 4) is None
    assert judge.cycle_length([7] * 15) is None
    assert judge.cycle_length([7] * 16 + [8]) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda c: (
            st.lists(c)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "meta_info",
                        "output_ids",
                        "finish_reason",
                        "type",
                        "matched",
                        "input_token_logprobs",
                        "input_top_logprobs",
                        "completion_tokens",
                    ]
                ),
                c,
            )
        ),
        max_leaves=12,
    )
)
def test_no_document_makes_the_reader_crash(value: Any) -> None:
    for read in (wire.generation, lambda d: wire.scored(d, with_top=True)):
        try:
            read(wire.document(json.dumps(value).encode()))
        except wire.Malformed as error:
            assert str(error)


def test_the_packaged_prompts_cover_what_they_promise() -> None:
    prompts = builtin_prompts()
    assert len(prompts) == 24 and len({p.id for p in prompts}) == 24
    assert {p.kind for p in prompts} == {
        "code",
        "prose",
        "json",
        "repeated",
        "non-english",
        "single",
        "shared-prefix",
        "long",
    }
    assert min(len(p.text or "") for p in prompts) == 1 and max(len(p.text or "") for p in prompts) > 1500
    assert load_prompts(None) == prompts


def test_stand_in_ids_keep_repeats_and_shared_prefixes() -> None:
    a, b = stand_in_ids("to be or not to be", 2048), stand_in_ids("to be or else", 2048)
    assert a[:2] == a[4:6] and a[:3] == b[:3] and a[3] != b[3]
    assert stand_in_ids("a", 2048) == stand_in_ids("a", 2048)
    for prompt in builtin_prompts():
        ids = stand_in_ids(prompt.text or "", 7)
        assert ids and all(0 <= i < 7 for i in ids)


def test_an_own_file_of_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"text": "a"}\n\n{"id": "x", "input_ids": [1, 2]}\n')
    assert [(p.id, p.text, p.input_ids) for p in load_prompts(lines)] == [("line-1", "a", None), ("x", None, (1, 2))]
    whole = tmp_path / "own.json"
    whole.write_text('{"version": "mine", "prompts": [{"id": "x", "kind": "k", "text": "b"}]}')
    assert load_prompts(whole)[0].text == "b"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", '{"text": "a"}\n{"txt": 1}', "p.jsonl:2"),
        ("p.jsonl", "", "no prompts"),
        ("p.jsonl", '{"id": "a", "text": "a", "input_ids": [1]}', "one of them"),
        ("p.jsonl", '{"text": ""}', "is empty"),
        ("p.jsonl", '{"input_ids": [-1]}', "negative"),
        ("p.jsonl", '{"id": "a", "text": "a"}\n{"id": "a", "text": "b"}', "two prompts"),
        ("p.json", "[]", "p.json"),
        ("missing.json", None, "No such file"),
    ],
)
def test_a_wrong_file_of_prompts_is_named(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        load_prompts(path)
    assert str(path) in caught.value.message


def test_rendering_shows_the_first_failure_and_no_control_characters() -> None:
    found = Finding(
        severity="fail", method="self-score", prompt="p\x1b[31m", concurrency=8, position=3, got=17, expected=None,
        gap=None, top_two_gap=0.5, got_text="\x1b]0;x\x07", expected_text="=", before="if [bold]x",
    )  # fmt: skip
    counts = Counts(
        prompts=1, requests=2, generated=3, prefilled=4, judged=5, compared=6, differing=7, second_turns=8,
        second_turns_cached=9, second_turns_differing=10, findings=90,
    )  # fmt: skip
    run = RunCounts(
        concurrency=8,
        requests=1,
        generated=2,
        judged=3,
        ties=4,
        near_ties=5,
        beyond=6,
        verify_steps=7,
        accept_length=1.5,
    )
    verdict = Verdict(
        format=1, kind=Kind.FAIL, policy="exact", algorithm="ddtree", dtype="float32", epsilon=1e-6, prompt_set="s",
        shape={"speculative_ddtree_budget": 8}, max_new_tokens=64, accept_length=1.5,
        reasons=[Reason(effect="fail", code="x", message="bad\nthing\x1b[2J")], findings=[found] * 12, runs=[run],
        counts=counts, seconds=1.0,
    )  # fmt: skip
    lines = render_lines(verdict)
    assert lines[0] == "FAIL: ddtree (budget 8) float32, accept length 1.50 - not exact under policy exact"
    assert any("C=8, position 3: token 17 instead of end, gap unknown" in line for line in lines)
    assert any("82 more" in line for line in lines)
    assert all(line.isprintable() for line in lines)
    assert math.isclose(verdict.to_json()["epsilon"], 1e-6)
