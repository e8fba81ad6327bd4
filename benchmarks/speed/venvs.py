"""Each contestant in an environment of its own below .local/bench, made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
HOME = CHECKOUT / ".local/bench"
PEERS = {
    "ddtree": ("-e", str(CHECKOUT)),
    "fabric": ("fabric>=3.2.2,<3.3",),
    "pyinfra": ("pyinfra>=3.5,<4",),
    "ansible": ("ansible-core>=2.18,<2.20",),
}


def venv(name: str) -> Path:
    """The bin/ of that environment."""
    home = HOME / name
    ready = home / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(home / "bin/pip"), "install", "-q", *PEERS[name]], check=True)
        ready.touch()
    return home / "bin"


def versions() -> dict[str, str]:
    """What was measured: name -> version of the peers made so far."""
    wanted = {"fabric": "fabric", "pyinfra": "pyinfra", "ansible": "ansible-core"}
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    return {
        package: subprocess.check_output([str(HOME / name / "bin/python"), "-c", code, package], text=True).strip()
        for name, package in wanted.items()
        if (HOME / name / "ready").exists()
    }
