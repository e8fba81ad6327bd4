"""Whether a host can keep others off a port that is not yet proven: tried there, and said in the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.deploy.session import open_session
from ddtree_ops.model import load_workspace, resolve

from .harness import Lab
from .matrix.world import SERVICE, World


@pytest.mark.parametrize(("bpf", "said"), [(True, "tried on the host"), (False, "serves unproven: others reach port")])
def test_the_plan_says_what_the_host_can_enforce(lab: Lab, tmp_path: Path, bpf: bool, said: str) -> None:
    """systemd takes IPAddressDeny= everywhere; only where the kernel lets it load the filter is anything refused."""
    host = lab.host("ct200" if bpf else "no-bpf", bpf=bpf)
    world = World(host, tmp_path / "ws")
    world.workspace.profile("wide", extends="b8k4", bind="0.0.0.0", open="a closed network")
    before = host.sh(
        "find /etc/systemd /run/systemd/system /opt; systemctl list-units --all --no-legend --plain 'run-*.service'"
    )
    with open_session(resolve(load_workspace(world.workspace.path), host.name, SERVICE, None)) as session:
        assert session.agent.call("guard")["able"] is bpf
    assert said in world.ddtree("plan", "--profile", "wide", code=3).stdout
    assert "it binds 127.0.0.1" in world.ddtree("plan", code=3).stdout
    after = host.sh(
        "find /etc/systemd /run/systemd/system /opt; systemctl list-units --all --no-legend --plain 'run-*.service'"
    )
    assert after == before
