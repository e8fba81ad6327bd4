"""Whether a release fits this host, and on which of its interpreters; asked before anything is sent or written."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .base import JSON, HostError, member, named, pattern, read_bytes, run
from .system import glibc

if TYPE_CHECKING:
    from typing import Any

VERSION = pattern(r"3\.\d{1,2}")
PACKAGE = pattern(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
RELEASED = pattern(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")
# Asked of an interpreter: what it is, and which of the packages that the release leaves to the host it has.
QUESTION = (
    "import importlib.util, json, site, sys\n"
    "from importlib import metadata\n"
    "def version(name):\n"
    "    try:\n"
    "        return metadata.version(name)\n"
    "    except metadata.PackageNotFoundError:\n"
    "        return None\n"
    "has = {name: importlib.util.find_spec(name) is not None for name in ('venv', 'ensurepip', 'pip')}\n"
    "provided = {name: version(name) for name in sys.argv[1:]}\n"
    "told = {'version': '%d.%d' % sys.version_info[:2], 'full': sys.version.split()[0], 'provided': provided, **has}\n"
    "print(json.dumps({**told, 'directories': site.getsitepackages()}))\n"
)


class Interpreter:
    """One of the host's: ``says`` is its answer to `QUESTION`."""

    def __init__(self, path: str, says: Mapping[str, Any]) -> None:
        self.path, self.says = path, says

    def lacks(self, provided: Mapping[str, str]) -> list[str]:
        """What of ``provided`` it does not have, both versions named. The host's local part (+cu130) may be any."""
        found = []
        for name, want in sorted(provided.items()):
            have = self.says["provided"].get(name)
            if have is None or want != (have if "+" in want else have.partition("+")[0]):
                found.append(f"{name} {want}, {self.path} has {have or 'none'}")
        return found


def parts(version: str) -> list[int]:
    """A dotted version as numbers."""
    return [int(number) for number in re.findall(r"\d+", version)]


def misfits(requires: JSON, arch: str, host: JSON) -> list[str]:
    """What of a host does not fit, both sides named. ``host``: {"machine", "glibc", "driver", "capabilities"}.

    ``requires.driver`` is the lowest NVIDIA driver; ``capabilities`` are the GPUs' ("9.0"), asked only where the
    release is for an arch.
    """
    found = []
    machine, want, have = requires.get("machine"), requires.get("glibc"), host["glibc"]
    if machine not in (None, host["machine"]):
        found.append(f"the release is for {machine}, this is {host['machine']}")
    if want is not None and parts(have) < parts(str(want)):
        found.append(f"the release needs glibc {want}, this host has {have or 'another libc'}")
    lowest, driver = requires.get("driver"), host["driver"]
    if lowest is not None and parts(driver or "") < parts(str(lowest)):
        found.append(f"the release needs NVIDIA driver {lowest} or later, this host has {driver or 'none'}")
    chips = sorted({"sm_" + capability.replace(".", "") for capability in host["capabilities"]})
    if arch != "none" and not found and arch.rstrip("af") not in chips:
        found.append(f"the release is for {arch}, the GPUs here are {', '.join(chips) or 'none that nvidia-smi shows'}")
    return found


def host_facts(arch: str) -> JSON:
    """What `misfits` wants to know."""
    asked = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], 30) if arch != "none" else None
    return {
        "machine": os.uname().machine,
        "glibc": glibc(),
        "driver": (read_bytes(Path("/sys/module/nvidia/version")) or b"").decode(errors="replace").strip(),
        "capabilities": re.findall(r"^\d+\.\d+$", asked.stdout, re.MULTILINE) if asked is not None else [],
    }


def interpreters(version: str, provided: Mapping[str, str]) -> list[Interpreter]:
    """The host's interpreters that answer, each once, the most likely first."""
    import shutil  # not at the head: a question needs none of it

    named_so = (f"/usr/bin/python{version}", "/usr/bin/python3", f"/usr/local/bin/python{version}")
    found: dict[str, Interpreter] = {}
    for path in (sys.executable, *named_so, shutil.which("python3") or "", shutil.which(f"python{version}") or ""):
        # An interpreter is its path up to its name, and not what the name points at: that is how a venv's is told.
        key = str(Path(path).parent / Path(os.path.realpath(path)).name)
        if path and key not in found:
            answer = run([path, "-I", "-c", QUESTION, *provided]).stdout
            if answer.startswith("{"):
                found[key] = Interpreter(path, json.loads(answer))
    return list(found.values())


def fitting_python(manifest: JSON) -> Interpreter:
    """The host's interpreter for this release; refused, with both sides named, when the host does not fit."""
    requires = member(manifest, "requires", dict)
    version = named(VERSION, requires.get("python"), "requires.python")
    provided = member(requires, "provided", dict, {})
    for name, release in provided.items():
        named(PACKAGE, name, "requires.provided")
        named(RELEASED, release, f"requires.provided.{name}")
    arch = str(manifest.get("arch") or "none")
    wrong = misfits(requires, arch, host_facts(arch))
    have = interpreters(version, provided)
    right = [python for python in have if python.says["version"] == version]
    if not right:
        there = ", ".join(f"{python.says['full']} ({python.path})" for python in have)
        wrong.append(f"the release needs Python {version}, this host has {there}")
    lacking = [line for python in right for line in python.lacks(provided)]
    fit = [python for python in right if not python.lacks(provided)]
    if right and not fit:
        wrong.append("the release leaves to the host what this host does not have: " + "; ".join(lacking))
    able = [python for python in fit if python.says["venv"]]
    if fit and not able:
        wrong.append(f"{fit[0].path} has no venv module: apt-get install python3-venv")
    if manifest.get("wheels", "ship") == "index" and able:
        able = [python for python in able if python.says["ensurepip"] or python.says["pip"]]
        if not able:
            wrong.append("wheels: index needs pip here: apt-get install python3-venv (or python3-pip)")
    if wrong:
        raise HostError("refused", "; ".join(wrong))
    return able[0]
