"""Whatever an inventory or a profile holds: it arrives unchanged or is refused, and it writes no line of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_ops.errors import UsageError
from ddtree_ops.units import launch, render

from .kinds import KINDS, RELEASE, Inventory, Kind
from .systemd_words import command_line, environment_file

ONE_OF_MANY = re.compile(r"^(LoadCredential|PrivateTmp|ProtectHome)=")


def shape(unit: str) -> list[str]:
    """The unit without its values: sections and keys in order, comments left out."""
    lines = [line for line in unit.split("\n") if line and not line.startswith("#") and not ONE_OF_MANY.match(line)]
    return [line if line.startswith("[") else line.partition("=")[0] for line in lines]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_value_arrives_unchanged_or_is_refused(kind: Kind, tmp_path: Path) -> None:
    """Given 1,000 values of that kind, the unit keeps its lines, and a second reading of them gives the value back."""
    inventory = Inventory(tmp_path)
    plain = render(inventory.deployment(Kind("nothing"), ""), RELEASE, 1).files
    shapes = {tuple(shape(plain["unit"]))}
    if kind.name == "the attention backend":
        shapes = {tuple(shape(render(inventory.deployment(kind, "triton"), RELEASE, 1).files["unit"]))}

    arrived = []

    @settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        value = data.draw(kind.values)
        try:
            deployment = inventory.deployment(kind, value)
            files = render(deployment, RELEASE, 1).files
        except UsageError:
            return
        assert kind.arrives(deployment, value)
        assert tuple(shape(files["unit"])) in shapes
        (exec_start,) = [line for line in files["unit"].split("\n") if line.startswith("ExecStart=")]
        wanted = launch(deployment, RELEASE)
        assert command_line(exec_start.removeprefix("ExecStart=")) == [wanted.argv]
        assert environment_file(files["env"]) == wanted.env
        arrived.append(value)

    check()
    assert arrived, "every value was refused"
