"""Runs inside a host's own mount namespace (started by harness.py through unshare): mounts its disk, then nspawn.

All mounts of a host live here only. In the machine's own namespace a later nspawn would keep a hidden copy of them,
so an unmounted disk would stay busy; like this nothing is left even after kill -9.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

REBOOT_STATUS = 133  # nspawn --keep-unit answers this when the guest reboots itself


def mount(host: Path, base: Path) -> Path:
    """Loop-mounts the host's ext4 and lays it over the base; returns the root directory."""
    disk, root = host / "disk", host / "root"
    disk.mkdir(exist_ok=True)
    root.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop,noatime", host / "disk.img", disk], check=True)
    for name in ("upper", "work"):
        (disk / name).mkdir(exist_ok=True)
    layers = f"lowerdir={base},upperdir={disk / 'upper'},workdir={disk / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], check=True)
    return root


def fill(host: Path, root: Path, hostname: str, users: list[str]) -> None:
    """What makes this host different from the base. Its ssh host key is kept beside the disk: a new disk keeps it."""
    for name in ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"):
        shutil.copy(host / name, root / "etc/ssh" / name)
    (root / "etc/hostname").write_text(hostname + "\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n")
    (root / "etc/machine-id").write_text(uuid.uuid4().hex + "\n")
    for user, home in (("root", "root"), *((user, f"home/{user}") for user in users)):
        ssh = root / home / ".ssh"
        ssh.mkdir(exist_ok=True)
        ssh.chmod(0o700)
        shutil.copyfile(host.parent.parent / "id_ed25519.pub", ssh / "authorized_keys")
        (ssh / "authorized_keys").chmod(0o600)
        subprocess.run(["chroot", root, "chown", "-R", f"{user}:", f"/{home}/.ssh"], check=True)
    model, memory = (
        ("NVIDIA B300 SXM6 AC", 275040)
        if hostname.startswith("b300")
        else (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            97887,
        )
    )
    gpus = [f"{index},GPU-fake-{hostname}-{index},{model},{memory},0,0,580.95.05\n" for index in range(8)]
    (root / "etc/fake-gpus").write_text("".join(gpus))


def boot(host: Path, root: Path, hostname: str, machine: str, bpf: bool) -> None:
    """Boots the guest's systemd and boots it again as often as it reboots itself."""
    while True:
        guest = subprocess.Popen(
            [
                *("systemd-nspawn", "--quiet", "--boot", f"--machine={machine}", f"--hostname={hostname}"),
                *(
                    f"--directory={root}",
                    "--register=no",
                    "--keep-unit",
                    f"--network-namespace-path=/run/netns/{machine}",
                ),
                *(
                    "--capability=CAP_NET_ADMIN" + (",CAP_BPF,CAP_PERFMON" if bpf else ""),
                    *(["--system-call-filter=bpf"] if bpf else []),
                    "--private-users=no",
                    "--resolv-conf=off",
                    "--timezone=off",
                ),
                *("--link-journal=no", "--console=read-only"),
            ],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        )
        (host / "nspawn.pid").write_text(str(guest.pid))
        status = guest.wait()
        print(f"nspawn ended with {status}", flush=True)
        if status != REBOOT_STATUS:
            return


def main() -> None:
    task = json.loads(sys.argv[1])
    host = Path(task["directory"])
    for cgroup in task["cgroups"]:
        (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    root = mount(host, Path(task["base"]))
    if task["fill"]:
        fill(host, root, task["hostname"], task["users"])
        subprocess.run(["umount", root, host / "disk"], check=True)
    else:
        boot(host, root, task["hostname"], task["machine"], task["bpf"])


if __name__ == "__main__":
    main()
