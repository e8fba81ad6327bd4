"""Given runs whose truth is known, what is claimed of them is true, and what they do not bear is not claimed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ddtree_ops.sweep.claims import best, crossover, doubts, prediction, ratio
from ddtree_ops.sweep.findings import accept_findings, drift, output_findings
from ddtree_ops.sweep.grid import AR, CHAIN
from ddtree_ops.sweep.hold import identity
from ddtree_ops.sweep.tables import groups, why_apart

from .made import B8K4, B16K4, load, made_run

#: The tree wins up to C=8 and loses from C=32 on, as in the reference table.
TABLE = {
    (AR, 1): 98.0, (AR, 8): 250.0, (AR, 32): 700.0, (AR, 64): 1000.0,
    (B8K4, 1): 150.0, (B8K4, 8): 326.0, (B8K4, 32): 610.0, (B8K4, 64): 739.0,
    (B16K4, 1): 139.0, (B16K4, 8): 290.0, (B16K4, 32): 500.0, (B16K4, 64): 600.0,
}  # fmt: skip


def test_the_fastest_shape_of_each_c_and_the_crossover_are_found() -> None:
    records = made_run(TABLE)
    (group,) = groups(records)
    assert doubts(records, group) is None
    winners = [found[0].shape for value in (1, 8, 32, 64) if (found := best(group, load(value))) is not None]
    assert winners == [B8K4, B8K4, AR, AR]
    assert crossover(group, AR, None).between == (8, 32)
    over = ratio(group, B8K4, AR, load(1))
    assert over is not None and over.beats and over.low < 150 / 98 < over.high


def test_one_start_of_each_claims_nothing() -> None:
    (group,) = groups(made_run(TABLE, starts=1))
    top = best(group, load(1))
    assert top is not None and top[1] is not None and not top[1].beats
    assert crossover(group, AR, None).between is None


def test_equal_shapes_are_not_told_apart() -> None:
    (group,) = groups(made_run({(AR, 1): 100.0, (B8K4, 1): 100.0}, sigma=0.02, seed=5))
    found = ratio(group, B8K4, AR, load(1))
    assert found is not None and not found.beats and not found.loses


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"identity": {"engine": "reference"}}, "interpreter"),
        ({"ceiling": None}, "ceiling was not measured"),
        ({"ceiling": 1500.0}, "the client is measured too"),
    ],
)
def test_no_crossover_is_claimed_where_something_else_is_measured(change: dict[str, object], why: str) -> None:
    records = made_run(TABLE, **change)  # type: ignore[arg-type]
    (group,) = groups(records)
    doubt = doubts(records, group)
    assert doubt is not None and why in doubt
    assert crossover(group, AR, doubt).between is None


def test_a_tree_that_is_faster_throughout_has_no_crossover() -> None:
    (group,) = groups(made_run({(AR, 1): 100.0, (B8K4, 1): 150.0, (AR, 8): 300.0, (B8K4, 8): 400.0}))
    found = crossover(group, AR, None)
    assert found.between is None and "faster throughout" in found.why


def test_step_times_explain_the_speed_up_where_nothing_else_is_lost() -> None:
    (group,) = groups(made_run({(AR, 1): 100.0, (B8K4, 1): 150.0}, sigma=0.0))
    found = prediction(group, B8K4, load(1))
    assert found is not None
    assert found.predicted == pytest.approx(1.5, rel=0.01) and found.rest == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("other", "word"),
    [({"tp": 4}, "parallelism"), ({"weights": "w2"}, "model"), ({"release": "r2"}, "release")],
)
def test_what_cannot_be_compared_stands_in_tables_of_its_own(other: dict[str, object], word: str) -> None:
    found = groups(made_run(TABLE, identities={AR: other}))
    assert len(found) == 2
    assert any(line.startswith(word) for line in why_apart(*found))
    assert all(ratio(group, B8K4, AR, load(1)) is None for group in found)


def test_ar_stands_with_the_trees_although_it_has_no_drafter() -> None:
    (group,) = groups(made_run(TABLE, identity={"drafter": "d1"}, identities={AR: {"drafter": None}}))
    assert ratio(group, B8K4, AR, load(1)) is not None


def test_trees_of_two_drafters_are_not_compared() -> None:
    other = {"drafter": "d2"}
    found = groups(made_run(TABLE, identity={"drafter": "d1"}, identities={B8K4: other, AR: {"drafter": None}}))
    assert all(any(line.startswith("model: drafter") for line in why_apart(found[0], one)) for one in found[1:])
    assert all(ratio(group, B8K4, AR, load(1)) is None for group in found)


def test_a_shape_is_told_by_the_targets_weights_and_by_the_drafters_apart() -> None:
    def of(drafter: str | None, models: dict[str, object]) -> dict[str, object]:
        profile = SimpleNamespace(engine="sglang", model="/m/t", drafter=drafter, dtype="bfloat16", tp=1, pp=1, ep=1)
        gpus = SimpleNamespace(count=0)
        system = SimpleNamespace(driver="1", hostname="h", machine="x86_64")
        deployment: Any = SimpleNamespace(profile=profile, host=SimpleNamespace(gpus=gpus))
        plan: Any = SimpleNamespace(meta={"models": models}, release="r")
        seen: Any = SimpleNamespace(system=system)
        return identity(deployment, plan, seen)

    plain = of(None, {"/m/t": {"weights": "1"}})
    tree = of("/m/d", {"/m/t": {"weights": "1"}, "/m/d": {"weights": "2"}})
    assert plain["weights"] == tree["weights"] and plain["drafter"] is None
    trained = of("/m/d", {"/m/t": {"weights": "1"}, "/m/d": {"weights": "3"}})
    assert trained["weights"] == tree["weights"] and trained["drafter"] != tree["drafter"]
    assert of(None, {"/m/t": {"weights": "9"}})["weights"] != plain["weights"]


def test_an_accept_length_that_falls_with_c_is_a_finding() -> None:
    speeds = {(shape, c): 100.0 for shape in (AR, CHAIN, B8K4) for c in (1, 8)}
    (group,) = groups(made_run(speeds, accept={(B8K4, 8): 3.2}))
    (line,) = accept_findings(group)
    assert line.startswith("b8k4: accept length 3.9") and "must not depend" not in line[:20]
    (steady,) = groups(made_run(speeds))
    assert accept_findings(steady) == []


def test_an_accept_length_of_some_requests_alone_is_a_finding() -> None:
    (group,) = groups(made_run({(shape, 1): 100.0 for shape in (AR, B8K4)}))
    rows = group.results[-1].repeats[0].rows
    rows[3] = msgspec.structs.replace(rows[3], steps_until_eos=None)
    (line,) = accept_findings(group)
    assert line.startswith("b8k4 at C=1: the accept length leaves out 1 of 192 requests")


def test_a_reference_that_moves_beyond_the_bound_is_drift() -> None:
    assert not drift(made_run(TABLE, sigma=0.0)).exceeded
    moved = drift(made_run(TABLE, sigma=0.0, drift=0.1))
    assert moved.exceeded and moved.change == pytest.approx(0.1, abs=0.03)


def test_in_fp32_other_tokens_than_ars_are_a_finding() -> None:
    records = made_run({(AR, 1): 100.0, (B8K4, 1): 150.0}, identity={"dtype": "float32"})
    (group,) = groups(records)
    assert output_findings(group) == []
    result = group.get(B8K4, load(1))
    assert result is not None
    import msgspec

    for index, record in enumerate(result.records):
        wrong = [msgspec.structs.replace(repeat, outputs="other") for repeat in record.repeats]
        result.records[index] = msgspec.structs.replace(record, repeats=wrong)
    assert output_findings(group) == ["b8k4 at C=1: its tokens are not AR's (fp32, greedy)"]


def test_a_cell_without_figures_is_in_no_comparison() -> None:
    records = made_run(TABLE, failed={(B8K4, 1): ("not-exact", "FAIL: 3 tokens")})
    (group,) = groups(records)
    assert group.get(B8K4, load(1)) is None
    top = best(group, load(1))
    assert top is not None and top[0].shape == B16K4
