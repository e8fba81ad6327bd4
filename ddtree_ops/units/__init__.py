"""Pure: a deployment and a release id in; unit, environment, argv and expectations out."""

from ddtree_ops.units.launch import Launch, cache_directory, expectations, launch, model_path, uses_gpus
from ddtree_ops.units.render import SERVICE_USER, Rendered, render

__all__ = [
    "SERVICE_USER",
    "Launch",
    "Rendered",
    "cache_directory",
    "expectations",
    "launch",
    "model_path",
    "render",
    "uses_gpus",
]
