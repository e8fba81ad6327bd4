"""Wrong command lines end with status 2 and a line that names the argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.engine.arguments import ArgumentError, parse_arguments
from ddtree_ops.engine.faults import FAULTS, Fault
from ddtree_ops.engine.loading import resolve

from .conftest import arguments

TREE = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "d"]
LADDER = ["--speculative-ddtree-ladder"]
PAIR = ["--speculative-ddtree-budget", "8", "--speculative-ddtree-topk", "4"]


@pytest.mark.parametrize(
    "argv, named",
    [
        ([], "--model-path"),
        (["--model", "t"], "--model-path"),
        (["--model-path", "t", "--nonsense"], "--nonsense"),
        (["--model-path", "t", "--port", "70000"], "--port: 70000"),
        (["--model-path", "t", "--port", "x"], "--port: 'x'"),
        (["--model-path", "t", "--dtype", "float16"], "--dtype"),
        (["--model-path", "t", "--max-running-requests", "0"], "--max-running-requests"),
        (["--model-path", "t", "--speculative-algorithm", "EAGLE"], "--speculative-algorithm"),
        (["--model-path", "t", *TREE[2:]], "--speculative-draft-model-path needs --speculative-algorithm"),
        (["--model-path", "t", *PAIR], "--speculative-ddtree-budget needs --speculative-algorithm"),
        (["--model-path", "t", *TREE[:2], *PAIR], "DDTREE needs --speculative-draft-model-path"),
        (["--model-path", "t", *TREE], "needs --speculative-ddtree-budget and"),
        (["--model-path", "t", *TREE, *PAIR[:2]], "needs --speculative-ddtree-budget and"),
        (["--model-path", "t", *TREE, "--speculative-ddtree-budget", "0"], "--speculative-ddtree-budget: 0"),
        (["--model-path", "t", *TREE, *PAIR, "--speculative-num-draft-tokens", "8"], "budget + 1 = 9"),
        (["--model-path", "t", *TREE, *PAIR, *LADDER, "4:8"], "--speculative-ddtree-ladder 4:8: from 4 requests on"),
        (["--model-path", "t", *TREE, *PAIR, *LADDER, "4:4,4:2"], "4 requests do not exceed 4"),
        (["--model-path", "t", *TREE, *PAIR, *LADDER, "1:4"], "1 requests do not exceed 1"),
        (["--model-path", "t", *TREE, *PAIR, *LADDER, "4-4"], "'4-4' is not REQUESTS:BUDGET"),
        (["--model-path", "t", *LADDER, "4:4"], "--speculative-ddtree-ladder needs --speculative-algorithm"),
        (
            ["--model-path", "t", "--speculative-algorithm", "DFLASH", *TREE[2:], *PAIR],
            "--speculative-ddtree-budget needs --speculative-algorithm DDTREE",
        ),
        (["--model-path", "t", "--speculative-sampling", "rejection"], "--speculative-sampling needs"),
        (["--model-path", "t", "--speculative-sampling", "x"], "--speculative-sampling"),
        (["--model-path", "t", "--fault", "rope-by-index"], "--fault rope-by-index needs"),
        (["--model-path", "t", "--fault", "nonsense"], "--fault"),
        (["--model-path", "t", "--skip-tokenizer-init", "--tokenizer-path", "p"], "--tokenizer-path contradicts"),
    ],
)
def test_wrong_arguments_are_refused(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(argv)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_good_arguments_are_read() -> None:
    a = parse_arguments(["--model-path", "t", *TREE, *PAIR, "--speculative-num-draft-tokens", "9", "--port", "0"])
    assert (a.speculative_algorithm, a.speculative_ddtree_budget, a.speculative_ddtree_topk) == ("DDTREE", 8, 4)
    assert (a.host, a.dtype, a.fault, a.speculative_draft_model_path) == ("127.0.0.1", "float32", None, Path("d"))
    assert parse_arguments(["--model-path", "t", "--speculative-algorithm", "NONE"]).speculative_algorithm is None


def test_every_fault_is_described() -> None:
    assert set(FAULTS) == set(Fault)


@pytest.mark.parametrize(
    "mode, extra, named",
    [
        ("AR", {"context_length": 97}, "--context-length 97 exceeds the model's 96"),
        ("8/17", {}, "--speculative-ddtree-topk 17 exceeds"),
        ("DFLASH", {"speculative_num_draft_tokens": 9}, "is not block_size 5"),
        ("8/4", {"max_total_tokens": 10}, "--max-total-tokens 10"),
    ],
)
def test_arguments_that_contradict_the_model_are_refused(
    pair: Path, mode: str, extra: dict[str, int], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        resolve(arguments(pair, mode, **extra))


def test_what_the_arguments_come_to(pair: Path) -> None:
    assert (resolve(arguments(pair, "8/4")).width, resolve(arguments(pair, "8/4")).num_draft_tokens) == (9, 9)
    assert (resolve(arguments(pair, "9/1")).width, resolve(arguments(pair, "9/1")).num_draft_tokens) == (5, 10)
    assert (resolve(arguments(pair, "DFLASH")).width, resolve(arguments(pair, "DFLASH")).num_draft_tokens) == (5, 5)
    assert (resolve(arguments(pair, "AR")).width, resolve(arguments(pair, "AR")).num_draft_tokens) == (1, None)
    assert resolve(arguments(pair, "AR", max_running_requests=2)).max_total_tokens == 2 * 97
