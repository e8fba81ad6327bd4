"""A service over several hosts in the inventory: what is refused before any host is asked, what the good ones make."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment, Workspace, load_workspace, resolve
from ddtree_ops.model.nodes import at_port, ports
from ddtree_ops.units import expectations, launch, render

from .workspaces import HOST, make

NODES = """\
    nodes:
      port: 20000
      ranks:
        - {host: h, address: 10.0.0.1}
        - {host: i, address: 10.0.0.2}
"""
TWO = "extends: b8k4\ntp: 2\n"
BARE = HOST.partition("services:")[0] + "services: {}\n"
BIG = "engine: sglang\nmodel: /models/kimi\ndrafter: /models/drafter\nvocab_size: 163840\ntp: 16\n"


def workspace(directory: Path, written: str = NODES, second: str = BARE, **profiles: str) -> Workspace:
    """Hosts ``h``, where the service ``one`` is written over both, and ``i``."""
    host = HOST.replace("profile: b8k4", "profile: two") + written
    files = {f"profiles/{name}.yaml": text for name, text in {"two": TWO, **profiles}.items()}
    return load_workspace(make(directory, {"i.yaml": second.replace("192.0.2.7", "192.0.2.8"), **files}, host=host))


def both(directory: Path) -> list[Deployment]:
    return resolve(workspace(directory), "h").every


def test_every_rank_is_one_service_on_its_host(tmp_path: Path) -> None:
    it = workspace(tmp_path)
    first, second = resolve(it, "h").every
    assert [(one.host.name, one.service_name) for one in (first, second)] == [("h", "one"), ("i", "one")]
    assert first.profile.nodes is not None and second.profile.nodes is not None
    assert (first.profile.nodes.rank, second.profile.nodes.rank) == (0, 1)
    assert second.service.lead == "h" and second.others == []
    assert resolve(it, "i", "one").profile == second.profile


def test_the_ranks_are_started_with_their_own_number_and_one_meeting_place(tmp_path: Path) -> None:
    lines = [" ".join(launch(one, "0" * 16).argv) for one in both(tmp_path)]
    for rank, line in enumerate(lines):
        assert f"--nnodes 2 --node-rank {rank} --dist-init-addr 10.0.0.1:20000" in line and "--tp-size 2" in line
    assert lines[0].replace("--node-rank 0", "--node-rank 1") == lines[1]


def test_only_the_nodes_reach_the_ports_of_its_workers(tmp_path: Path) -> None:
    for one in both(tmp_path):
        unit = render(one, "0" * 16, 1).files["unit"]
        assert "\nStartLimitIntervalSec=0\n" in unit and "StartLimitBurst" not in unit
        assert "\nIPAddressDeny=any\nIPAddressAllow=localhost 10.0.0.1 10.0.0.2\n\n[Install]\n" in unit
    alone = resolve(workspace(tmp_path / "alone", "", two="extends: b8k4\n"), "h")
    assert "IPAddress" not in render(alone, "0" * 16, 1).files["unit"]


def test_rank_0_tells_the_group_and_the_others_nothing(tmp_path: Path) -> None:
    first, second = both(tmp_path)
    told = expectations(first.profile)
    assert (told["nnodes"], told["tp_size"], told["dist_init_addr"]) == (2, 2, "10.0.0.1:20000")
    assert told["speculative_ddtree_budget"] == 8
    assert expectations(second.profile) == {}


def test_there_is_a_meeting_port_that_no_node_uses_now(tmp_path: Path) -> None:
    first = both(tmp_path)[0]
    assert ports(first) == [20000, 20010, 20020]
    moved = at_port(first, 20010)
    assert [one.profile.nodes.port for one in moved.every if one.profile.nodes] == [20010, 20010]


def test_an_ipv6_meeting_place_is_written_in_brackets(tmp_path: Path) -> None:
    it = workspace(tmp_path, NODES.replace("10.0.0.1", '"fd00::1"').replace("10.0.0.2", '"fd00::2"'))
    assert "[fd00::1]:20000" in launch(resolve(it, "h"), "0" * 16).argv


def test_gpus_are_counted_over_all_nodes(tmp_path: Path) -> None:
    text = HOST.replace("base: tiny", "base: big").replace("[0, 1]", "[0, 1, 2, 3, 4, 5, 6, 7]") + NODES
    files = {"i.yaml": BARE, "profiles/big.yaml": BIG}
    it = load_workspace(make(tmp_path, files, host=text))
    assert " ".join(launch(resolve(it, "h").others[0], "0" * 16).argv).count("--tp-size 16") == 1
    files["profiles/big.yaml"] = BIG.replace("tp: 16", "tp: 15")
    with pytest.raises(UsageError, match=r"big\.yaml:\d+: tp: tp x pp = 15 ranks on 2 nodes; allowed: a multiple of 2"):
        resolve(load_workspace(make(tmp_path / "odd", files, host=text)), "h")
    files["profiles/big.yaml"] = BIG.replace("tp: 16", "tp: 18")
    with pytest.raises(UsageError, match="8 GPUs on each of 2 nodes for tp 18"):
        resolve(load_workspace(make(tmp_path / "more", files, host=text)), "h")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("host: i,", "host: j,", r"h\.yaml:\d+: services\.one\.nodes\.ranks\[1\]: no host 'j'"),
        ("host: i,", "host: h,", "h is rank 0 already"),
        ("10.0.0.2", "10.0.0.1", "10.0.0.1 is h's address already"),
        ("10.0.0.2", "node-two", "not 'node-two'; allowed: the IP address"),
        ("10.0.0.2", "127.0.0.1", "a loopback address"),
        ("{host: h, address: 10.0.0.1}", "{host: i, address: 10.0.0.3}", "i is rank 0 already"),
        ("        - {host: i, address: 10.0.0.2}\n", "", "the list is too short"),
        ("port: 20000", "port: 80", "80"),
        ("      port: 20000\n", "", "the key port is missing"),
        ("port: 20000", "prot: 20000", "did you mean 'port'"),
    ],
)
def test_ranks_that_cannot_be_meant_are_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in NODES
    with pytest.raises(UsageError, match=complaint):
        workspace(tmp_path, NODES.replace(old, new))


def test_rank_0_is_where_it_is_written(tmp_path: Path) -> None:
    turned = NODES.replace("host: h", "host: x").replace("host: i", "host: h").replace("host: x", "host: i")
    with pytest.raises(UsageError, match="rank 0 is the host that one is written at"):
        workspace(tmp_path, turned)


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (HOST, "i has one already, a service of its own"),
        (HOST.replace("  one:", "  two:"), "port 30000 is two's on i"),
        (HOST.replace("  one:", "  two:").replace("30000", "30001"), "GPU 0 of i is used by two"),
        (BARE.replace("count: 8", "count: 1"), "i has no GPU 1"),
    ],
)
def test_a_node_must_have_room(tmp_path: Path, second: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        workspace(tmp_path, second=second)


def test_two_services_cannot_be_each_others_ranks(tmp_path: Path) -> None:
    back = HOST.replace("profile: b8k4", "profile: two") + NODES.replace("{host: h, address: 10.0.0.1}", "X").replace(
        "{host: i, address: 10.0.0.2}", "{host: h, address: 10.0.0.1}"
    ).replace("X", "{host: i, address: 10.0.0.2}")
    with pytest.raises(UsageError, match="has one already"):
        workspace(tmp_path, second=back)


@pytest.mark.parametrize(
    ("profile", "complaint"),
    [
        ("extends: b8k4\n", r"h\.yaml:\d+: services\.one: tp: the reference engine has one rank on each of 2 nodes"),
        ("extends: b8k4\ntp: 4\n", "the reference engine has one rank on each of 2 nodes"),
        (TWO + "bind: 0.0.0.0\nopen: our own network\n", "ports open to others than the nodes"),
        (TWO + "extra_args: [--nnodes, '3']\n", "--nnodes belongs to the service's nodes"),
    ],
)
def test_profiles_that_contradict_the_nodes_are_refused(tmp_path: Path, profile: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        resolve(workspace(tmp_path, two=profile), "h")


def test_without_systemd_nothing_keeps_others_off(tmp_path: Path) -> None:
    plain = BARE + "supervisor: process\n"
    with pytest.raises(UsageError, match="on i nothing keeps others off"):
        resolve(workspace(tmp_path, second=plain), "h")
    resolve(workspace(tmp_path / "b", second=plain, two=TWO + "open: a cable between the two\n"), "h")


def test_a_hosts_rules_may_not_make_its_rank_another_computation(tmp_path: Path) -> None:
    rule = "rules:\n  - {when: {engine: reference}, set: {context_length: 64}, reason: small}\n"
    with pytest.raises(UsageError, match="context_length is 64 on i"):
        resolve(workspace(tmp_path, second=BARE + rule), "h")
    own = rule.replace("context_length: 64", "env: {GLOO_SOCKET_IFNAME: eth1}")
    assert resolve(workspace(tmp_path / "b", second=BARE + own), "h").others[0].profile.env


def test_a_further_rank_is_no_routers_backend(tmp_path: Path) -> None:
    door = "services:\n  door: {port: 30080, router: {backends: [i/one]}}\n"
    with pytest.raises(UsageError, match="i/one is a further rank of h/one and answers nobody; allowed: h/one"):
        workspace(tmp_path, second=BARE.replace("services: {}\n", door))


def test_a_hosts_own_service_is_the_one_that_is_meant_without_a_name(tmp_path: Path) -> None:
    own = HOST.replace("  one:", "  mine:").replace("30000", "30001").replace("[0, 1]", "[2]")
    it = workspace(tmp_path, second=own)
    assert resolve(it, "i").service_name == "mine"
    assert list(it.hosts["i"].services) == ["mine", "one"]
