"""What an operator writes: workspace, hosts, profiles; read, checked, resolved. Imports PyYAML and msgspec only."""

from ddtree_ops.model.init import init_workspace
from ddtree_ops.model.resolve import resolve
from ddtree_ops.model.stored import profile_from_json, profile_to_json
from ddtree_ops.model.types import (
    AppliedRule,
    Deployment,
    Exactness,
    Front,
    Gpus,
    Host,
    Profile,
    Router,
    Rule,
    SecretRef,
    Service,
    Workspace,
)
from ddtree_ops.model.workspace import find_workspace, load_workspace

__all__ = [
    "AppliedRule",
    "Deployment",
    "Exactness",
    "Front",
    "Gpus",
    "Host",
    "Profile",
    "Router",
    "Rule",
    "SecretRef",
    "Service",
    "Workspace",
    "find_workspace",
    "init_workspace",
    "load_workspace",
    "profile_from_json",
    "profile_to_json",
    "resolve",
]
