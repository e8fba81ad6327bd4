"""tests/gpu/kit: what can be known of a GPU run without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.kit.branching import REFERENCE_ROWS, reference_commit_lengths
from tests.gpu.kit.lab import REFERENCE_FAULTS
from tests.gpu.kit.ranks import ALONE, TRUTH, TWINS
from tests.gpu.kit.selections import NEEDS, PLANTED, SAMPLED, SPECS, STOPPED, needed
from tests.gpu.kit.trees import Trees


def test_the_reference_engines_commit_lengths_are_read() -> None:
    lengths = reference_commit_lengths()
    assert set(lengths) == {(8, 4), (16, 4), (16, 8), (24, 6), (32, 8), (48, 8)}
    assert REFERENCE_ROWS == 50 and all(4.5 < length < 6 for length in lengths.values())


def test_every_fault_has_a_server_and_the_reference_engine_one_like_it() -> None:
    assert (len(PLANTED), len(SAMPLED)) == (10, 5)
    assert {*PLANTED, *SAMPLED} == set(REFERENCE_FAULTS)
    assert {name for name in NEEDS["faults"] if name.startswith("fault-")} == {f"fault-{name}" for name in PLANTED}
    for name in STOPPED:
        assert SPECS[f"stopped-{name}"].faults == (name,) and not SPECS[f"stopped-{name}"].starts


@pytest.mark.parametrize("selection", NEEDS)
def test_every_selection_can_be_started(selection: str, tmp_path: Path) -> None:
    for spec in needed([selection], [], Trees("patched", "stock", tmp_path)):
        words = spec.arguments(tmp_path, 1, 2)
        assert ("--speculative-ddtree-budget" in words) == (spec.algorithm == "ddtree")
        assert len(words) == len([word for word in words if word])


def test_servers_of_two_ranks_are_asked_by_their_own_selection_alone(tmp_path: Path) -> None:
    two = {name for name in SPECS if name.startswith("tp2-")}
    assert two < set(NEEDS["ranks"]) and {TRUTH, *TWINS} <= two and {ALONE, *TWINS.values()} <= set(NEEDS["ranks"])
    assert not any(two & set(names) for selection, names in NEEDS.items() if selection != "ranks")
    for name in two:
        words = SPECS[name].arguments(tmp_path, 1, 2)
        assert words[words.index("--tp-size") + 1] == "2"
        # what may be compiled at start, or take NVLink multicast from a host that lends its cards
        assert {"--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"} <= set(words)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_tree_differs_in_what_the_fault_names(fault: str, patched_site: Path, tmp_path: Path) -> None:
    """And the tree that it is made from stays as it is, though files are linked."""
    trees = Trees(f"{patched_site}{os.pathsep}other", None, tmp_path)
    planted = trees.planted((fault, "no-canary")).split(os.pathsep)
    assert planted[1:] == ["other"]
    changed = [
        file.relative_to(planted[0]).as_posix()
        for file in Path(planted[0]).rglob("*.py")
        if not file.samefile(patched_site / file.relative_to(planted[0]))
    ]
    assert "sglang/srt/speculative/ddtree_worker.py" in changed and len(changed) <= 2
    worker = (patched_site / "sglang/srt/speculative/ddtree_worker.py").read_text()
    assert "self._run_canary(built.rung.budget + 1)\n" in worker
