"""A service as Kubernetes manifests: ConfigMap, Deployment, Service, and exactness and bench as Jobs. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from ddtree_ops.errors import UsageError
from ddtree_ops.export.form import engine_env, job_argv, job_files, job_limit_s, label, plain
from ddtree_ops.model import Deployment
from ddtree_ops.model.validate import is_loopback
from ddtree_ops.units import cache_directory, launch, uses_gpus

FILES = "/etc/ddtree"
#: Of a probe, in seconds; a health check can take 20 s under a long prefill (facts).
PERIOD_S, PROBE_TIMEOUT_S = 10, 30
CONFIG_LIMIT = 1 << 20
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_USER = 65_534


@dataclass(frozen=True)
class Images:
    """``engine``: holds the installed release at its path below the host's root. ``job``: has ddtree-ops installed."""

    engine: str
    job: str


def kubernetes(
    deployment: Deployment, release_id: str, images: Images, *, namespace: str | None = None, replicas: int = 1
) -> str:
    """The manifests as one YAML text of five documents.

    Raises UsageError for what a cluster cannot run as it is written: a profile that binds loopback, a name that
    Kubernetes does not take, files beyond a ConfigMap's 1 MiB.
    """
    deployment = plain(deployment)
    name, profile = deployment.service_name, deployment.profile
    if is_loopback(profile.bind):
        raise UsageError(
            f"{profile.name}: binds {profile.bind}: in a pod neither a Service nor a probe reaches it",
            hint="a profile with `bind: 0.0.0.0` and api_key, or `open: REASON` (what the cluster lets in)",
        )
    for given in (name, *([namespace] if namespace else [])):
        if not _NAME.fullmatch(given) or len(given) > 50:
            raise UsageError(f"'{given}' is no name in Kubernetes", hint="letters, digits and '-', a letter first")
    files = job_files(deployment)
    if sum(map(len, files.values())) > CONFIG_LIMIT:
        raise UsageError(f"{name}: the prompts are more than a ConfigMap holds", hint="1 MiB; fewer prompts")
    made = _Made(deployment, release_id, images, files, namespace)
    documents = [
        made.config(),
        made.deployment(replicas),
        made.service(),
        made.job("exactness"),
        made.job("bench"),
    ]
    head = f"# Written by ddtree export kubernetes: {json.dumps(label(deployment, release_id))}\n"
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=110, allow_unicode=False)


@dataclass(frozen=True)
class _Made:
    it: Deployment
    release: str
    images: Images
    files: dict[str, str]
    namespace: str | None

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": self.it.service_name, "app.kubernetes.io/part-of": "ddtree"}

    @property
    def key_file(self) -> str | None:
        key = self.it.profile.api_key
        return None if key is None else key.file

    def meta(self, name: str, **more: Any) -> dict[str, Any]:
        place = {"namespace": self.namespace} if self.namespace else {}
        came_from = {f"ddtree/{key}": value for key, value in label(self.it, self.release).items()}
        return {"name": name, **place, "labels": self.labels, "annotations": came_from, **more}

    def config(self) -> dict[str, Any]:
        meta = self.meta(f"{self.it.service_name}-profile")
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": self.files}

    def deployment(self, replicas: int) -> dict[str, Any]:
        # pods of another profile are other pods: the hash makes a changed ConfigMap a rollout
        sums = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()
        template = {
            "metadata": {"labels": self.labels, "annotations": {"ddtree/files-sha256": sums}},
            "spec": {
                "terminationGracePeriodSeconds": self.it.profile.stop_timeout_s,
                **self.pod([self.engine()], self.engine_volumes()),
            },
        }
        spec = {
            "replicas": replicas,
            # the old one's memory has to be free before the new one loads
            "strategy": {"type": "Recreate"},
            "progressDeadlineSeconds": self.it.profile.load_timeout_s + self.it.profile.stop_timeout_s + 600,
            "selector": {"matchLabels": self.labels},
            "template": template,
        }
        meta = self.meta(self.it.service_name)
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}

    def engine(self) -> dict[str, Any]:
        started, profile = launch(self.it, self.release), self.it.profile
        gpus = uses_gpus(self.it)
        env = engine_env(started.env, gpus=gpus)
        probe = self.probe()
        found = {
            "name": "engine",
            "image": self.images.engine,
            # $(NAME) is Kubernetes' own expansion; $$ keeps an argument as it is
            "command": [word.replace("$(", "$$(") for word in started.argv],
            "workingDir": started.cwd,
            "env": [{"name": key, "value": value.replace("$(", "$$(")} for key, value in env.items()],
            "ports": [{"name": "http", "containerPort": self.it.service.port}],
            # as long as a model loads nobody is asked whether it is alive
            "startupProbe": {**probe, "failureThreshold": -(-profile.load_timeout_s // PERIOD_S)},
            "readinessProbe": {**probe, "failureThreshold": 3},
            "securityContext": _LOCKED_UP,
            "volumeMounts": [
                {"name": volume["name"], "mountPath": path, **more} for volume, path, more in self.engine_mounts()
            ],
        }
        if gpus:
            found["resources"] = {"limits": {"nvidia.com/gpu": str(len(self.it.service.gpus))}}
        return found

    def probe(self) -> dict[str, Any]:
        every = {"periodSeconds": PERIOD_S, "timeoutSeconds": PROBE_TIMEOUT_S}
        if self.key_file is not None:  # /health wants the key, and a probe's headers would show it
            return {"tcpSocket": {"port": "http"}, **every}
        return {"httpGet": {"path": "/health", "port": "http"}, **every}

    def engine_mounts(self) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
        """(volume, where, more of the mount) of the engine's container."""
        profile = self.it.profile
        models = [path for path in (profile.model, profile.drafter) if path is not None and path.startswith("/")]
        found: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
            ({"name": "cache", "emptyDir": {}}, cache_directory(self.it), {}),
            ({"name": "tmp", "emptyDir": {}}, "/tmp", {}),
            ({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm", {}),
        ]
        for index, path in enumerate(dict.fromkeys(models)):
            volume = {"name": f"model-{index}", "hostPath": {"path": path, "type": "Directory"}}
            found.append((volume, path, {"readOnly": True}))
        if self.key_file is not None:
            found.append((self.secret(), self.key_file, {"subPath": "api-key", "readOnly": True}))
        return found

    def engine_volumes(self) -> list[dict[str, Any]]:
        return [volume for volume, _, _ in self.engine_mounts()]

    def secret(self) -> dict[str, Any]:
        """Its value is the cluster's: a Secret that somebody makes, with the key ``api-key``."""
        return {"name": "api-key", "secret": {"secretName": f"{self.it.service_name}-api-key"}}

    def service(self) -> dict[str, Any]:
        ports = [{"name": "http", "port": self.it.service.port, "targetPort": "http"}]
        spec = {"selector": self.labels, "ports": ports}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self.meta(self.it.service_name), "spec": spec}

    def job(self, what: str) -> dict[str, Any]:
        name = self.it.service_name
        url = f"http://{name}:{self.it.service.port}"
        mounts = [{"name": "profile", "mountPath": FILES, "readOnly": True}, {"name": "tmp", "mountPath": "/tmp"}]
        volumes: list[dict[str, Any]] = [
            {"name": "profile", "configMap": {"name": f"{name}-profile"}},
            {"name": "tmp", "emptyDir": {}},
        ]
        if self.key_file is not None:
            volumes.append(self.secret())
            mounts.append({"name": "api-key", "mountPath": self.key_file, "subPath": "api-key", "readOnly": True})
        container = {
            "name": what,
            "image": self.images.job,
            "command": job_argv(self.it, what, url, FILES, self.key_file),
            "env": [{"name": "HOME", "value": "/tmp"}],
            "securityContext": _LOCKED_UP,
            "volumeMounts": mounts,
        }
        labels = {"app.kubernetes.io/name": f"{name}-{what}", "app.kubernetes.io/part-of": "ddtree"}
        spec = {
            # a verdict is a verdict: a second try is for a person to ask for
            "backoffLimit": 0,
            "activeDeadlineSeconds": job_limit_s(self.it),
            "template": {
                "metadata": {"labels": labels},
                "spec": {"restartPolicy": "Never", **self.pod([container], volumes)},
            },
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self.meta(f"{name}-{what}"), "spec": spec}

    def pod(self, containers: list[dict[str, Any]], volumes: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": containers,
            "volumes": volumes,
        }


_LOCKED_UP = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
