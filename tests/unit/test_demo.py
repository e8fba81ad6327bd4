"""Given this machine alone, the demo deploys, refuses its fault, counts as the sweep does, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddtree_ops import demo
from ddtree_ops.cli.root import app
from ddtree_ops.deploy.fitting import release_ids
from ddtree_ops.model import Workspace, resolve
from tests.documented import documented

from .sweep.place import install, processes

PROMPTS, NEW_TOKENS = 3, 48
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Roots of the demo's hosts; each has this checkout as its release, so that nothing is built."""
    found: list[Path] = []
    real = demo._workspace

    @contextmanager
    def with_release(scratch: Path) -> Iterator[Workspace]:
        with real(scratch) as workspace:
            found.append(scratch / "host")
            for release in set(release_ids(resolve(workspace, "local")).values()):
                install(found[0], release)
            yield workspace

    monkeypatch.setattr(demo, "_workspace", with_release)
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", NEW_TOKENS)
    return found


def test_the_demo_from_its_command_line(roots: list[Path]) -> None:
    done = CliRunner().invoke(app, ["demo", "--prompts", str(PROMPTS), "--json"])
    assert done.exit_code == 0, done.output
    told = documented(["demo"], done.stdout)
    rows = told["deployed"]
    assert [(row["profile"], row["verdict"]["kind"]) for row in rows] == [(name, "EXACT") for name in demo.PROFILES]
    assert [row["differ_from_ar"] for row in rows] == [0, 0, 0]
    assert [row["tokens"] for row in rows] == [PROMPTS * NEW_TOKENS] * 3
    assert told["planted_fault"] == {"fault": demo.FAULT, "result": "refused, rolled back"}
    # what the client counts over HTTP is what the engine counts of itself, on the same prompts
    counted = {outcome["name"]: outcome["commit_length"] for outcome in told["shapes"]["outcomes"]}
    assert rows[0]["tokens_per_step"] == 1.0 and counted["AR"] is None
    assert rows[1]["tokens_per_step"] == pytest.approx(counted["chain"], abs=0.2)
    assert rows[2]["tokens_per_step"] == pytest.approx(counted["tree 8/4"], abs=0.2)
    assert roots and not roots[0].exists() and processes(roots[0]) == []


def test_more_prompts_than_there_are_is_said_before_anything_runs(roots: list[Path]) -> None:
    done = CliRunner().invoke(app, ["demo", "--prompts", "128"])
    assert done.exit_code == 2 and "that do not loop" in done.stderr and roots == []
