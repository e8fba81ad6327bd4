"""Every refusal through the public loader on real files: the exact position, what is allowed, the nearest right key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.model import load_workspace, resolve

from .workspaces import HOST, make

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIFlI0nDD0bq7R3qWj0C9ZC8pCZ1sQ2U3kE2rS0u4n8a1"


class Row(NamedTuple):
    """What is written, and the parts that the message must have. ``base`` and ``over`` are profiles."""

    id: str
    over: str
    wants: list[str]
    base: str = "tiny"


P = "inventories/profiles/over.yaml"
PROFILES = [
    Row(
        "budget 0",
        "algorithm: ddtree\nbudget: 0\ntopk: 4\n",
        [f"{P}:2: budget: not 0", "allowed: a whole number from 1"],
    ),
    Row("budget -3", "budget: -3\n", [f"{P}:1: budget: not -3"]),
    Row("budget text", "budget: many\n", [f"{P}:1: budget: expected a whole number, got 'many'"]),
    Row("budget 8.0", "budget: 8.0\n", ["budget: expected a whole number, got 8.0"]),
    Row("budget true", "budget: true\n", ["budget: expected a whole number, got the boolean true"]),
    Row("budget octal", "budget: 010\n", ["budget: expected a whole number, got '010', which is a YAML int"]),
    Row("budget sexagesimal", "budget: 1:30\n", ["budget: expected a whole number, got '1:30', which is a YAML int"]),
    Row("budget underscore", "budget: 1_0\n", ["got '1_0', which is a YAML int"]),
    Row("budget hexadecimal", "budget: 0x10\n", ["got '0x10', which is a YAML int"]),
    Row("budget Arabic digits", "budget: ٨\n", ["budget: expected a whole number, got '٨'"]),
    Row("budget fullwidth digits", "budget: ８\n", ["budget: expected a whole number, got '８'"]),
    Row("budget huge", "budget: 99999999999999999999999\n", ["budget: expected a whole number"]),
    Row("topk 0", "algorithm: ddtree\nbudget: 8\ntopk: 0\n", [f"{P}:3: topk: not 0", "from 1"]),
    Row(
        "topk over vocabulary",
        "algorithm: ddtree\nbudget: 8\ntopk: 2049\n",
        [f"{P}:3: topk: 2049 is more than the vocabulary has", "allowed: from 1 to 2048"],
    ),
    Row(
        "topk over Kimi's vocabulary",
        "algorithm: ddtree\nbudget: 8\ntopk: 163841\ntp: 2\n",
        [f"{P}:3: topk: 163841", "from 1 to 163840"],
        base="kimi-k26",
    ),
    Row(
        "algorithm unknown",
        "algorithm: dtree\n",
        [f"{P}:1: algorithm: not 'dtree'; did you mean 'ddtree'?", "none, dflash, ddtree"],
    ),
    Row(
        "algorithm a boolean",
        "algorithm: no\n",
        [f"{P}:1: algorithm: expected text, got 'no', which is a boolean for YAML"],
    ),
    Row(
        "ddtree without drafter",
        "algorithm: ddtree\nbudget: 8\ntopk: 4\ndrafter: null\n",
        [f"{P}:1: algorithm: ddtree needs a drafter"],
    ),
    Row(
        "dflash without drafter", "# why\nalgorithm: dflash\ndrafter:\n", [f"{P}:2: algorithm: dflash needs a drafter"]
    ),
    Row("ddtree without budget", "algorithm: ddtree\ntopk: 4\n", [f"{P}:1: algorithm: ddtree needs budget"]),
    Row(
        "a ladder that goes up",
        "algorithm: ddtree\nbudget: 8\ntopk: 4\nladder: 4:2,8:4\n",
        [f"{P}:4: ladder: from 8 requests on the budget must be below 2, not 4", "8:8,32:0"],
    ),
    Row("a ladder as wide", "algorithm: ddtree\nbudget: 8\ntopk: 4\nladder: '4:8'\n", ["must be below 8, not 8"]),
    Row("a ladder from one on", "algorithm: ddtree\nbudget: 8\ntopk: 4\nladder: '1:4'\n", ["do not exceed 1"]),
    Row("a ladder that YAML takes for a number", "ladder: 4:40\n", ["ladder: ", "in quotes"]),
    Row("a ladder of words", "ladder: four\n", [f"{P}:1: ladder: "]),
    Row("ddtree without topk", "algorithm: ddtree\nbudget: 4\n", [f"{P}:1: algorithm: ddtree needs topk"]),
    Row(
        "none with budget",
        "algorithm: none\nbudget: 8\n",
        [f"{P}:2: budget: given, but the algorithm is none", "allowed: algorithm: ddtree"],
    ),
    Row(
        "none with drafter",
        "algorithm: none\ndrafter: /m/d\n",
        [f"{P}:2: drafter: given, but the algorithm is none", "dflash or ddtree"],
    ),
    Row("budget over a chain", "extends: chain\nbudget: 8\n", [f"{P}:2: budget: given, but the algorithm is dflash"]),
    Row(
        "unknown key",
        "algoritm: ddtree\n",
        [f"{P}:1: algoritm: unknown key; did you mean 'algorithm'?", "allowed: extends, engine"],
    ),
    Row(
        "unknown nested key",
        "exactness:\n  polcy: exact\n",
        [f"{P}:2: exactness.polcy: unknown key; did you mean 'policy'?"],
    ),
    Row(
        "key written twice",
        "budget: 8\ntopk: 4\nbudget: 16\n",
        [f"{P}:3: budget: written twice; the first is on line 1"],
    ),
    Row("nested key written twice", "env:\n  A: x\n  A: y\n", [f"{P}:3: env.A: written twice"]),
    Row("anchor", "env: &a\n  A: x\n", [f"{P}:1: anchors and aliases"]),
    Row("alias bomb", "extra_args: [&a [x, x], *a, *a]\n", [f"{P}:1: anchors and aliases"]),
    Row("merge key", "env:\n  <<: {A: x}\n", [f"{P}:2: env: the key << is not text"]),
    Row("tag", "budget: !!int '8'\n", [f"{P}:1: tags (!) are refused"]),
    Row("python tag", "budget: !!python/object/apply:os.getcwd []\n", ["tags (!) are refused"]),
    Row("nested deep", "env: " + "{a: " * 40 + "}" * 40, [f"{P}:1: nested deeper than 12"]),
    Row("too large", "# " + "x" * 300_000, [f"{P}: larger than 256 KiB"]),
    Row("two documents", "budget: 8\n---\nbudget: 16\n", [f"{P}:2: not valid YAML: but found another document"]),
    Row("not YAML", "budget: [8\ntopk: 4\n", [f"{P}:2: not valid YAML"]),
    Row("tab indentation", "env:\n\tA: x\n", [f"{P}:2: not valid YAML"]),
    Row("a control character", "open: a\x07b\n", [f"{P}:1: not valid YAML"]),
    Row("an escaped control character", 'open: "a\\x07b"\n', [f"{P}:1: open: has the control character U+0007"]),
    Row("empty", "# nothing\n", [f"{P}:1: empty"]),
    Row("a list", "- budget\n", [f"{P}:1: expected a mapping, got a list"]),
    Row(
        "engine unknown",
        "engine: sglan\n",
        ["engine: not 'sglan'; did you mean 'sglang'?", "allowed: sglang, reference"],
    ),
    Row(
        "relative model",
        "model: models/x\n",
        [f"{P}:1: model: not 'models/x'", "an absolute path on the host, or release:"],
    ),
    Row("model climbs", "model: release:../../etc\n", ["model: not 'release:../../etc'"]),
    Row("model with dots", "model: /m/../etc\n", ["model: not '/m/../etc'", "without '..'"]),
    Row("model a number", "model: 5\n", ['model: expected text, got 5; write "5" in quotes']),
    Row("dtype", "dtype: fp32\n", ["dtype: not 'fp32'", "float32, bfloat16, float16"]),
    Row("dtype of the reference engine", "dtype: float16\n", [f"{P}:1: dtype: the reference engine has no float16"]),
    Row("tp of the reference engine", "tp: 2\n", [f"{P}:1: tp: the reference engine has none"]),
    Row("graphs of the reference engine", "cuda_graph: true\n", [f"{P}:1: cuda_graph: the reference engine has none"]),
    Row("memory of the reference engine", "memory_fraction: 0.5\n", [f"{P}:1: memory_fraction: the reference engine"]),
    Row("memory fraction", "memory_fraction: 1.5\n", ["memory_fraction: not 1.5", "at most 0.99"]),
    Row("boolean as text", "cuda_graph: 'true'\n", ["cuda_graph: expected true or false, got 'true'"]),
    Row(
        "boolean as yes",
        "cuda_graph: yes\n",
        ["cuda_graph: expected true or false, got 'yes', which is a boolean for YAML"],
    ),
    Row("concurrency empty", "exactness: {concurrency: []}\n", ["exactness.concurrency: the list is too short"]),
    Row("concurrency 0", "exactness:\n  concurrency:\n    - 1\n    - 0\n", [f"{P}:4: exactness.concurrency[1]: not 0"]),
    Row("prompts outside", "exactness: {prompts: ../p.json}\n", ["exactness.prompts: not '../p.json'"]),
    Row("policy", "exactness: {policy: near}\n", ["exactness.policy: not 'near'", "did you mean 'near-tie'?"]),
    Row(
        "extends unknown",
        "extends: b8k5\n",
        [f"{P}:1: extends: no profile 'b8k5'; did you mean 'b8k4'?", "allowed: ar, b16k4"],
    ),
    Row("extends itself", "extends: over\n", [f"{P}:1: extends: goes round in a circle: over -> over"]),
    Row(
        "open everywhere",
        "algorithm: none\nbind: 0.0.0.0\n",
        [f"{P}:2: bind: 0.0.0.0 serves beyond this host", "open: the reason"],
    ),
    Row("open everywhere, IPv6", "bind: '::'\n", [f"{P}:1: bind: :: serves beyond this host"]),
    Row("open to a name", "bind: host.example.net\n", ["bind: host.example.net serves beyond"]),
    Row("bind a flag", "bind: --port\n", ["bind: not '--port'"]),
    Row("open without a reason", "bind: 0.0.0.0\nopen: ''\n", [f"{P}:2: open: empty"]),
    Row("open no", "open: no\n", [f"{P}:1: open: expected text, got 'no', which is a boolean for YAML (quote it"]),
    Row(
        "argument named as flag", "extra_args: [--budget, '8']\n", [f"{P}:1: extra_args[0]: --budget belongs to budget"]
    ),
    Row(
        "argument with =",
        "extra_args:\n  - --x\n  - --speculative-ddtree-budget=8\n",
        [f"{P}:3: extra_args[1]: --speculative-ddtree-budget belongs to budget"],
    ),
    Row(
        "argument abbreviated", "extra_args: [--speculative-ddtree-t, 4]\n", ["--speculative-ddtree-t belongs to topk"]
    ),
    Row("argument abbreviated, with =", "extra_args: [--max-r=4]\n", ["--max-r belongs to max_running_requests"]),
    Row(
        "argument with underscores",
        "extra_args: [--context_length=4]\n",
        ["--context_length belongs to context_length"],
    ),
    Row("argument alias", "extra_args: [--tp=4]\n", ["--tp belongs to tp"]),
    Row("argument port", "extra_args: [--port, 1]\n", ["--port belongs to the service's port"]),
    Row("argument file", "extra_args: [--config, /x.yaml]\n", ["--config belongs to the profile"]),
    Row("argument --", "extra_args: ['--', x]\n", ["-- belongs to ddtree"]),
    Row("argument with a newline", 'extra_args: ["a\\nb"]\n', [f"{P}:1: extra_args[0]: has a newline or NUL"]),
    Row("argument list a text", "extra_args: --x\n", ["extra_args: expected a list, got text"]),
    Row("variable of ours", "env: {PATH: /x}\n", [f"{P}:1: env.PATH: is set by ddtree"]),
    Row("variable's name", "env: {1A: x}\n", ["env.1A: not the name of an environment variable"]),
    Row("variable a list", "env: {A: [x]}\n", ["env.A: expected text, got a list"]),
]

HOSTFILE = "inventories/h.yaml"
HOSTS = [
    Row(
        "wheels",
        HOST + "release: {wheels: pip}\n",
        [f"{HOSTFILE}:15: release.wheels: not 'pip'", "allowed: ship, index"],
    ),
    Row("slim", HOST + "release: {slim: yes}\n", [f"{HOSTFILE}:15: release.slim: expected true or false"]),
    Row("release key", HOST + "release: {slimm: true}\n", ["release.slimm: unknown key; did you mean 'slim'?"]),
    Row("provided", HOST + "release: {provided: torch}\n", ["release.provided: expected a list, got text"]),
    Row(
        "provided range",
        HOST + "release:\n  provided: [torch, 'numpy>=2']\n",
        [
            f"{HOSTFILE}:16: release.provided[1]: not 'numpy>=2'",
            "a distribution's name, such as torch, or name==version",
        ],
    ),
    Row(
        "port taken",
        HOST + "  two: {base: tiny, profile: ar, port: 30000}\n",
        [f"{HOSTFILE}:15: services.two.port: 30000 is the port of one too"],
    ),
    Row(
        "GPU taken",
        HOST + "  two:\n    base: tiny\n    profile: ar\n    port: 30001\n    gpus: [2, 1]\n",
        [f"{HOSTFILE}:19: services.two.gpus[1]: GPU 1 is used by one already"],
    ),
    Row(
        "GPU twice",
        HOST.replace("[0, 1]", "[0, 0]"),
        [f"{HOSTFILE}:14: services.one.gpus[1]: GPU 0 is used by one already"],
    ),
    Row("GPU beyond", HOST.replace("[0, 1]", "[8]"), ["services.one.gpus[0]: not 8", "from 0 to 7"]),
    Row("GPU negative", HOST.replace("[0, 1]", "[-1]"), ["services.one.gpus[0]: not -1"]),
    Row(
        "port 0",
        HOST.replace("port: 30000", "port: 0"),
        [f"{HOSTFILE}:13: services.one.port: not 0", "from 1024 to 65535"],
    ),
    Row("port 65536", HOST.replace("port: 30000", "port: 65536"), ["services.one.port: not 65536"]),
    Row(
        "port text",
        HOST.replace("port: 30000", "port: '30000'"),
        ["services.one.port: expected a whole number, got '30000'"],
    ),
    Row(
        "profile unknown",
        HOST.replace("profile: b8k4", "profile: b8k9"),
        [f"{HOSTFILE}:10: services.one.profile: no profile 'b8k9'; did you mean 'b8k4'?", "allowed: ar"],
    ),
    Row(
        "base unknown",
        HOST.replace("base: tiny", "base: tinny"),
        [f"{HOSTFILE}:10: services.one.base: no profile 'tinny'; did you mean 'tiny'?"],
    ),
    Row(
        "no base",
        HOST.replace("    base: tiny\n", ""),
        [f"{HOSTFILE}:10: services.one: neither its base nor its profile says engine"],
    ),
    Row(
        "override in a service",
        HOST + "    budget: 16\n",
        [f"{HOSTFILE}:15: services.one.budget: unknown key", "allowed: profile, base, port, gpus"],
    ),
    Row("service's name", HOST.replace("  one:", "  One:"), [f"{HOSTFILE}:10: services.One: not a service's name"]),
    Row("service's name climbs", HOST.replace("  one:", "  ../one:"), ["not a service's name"]),
    Row(
        "too few GPUs",
        HOST.replace("base: tiny", "base: kimi-k26"),
        [f"{HOSTFILE}:10: services.one.gpus: 2 GPUs for tp 8 x pp 1 = 8 ranks"],
    ),
    Row(
        "address a flag",
        HOST.replace("192.0.2.7", "-oProxyCommand=x"),
        [f"{HOSTFILE}:1: address: not '-oProxyCommand=x'", "an IP address or a host name"],
    ),
    Row(
        "address half an IP", HOST.replace("192.0.2.7", "192.0.2"), ["address: not '192.0.2': looks like an IP address"]
    ),
    Row("address with a port", HOST.replace("192.0.2.7", "a.example:22"), ["address: not 'a.example:22'"]),
    Row("address with a user", HOST.replace("192.0.2.7", "root@a.example"), ["address: not 'root@a.example'"]),
    Row("address not ASCII", HOST.replace("192.0.2.7", "hóst"), ["address: not 'hóst'"]),
    Row("address digits not ASCII", HOST.replace("192.0.2.7", "'１92.0.2.7'"), ["address: not '１92.0.2.7'"]),
    Row("address with a space", HOST.replace("192.0.2.7", "a b"), ["address: not 'a b'"]),
    Row("address missing", HOST.replace("address: 192.0.2.7\n", ""), [f"{HOSTFILE}:1: the key address is missing"]),
    Row("user", "user: -root\n" + HOST, [f"{HOSTFILE}:1: user: not '-root'"]),
    Row("arch", HOST.replace("sm_120", "sm120"), [f"{HOSTFILE}:6: gpus.arch: not 'sm120'", "none, or sm_"]),
    Row("arch none", HOST.replace("sm_120", "none"), ["gpus.arch: not none with count 8"]),
    Row("interconnect", HOST.replace("pcie", "nvlnk"), ["gpus.interconnect: not 'nvlnk'; did you mean 'nvlink'?"]),
    Row("root relative", HOST.replace("/opt/ddtree", "opt"), [f"{HOSTFILE}:2: root: not 'opt'", "an absolute path"]),
    Row(
        "root with a space", HOST.replace("/opt/ddtree", "/opt/dd tree"), ["root: not '/opt/dd tree'", "part of units"]
    ),
    Row("root slash", HOST.replace("/opt/ddtree", "/"), ["root: not '/'"]),
    Row("host key cut", "host_key: ssh-ed25519 AAAA\n" + HOST, [f"{HOSTFILE}:1: host_key: the key is cut short"]),
    Row(
        "host key's type", f"host_key: ssh-rsa {KEY}\n" + HOST, ["host_key: the key is cut short or not an ssh-rsa key"]
    ),
    Row("host key's name", "host_key: h ssh-ed25519 AAAA\n" + HOST, ["host_key: not a public host key"]),
    Row("host key not base64", "host_key: ssh-ed25519 A*A\n" + HOST, ["host_key: the key is not base64"]),
    Row(
        "host key twice",
        f"host_key: ssh-ed25519 {KEY}\nknown_hosts: k\n" + HOST,
        [f"{HOSTFILE}:2: known_hosts: host_key is given too"],
    ),
    Row(
        "ssh key of a local host",
        "transport: local\nidentity_file: x\n" + HOST,
        [f"{HOSTFILE}:2: identity_file: means nothing"],
    ),
    Row("supervisor", "supervisor: sytemd\n" + HOST, ["supervisor: not 'sytemd'; did you mean 'systemd'?"]),
    Row("sudo text", "sudo: nopasswd\n" + HOST, ["sudo: expected true or false"]),
    Row(
        "unknown key",
        HOST.replace("address:", "adress:"),
        [f"{HOSTFILE}:1: adress: unknown key; did you mean 'address'?"],
    ),
    Row(
        "rule without reason",
        HOST + "rules:\n- when: {min_budget: 8}\n  set: {cuda_graph: false}\n",
        [f"{HOSTFILE}:16: rules[0]: the key reason is missing"],
    ),
    Row(
        "rule always", HOST + "rules:\n- when: {}\n  set: {cuda_graph: false}\n  reason: x\n", ["rules[0].when: empty"]
    ),
    Row(
        "rule sets budget",
        HOST + "rules:\n- when: {min_budget: 8}\n  set: {budget: 4}\n  reason: x\n",
        [f"{HOSTFILE}:17: rules[0].set.budget: unknown key", "cuda_graph"],
    ),
    Row(
        "rule's value",
        HOST + "rules:\n- when: {min_budget: 8}\n  set: {cuda_graph: 0}\n  reason: x\n",
        ["rules[0].set.cuda_graph: expected true or false, got 0"],
    ),
    Row(
        "rule sets an owned argument",
        HOST + "rules:\n- when: {min_budget: 8}\n  set: {extra_args: [--port=1]}\n  reason: x\n",
        [f"{HOSTFILE}:16: rules[0]: --port belongs to the service's port"],
    ),
    Row(
        "rules disagree",
        HOST
        + "rules:\n- when: {min_budget: 8}\n  set: {load_timeout_s: 1}\n  reason: x\n"
        + "- when: {arch: sm_120}\n  set: {load_timeout_s: 2}\n  reason: y\n",
        [f"{HOSTFILE}:19: rules[1]: load_timeout_s contradicts rules[0]"],
    ),
]


def refusal(workspace: Path, profile: str | None) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(load_workspace(workspace), "h", None, profile)
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize("row", PROFILES, ids=[row.id for row in PROFILES])
def test_a_wrong_profile_is_refused(row: Row, tmp_path: Path) -> None:
    # A profile is complete only with an algorithm; those rows that are wrong about something else take ar's.
    complete = not re.match("[a-z_]+:", row.over) or re.search("algorithm|extends", row.over)
    over = row.over if complete else row.over + "extends: ar\n"
    workspace = make(tmp_path, {"profiles/over.yaml": over}, host=HOST.replace("base: tiny", f"base: {row.base}"))
    message = refusal(workspace, "over")
    for part in row.wants:
        assert part in message


@pytest.mark.parametrize("row", HOSTS, ids=[row.id for row in HOSTS])
def test_a_wrong_host_is_refused(row: Row, tmp_path: Path) -> None:
    message = refusal(make(tmp_path, host=row.over), None)
    for part in row.wants:
        assert part in message
