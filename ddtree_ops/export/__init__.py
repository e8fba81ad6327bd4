"""Profiles for what already runs larger fleets: Kubernetes manifests and Slurm batch scripts. Pure; plus their jobs."""

from ddtree_ops.export.kubernetes import Images, kubernetes
from ddtree_ops.export.slurm import Allocation, slurm

__all__ = ["Allocation", "Images", "kubernetes", "slurm"]
