"""Wrong command lines end with status 2 and a line that names the argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.engine.arguments import ArgumentError, parse_address, parse_arguments
from ddtree_ops.engine.faults import FAULTS, Fault
from ddtree_ops.engine.loading import resolve

from .conftest import arguments

RANKS = ["--model-path", "t", "--nnodes", "2", "--tp-size", "2"]
MEETING = ["--dist-init-addr", "10.0.0.1:5000"]
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
        ([*RANKS, *MEETING, "--node-rank", "2"], "--node-rank 2 must be within 0..1"),
        ([*RANKS, *MEETING, "--node-rank", "-1"], "--node-rank: -1"),
        (["--model-path", "t", "--node-rank", "1"], "--node-rank 1 must be within 0..0"),
        (RANKS, "--nnodes 2 needs --dist-init-addr"),
        (["--model-path", "t", *MEETING], "--dist-init-addr 10.0.0.1:5000 needs --nnodes"),
        ([*RANKS, "--dist-init-addr", "10.0.0.1"], "--dist-init-addr 10.0.0.1: must be HOST:PORT"),
        ([*RANKS, "--dist-init-addr", "[::1]:5000"], "--dist-init-addr [::1]:5000: must be HOST:PORT"),
        ([*RANKS, "--dist-init-addr", "a b:5000"], "must be HOST:PORT"),
        ([*RANKS, "--dist-init-addr", "h:0"], "--dist-init-addr h:0: the port must be within 1..65535"),
        ([*RANKS, "--dist-init-addr", "h:65536"], "the port must be within"),
        ([*RANKS, "--dist-init-addr", "h:"], "the port must be within"),
        ([*RANKS[:4], *MEETING], "--tp-size 1 must be --nnodes 2"),
        (["--model-path", "t", "--tp-size", "2"], "--tp-size 2 must be --nnodes 1"),
        ([*RANKS, *MEETING, *TREE, *PAIR, "--fault", "stale-kv"], "--fault stale-kv contradicts --nnodes 2"),
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


def test_ranks_have_one_command_line_but_for_their_number() -> None:
    for rank in range(2):
        a = parse_arguments([*RANKS, *MEETING, "--node-rank", str(rank)])
        assert (a.nnodes, a.tp_size, a.node_rank, a.dist_init_addr) == (2, 2, rank, "10.0.0.1:5000")
    assert parse_address("node-0.example:5000") == ("node-0.example", 5000)


def test_every_fault_is_described() -> None:
    assert set(FAULTS) == set(Fault)


@pytest.mark.parametrize(
    "mode, extra, named",
    [
        ("AR", {"context_length": 97}, "--context-length 97 exceeds the model's 96"),
        ("8/17", {}, "--speculative-ddtree-topk 17 exceeds"),
        ("DFLASH", {"speculative_num_draft_tokens": 9}, "is not block_size 5"),
        ("8/4", {"max_total_tokens": 10}, "--max-total-tokens 10"),
        ("AR", {"nnodes": 4}, "--nnodes 4 does not divide the model's num_key_value_heads, 2"),
        ("AR", {"nnodes": 3}, "--nnodes 3 does not divide the model's num_attention_heads, 4"),
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
