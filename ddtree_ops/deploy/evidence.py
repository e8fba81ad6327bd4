"""Which sweep a profile stands on, looked up in the workspace: for whoever reads a plan. Nothing is refused for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from ddtree_ops.model import Deployment, Profile


def evidence_of(deployment: Deployment) -> str:
    """One line: the sweep's records, whether they lie here unchanged, and whether they hold this shape on this host."""
    profile = deployment.profile
    if profile.evidence is None:
        return f"evidence: none, no sweep chose {profile.name} (ddtree tune)"
    told = f"evidence: {profile.evidence.records}, sha256 {profile.evidence.sha256[:12]}"
    try:
        data = (deployment.workspace_path / profile.evidence.records).read_bytes()
    except OSError as error:
        return f"{told}, which cannot be read here: {error.strerror}"
    now = hashlib.sha256(data).hexdigest()
    if now != profile.evidence.sha256:
        return f"{told}, but the file has changed since: it is {now[:12]} now"
    lines = list(_lines(data))
    host = next((line.get("host") for line in lines if line.get("kind") == "run"), None)
    if not any(_is_of(line, profile) for line in lines):
        return f"{told}, but it holds no exact cell of this profile's shape"
    if host != deployment.host.name:
        return f"{told}, measured on {host} and not on {deployment.host.name}"
    return told


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _is_of(line: dict[str, Any], profile: Profile) -> bool:
    """Whether a line is a measured cell of the profile's shape."""
    shape = (line.get("cell") or {}).get("shape") or {}
    mine = (profile.algorithm, profile.budget, profile.topk)
    # cells are measured without a ladder
    return (
        profile.ladder is None
        and line.get("status") == "ok"
        and (shape.get("algorithm"), shape.get("budget"), shape.get("topk")) == mine
    )
