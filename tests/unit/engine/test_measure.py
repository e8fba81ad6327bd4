"""Measuring in process, and what the pair that ships has to reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_ops.engine import measure
from ddtree_ops.engine.faults import Fault

from .conftest import arguments, prompts
from .pairs import Plain


@pytest.fixture
def prompt_file(tmp_path: Path, plain: Plain) -> Path:
    """Four prompts; the record of the last is wrong in its fourth token."""
    rows = [{"prompt_ids": p, "ar_fp32": plain.greedy(p, 12), "loops": i == 0} for i, p in enumerate(prompts(4))]
    rows[3]["ar_fp32"][3] ^= 1  # type: ignore[index]
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(rows))
    return path


def run(pair: Path, prompt_file: Path, *extra: str) -> int:
    given = ["--pair", str(pair), "--prompts", str(prompt_file), "--max-new-tokens", "12", "--concurrency", "3"]
    return measure.main([*given, "--pairs", "8/4,12/3", *extra])


def test_it_compares_with_ar_and_prints_figures(
    pair: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Status 1: the recorded output of one row is not what AR writes here.
    assert run(pair, prompt_file, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["concurrency"], found["dtype"], found["fault"]) == (3, "float32", None)
    ar, chain, *trees = found["outcomes"]
    assert (ar["name"], ar["rows_that_differ"], ar["commit_length"]) == ("AR", 1, None)
    assert [(o["budget"], o["topk"]) for o in trees] == [(8, 4), (12, 3)]
    for outcome in (chain, *trees):
        assert outcome["rows_that_differ"] == 0 and outcome["rows"] == 4
        assert 1 <= outcome["commit_length_no_loops"] <= 5 and outcome["commit_length"] >= 1
    assert run(pair, prompt_file, "--rows", "3") == 0
    assert "tree 8/4" in capsys.readouterr().out


def test_a_fault_shows_as_rows_that_differ(pair: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(pair, prompt_file, "--json", "--rows", "3", "--fault", "mask-rows-by-block-size") == 1
    ar, chain, *trees = json.loads(capsys.readouterr().out)["outcomes"]
    assert ar["rows_that_differ"] == chain["rows_that_differ"] == 0
    assert all(o["rows_that_differ"] for o in trees)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[5]", '[{"prompt": 1}]', "[[]]"])
def test_a_prompt_file_that_is_none_is_refused(
    pair: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text)
    assert run(pair, path) == 1
    assert str(path) in capsys.readouterr().err


def test_a_pair_that_is_none_and_a_prompt_too_long_are_refused(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt_ids": [3] * 90}]))
    assert run(tmp_path, path) == 1 and "config.json" in capsys.readouterr().err
    assert run(pair, path) == 1 and "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize("pairs", ["8", "8/", "0/4", "8/x", "8/4,"])
def test_pairs_that_are_none_are_refused(pairs: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        measure.main(["--pairs", pairs])
    assert stopped.value.code == 2


def test_a_text_that_repeats_itself_loops() -> None:
    assert measure.loops([1, 2, 3] * 40)
    assert not measure.loops(list(range(120)))
    assert not measure.loops([])


def test_the_shipped_pair_is_exact_and_long_enough(trained: Path) -> None:
    rows = [r for r in measure.read_rows(trained / "held_out.json")[:24] if len(r.prompt) < 128]
    outcomes = measure.measure(
        arguments(trained, "AR", max_running_requests=8), trained / "draft", rows, [(8, 4), (16, 4)], 64
    )
    assert [o.rows_that_differ for o in outcomes] == [0, 0, 0, 0]
    chain, small, large = (o.commit_length for o in outcomes[1:])
    assert chain is not None and small is not None and large is not None
    assert 2.5 < chain < small < large


def test_the_historic_fault_ruins_the_shipped_pair_quietly(trained: Path) -> None:
    rows = measure.read_rows(trained / "held_out.json")[:8]
    broken = arguments(trained, "AR", max_running_requests=8, fault=Fault.MASK_ROWS_BY_BLOCK_SIZE)
    _, chain, hidden, shown = measure.measure(broken, trained / "draft", rows, [(7, 4), (8, 4)], 64)
    assert (chain.rows_that_differ, hidden.rows_that_differ, shown.rows_that_differ) == (0, 0, 8)
    assert shown.commit_length is not None and 1.5 < shown.commit_length < 3.5
