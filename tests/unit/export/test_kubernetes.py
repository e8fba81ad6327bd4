"""A profile as manifests: what Kubernetes' own schemas say of them, and that they say what the unit says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ddtree_ops.errors import UsageError
from ddtree_ops.export import Images, kubernetes
from ddtree_ops.model import Deployment, profile_from_json
from ddtree_ops.units import launch

from ..model.workspaces import deployment

RELEASE = "0123456789abcdef"
IMAGES = Images("registry.example/engine:1", "registry.example/ddtree:1")
OPEN = "bind: 0.0.0.0\nopen: the cluster's own policy lets in who may\n"
#: The oldest release with all that is used here, and the newest that the package knows.
VERSIONS = ("1.27", kubernetes_validate.latest_version())


def render(where: Deployment, **more: Any) -> dict[str, dict[str, Any]]:
    """The documents by kind and name."""
    documents = list(yaml.safe_load_all(kubernetes(where, RELEASE, IMAGES, **more)))
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("base", "extra"),
    [
        ("tiny", OPEN),
        ("tiny", "bind: 0.0.0.0\napi_key: {file: /etc/keys/tiny}\n"),
        ("kimi-k26", f"{OPEN}tp: 2\nextra_args: ['--note=\"$(HOME)\" %s $x', '${{y}}']\n"),
    ],
)
def test_the_manifests_are_kubernetes(tmp_path: Path, version: str, base: str, extra: str) -> None:
    found = render(deployment(tmp_path, extra, base=base), namespace="serving", replicas=2)
    assert list(found) == [
        "ConfigMap/one-profile",
        "Deployment/one",
        "Service/one",
        "Job/one-exactness",
        "Job/one-bench",
    ]
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt(tmp_path: Path) -> None:
    wrong = render(deployment(tmp_path, OPEN))["Deployment/one"]
    wrong["spec"]["template"]["spec"]["container"] = wrong["spec"]["template"]["spec"].pop("containers")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_engine_starts_with_the_units_own_arguments(tmp_path: Path) -> None:
    where = deployment(tmp_path, f"{OPEN}tp: 2\nextra_args: ['--note=$(HOME) $x']\n", base="kimi-k26")
    container = render(where)["Deployment/one"]["spec"]["template"]["spec"]["containers"][0]
    words = [word.replace("$$(", "$(") for word in container["command"]]  # as the kubelet reads it
    assert words == launch(where, RELEASE).argv and "--note=$$(HOME) $x" in container["command"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    # which GPUs it gets is the cluster's word
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & {one["name"] for one in container["env"]}
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounts["/models/Kimi-K2.6"] and mounts["/models/Kimi-K2.6-DFlash"] and not mounts["/opt/ddtree/cache/one"]
    probe = container["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= where.profile.load_timeout_s


def test_the_config_holds_the_profile_and_its_own_prompts(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"input_ids": [1, 2]}\n')
    where = deployment(tmp_path, OPEN + "exactness: {prompts: own.jsonl}\n")
    data = render(where)["ConfigMap/one-profile"]["data"]
    assert profile_from_json(data["profile.json"]) == where.profile
    assert json.loads(data["expect.json"])["speculative_ddtree_budget"] == 8
    assert data["prompts.jsonl"] == '{"input_ids": [1, 2]}\n'


def test_another_profile_is_another_pod(tmp_path: Path) -> None:
    sums = []
    for folder, extra in (("a", OPEN), ("b", OPEN), ("c", OPEN + "min_accept_length: 2.5\n")):
        template = render(deployment(tmp_path / folder, extra))["Deployment/one"]["spec"]["template"]
        sums.append(template["metadata"]["annotations"]["ddtree/files-sha256"])
    assert sums[0] == sums[1] != sums[2]


def test_a_key_is_a_reference_and_never_in_a_command(tmp_path: Path) -> None:
    found = render(deployment(tmp_path, "bind: 0.0.0.0\napi_key: {file: /etc/keys/tiny}\n"))
    for name in ("Deployment/one", "Job/one-exactness"):
        pod = found[name]["spec"]["template"]["spec"]
        assert {"name": "api-key", "secret": {"secretName": "one-api-key"}} in pod["volumes"]
        assert "--api-key-file /etc/keys/tiny" in " ".join(pod["containers"][0]["command"])


def test_what_no_cluster_could_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"binds 127\.0\.0\.1"):
        render(deployment(tmp_path / "a"))
    with pytest.raises(UsageError, match="no name in Kubernetes"):
        render(deployment(tmp_path / "b", OPEN), namespace="9lives")
