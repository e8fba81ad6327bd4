"""Regenerates a lock file with the hashes of the real wheels: ``python -m ddtree_ops.release.relock reference-cp311``.

Versions are taken from the existing lock; ``relock reference-cp311 numpy==2.4.6`` changes or adds one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import Failed
from .cache import file_sha256
from .lock import LOCKS, Lock, parse_lock
from .wheels import target_options


def relock(lock: Lock, changes: list[str]) -> str:
    """The new text of a lock. Raises Failed with what pip said."""
    versions = dict([pin.requirement.split("==") for pin in lock.pins] + [change.split("==") for change in changes])
    header = [line for line in lock.text.splitlines() if line.startswith("#")]
    lines = []
    for name, version in sorted(versions.items()):
        with tempfile.TemporaryDirectory() as directory:
            extra = ["--extra-index-url", lock.extra_index] if lock.extra_index else []
            common = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory]
            command = [*common, *target_options(lock), f"{name}=={version}"]
            if subprocess.run(command, check=False, capture_output=True).returncode:
                done = subprocess.run([*command, *extra], check=False, capture_output=True, text=True)
                if done.returncode:
                    raise Failed(f"{name}=={version}: {done.stderr.strip()[-1000:]}")
            (wheel,) = Path(directory).glob("*.whl")
            lines.append(f"{name}=={version} --hash=sha256:{file_sha256(wheel)}")
    return "\n".join([*header, *lines]) + "\n"


if __name__ == "__main__":
    file = LOCKS / f"{sys.argv[1]}.txt"
    file.write_text(relock(parse_lock(file.read_text(), file.name), sys.argv[2:]))
