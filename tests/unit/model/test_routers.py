"""Routers in the inventory: what is refused before any host is asked, and what the good ones resolve to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.export import slurm
from ddtree_ops.model import Workspace, load_workspace, resolve
from ddtree_ops.units import expectations, launch, render

from .workspaces import HOST, make

OPEN = "extends: ar\nbind: 0.0.0.0\nopen: the rack's own network\n"
ROUTED = """\
address: 192.0.2.9
gpus: {count: 0, name: none, arch: none, memory_gib: 0, interconnect: none}
services:
  door:
    port: 30080
    router:
      backends: [h/one, i/one]
"""


def workspace(directory: Path, front: str = ROUTED, **files: str) -> Workspace:
    """Hosts ``h`` and ``i`` with an open engine each, and ``front``."""
    engine = HOST.replace("profile: b8k4", "profile: open")
    second = engine.replace("192.0.2.7", "192.0.2.8")
    others = {f"{name}.yaml": text for name, text in files.items()}
    return load_workspace(
        make(directory, {"front.yaml": front, "i.yaml": second, "profiles/open.yaml": OPEN, **others}, host=engine)
    )


def test_a_router_resolves_to_its_backends_urls(tmp_path: Path) -> None:
    it = workspace(tmp_path)
    front = resolve(it, "front")
    assert front.profile.router is not None
    assert front.profile.router.workers == ["http://192.0.2.7:30000", "http://192.0.2.8:30000"]
    # the gate judges by what its backends are; how they decode is theirs
    assert (front.profile.engine, front.profile.algorithm, front.profile.dtype) == ("router", "none", "float32")
    assert front.profile.exactness == resolve(it, "h").profile.exactness
    assert [(one.name, one.url) for one in resolve(it, "i").fronts] == [("front/door", "http://192.0.2.8:30000")]
    assert front.fronts == [] and expectations(front.profile) == {"router_manager": True}


def test_a_change_behind_a_router_is_none_of_the_router(tmp_path: Path) -> None:
    texts = []
    for name, profile in (("a", OPEN), ("b", OPEN.replace("extends: ar", "extends: b16k4"))):
        found = render(resolve(workspace(tmp_path / name, **{"profiles/open": profile}), "front"), "0" * 16, 1)
        texts.append(found.files)
    assert texts[0] == texts[1]


def test_the_unit_starts_sglang_router(tmp_path: Path) -> None:
    text = ROUTED + "      policy: power_of_two\n      drain_timeout_s: 7\n      metrics_port: 29001\n"
    started = launch(resolve(workspace(tmp_path, text), "front"), "0" * 16)
    assert started.argv[1:4] == ["-m", "sglang_router.launch_router", "--host"]
    workers = started.argv.index("--worker-urls")
    assert started.argv[workers + 1 : workers + 3] == ["http://192.0.2.7:30000", "http://192.0.2.8:30000"]
    given = started.argv[3:workers] + started.argv[workers + 3 :]
    assert given.pop() == "--disable-circuit-breaker"
    assert dict(zip(given[::2], given[1::2], strict=True)) == {
        "--host": "127.0.0.1",
        "--port": "30080",
        "--policy": "power_of_two",
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": "29001",
        "--worker-startup-check-interval": "1",
        "--health-check-interval-secs": "5",
        "--health-check-timeout-secs": "20",
        "--health-failure-threshold": "2",
        "--health-success-threshold": "1",
        "--retry-max-retries": "17",  # 50 s until the health checks failed
        "--shutdown-grace-period-secs": "7",
    }
    assert started.env["HF_ENDPOINT"] == "http://127.0.0.1:9"  # no tokenizer is ever fetched
    assert "DevicePolicy=closed" in render(resolve(workspace(tmp_path / "b", text), "front"), "0" * 16, 1).files["unit"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[h/one, i/one]", "[]", r"front\.yaml:7: services\.door\.router\.backends: a router without backends"),
        (
            "      backends: [h/one, i/one]\n",
            "      policy: random\n",
            r"services\.door\.router: the key backends",
        ),
        ("i/one", "j/one", r"front\.yaml:7: services\.door\.router\.backends\[1\]: no host 'j'"),
        ("i/one", "i/onee", r"backends\[1\]: i has no service 'onee'; did you mean 'one'"),
        ("i/one", "i", r"backends\[1\]: not 'i'; allowed: HOST/SERVICE"),
        ("i/one", "h/one", r"backends\[1\]: h/one is a backend already"),
        ("i/one", "front/door", r"backends\[1\]: a router cannot be its own backend"),
        ("port: 30080", "port: 29000", r"router: 29000 is the port of door too"),
        ("    router:", "    profile: ar\n    router:", r"services\.door\.profile: unknown key"),
        ("i/one]", "i/one]\n      policy: fastest", r"router\.policy: not 'fastest'"),
        ("i/one]", "i/one]\n      max_unavailable: 2", r"max_unavailable: 2 of 2 backends away would leave none"),
        ("i/one]", "i/one]\n      bind: 0.0.0.0", r"router\.bind: 0\.0\.0\.0 serves beyond this host"),
        ("i/one]", "i/one]\n      backend: [h/one]", r"router\.backend: unknown key; did you mean 'backends'"),
    ],
)
def test_a_bad_router_is_refused_with_file_and_key(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in ROUTED
    with pytest.raises(UsageError, match=complaint) as refused:
        workspace(tmp_path, ROUTED.replace(old, new))
    assert refused.value.message.startswith("inventories/front.yaml:")


def test_routers_in_a_row_are_refused(tmp_path: Path) -> None:
    other = ROUTED.replace("192.0.2.9", "192.0.2.10").replace("[h/one, i/one]", "[front/door]")
    with pytest.raises(UsageError, match=r"back\.yaml:7: .*backends\[0\]: front/door is a router itself"):
        workspace(tmp_path, back=other)


@pytest.mark.parametrize(
    ("profile", "complaint"),
    [
        ("extends: ar\n", r"backends\[0\]: h/one binds 127\.0\.0\.1 on h, which front cannot reach"),
        ("extends: ar\nbind: 0.0.0.0\napi_key: {file: /k}\n", r"backends\[0\]: h/one asks for a key"),
    ],
)
def test_backends_that_no_router_could_use_are_refused(tmp_path: Path, profile: str, complaint: str) -> None:
    it = workspace(tmp_path, **{"profiles/open": profile})
    for name in ("front", "h"):  # the backend too: its deploy would have to go through that router
        with pytest.raises(UsageError, match=rf"inventories/front\.yaml:7: .*{complaint}"):
            resolve(it, name)


def test_backends_of_two_models_are_refused(tmp_path: Path) -> None:
    second = HOST.replace("192.0.2.7", "192.0.2.8").replace("b8k4", "other")
    it = workspace(tmp_path, i=second, **{"profiles/other": OPEN + "dtype: bfloat16\n"})
    with pytest.raises(UsageError, match=r"backends\[1\]: i/one has dtype bfloat16, h/one has float32"):
        resolve(it, "front")


def test_two_names_of_one_backend_are_refused(tmp_path: Path) -> None:
    it = workspace(tmp_path, i=HOST.replace("b8k4", "open"))
    with pytest.raises(UsageError, match=r"backends\[1\]: i/one is http://192\.0\.2\.7:30000, as h/one is"):
        resolve(it, "front")


def test_on_its_own_host_a_router_reaches_loopback(tmp_path: Path) -> None:
    both = HOST + ROUTED[ROUTED.index("  door:") :].replace("[h/one, i/one]", "[h/one]")
    it = load_workspace(make(tmp_path, host=both))
    found = resolve(it, "h", "door").profile.router
    assert found is not None and found.workers == ["http://127.0.0.1:30000"]
    clash = both.replace("30080", "30000")
    with pytest.raises(UsageError, match="30000 is the port of one too"):
        load_workspace(make(tmp_path / "b", host=clash))


def test_a_router_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="front/door is a router"):
        slurm(resolve(workspace(tmp_path), "front"), "0" * 16)


def test_a_router_takes_no_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"front\.yaml:\d+: services\.door: a router has no profile to replace"):
        resolve(workspace(tmp_path), "front", None, "b8k4")
