"""Imports what the engine imports, and compares what torch was built for with the GPUs that are there."""

from __future__ import annotations

import importlib
from typing import Any

from .prelude import run, wrong


def main(request: dict[str, Any]) -> dict[str, Any]:
    """``modules`` to import; ``code``: archs of which torch needs one; ``shared_memory`` in bytes a block."""
    versions = {}
    for name in request["modules"]:
        module = importlib.import_module(name)  # an undefined symbol shows here, as ImportError or OSError
        versions[name] = str(getattr(module, "__version__", "?"))
    if not request.get("code"):
        return {"ok": True, "versions": versions}
    import torch

    archs = torch.cuda.get_arch_list()
    if not set(archs) & set(request["code"]):
        expected = f"code for one of {', '.join(request['code'])}"
        return wrong(f"torch {torch.__version__} has code for {', '.join(archs) or 'no GPU'}", expected)
    return devices(request, versions)


def devices(request: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """The devices that torch sees: as many as asked, each of the arch and with the shared memory of the rules."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() != request["count"]:
        return wrong(f"torch sees {torch.cuda.device_count()} GPUs", f"{request['count']}")
    for index in range(request["count"]):
        seen = torch.cuda.get_device_properties(index)
        capability = f"{seen.major}.{seen.minor}"
        if capability != request["capability"]:
            return wrong(f"GPU {index} ({seen.name}) has compute capability {capability}", request["capability"])
        memory = getattr(seen, "shared_memory_per_block_optin", request["shared_memory"])
        if memory != request["shared_memory"]:
            return wrong(f"GPU {index}: {memory} bytes of shared memory a block", f"{request['shared_memory']}")
    return {"ok": True, "versions": versions}


if __name__ == "__main__":
    run(main)
