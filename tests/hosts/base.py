"""The root filesystem that all test hosts share read-only: made once with mmdebstrap (30 s), kept between runs."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

PACKAGES = (
    "systemd,systemd-sysv,dbus,libpam-systemd,openssh-server,sudo,python3,python3-venv,iproute2,procps,"
    "ca-certificates,faketime"
)
# Would start by themselves, or want a kernel or a terminal of their own: noise in a test host.
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "systemd-pstore.service",
    "getty@tty1.service",
    "console-getty.service",
    "getty.target",
    "dev-hugepages.mount",
    "systemd-remount-fs.service",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
)
# user -> line in sudoers; `asks` wants a password, `plain` may not use sudo at all.
USERS = {"deploy": "deploy ALL=(ALL) NOPASSWD: ALL", "asks": "asks ALL=(ALL) ALL", "plain": ""}
FAKE_NVIDIA_SMI = Path(__file__).parent / "files" / "nvidia-smi"
JOURNALD = "[Journal]\nStorage=persistent\nSystemMaxUse=64M\nRateLimitIntervalSec=0\n"


def ensure_base(state: Path) -> Path:
    """The base's directory under ``state``; a changed recipe makes a new one. Raises CalledProcessError."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + FAKE_NVIDIA_SMI.read_bytes()).hexdigest()[:12]
    base = state / f"base-{recipe}"
    with (state / "base.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not base.exists():
            unfinished = state / "base.tmp"
            if unfinished.exists():
                shutil.rmtree(unfinished)
            _bootstrap(unfinished)
            _configure(unfinished)
            unfinished.rename(base)
    return base


def _bootstrap(root: Path) -> None:
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    sources = [
        path
        for path in (
            Path("/etc/apt/sources.list.d/debian.sources"),
            Path("/etc/apt/sources.list.d/ubuntu.sources"),
            Path("/etc/apt/sources.list"),
        )
        if path.is_file() and path.stat().st_size
    ][:1]
    excludes = [f"--dpkgopt=path-exclude=/usr/share/{kind}/*" for kind in ("doc", "man", "locale")]
    subprocess.run(
        [
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--format=directory"),
            *(f"--include={PACKAGES}", '--aptopt=APT::Install-Recommends "false"', "--dpkgopt=force-unsafe-io"),
            *(*excludes, release["VERSION_CODENAME"].strip('"'), str(root), *map(str, sources)),
        ],
        stdin=subprocess.DEVNULL,
        check=True,
    )


def _configure(root: Path) -> None:
    for stale in (*root.glob("etc/ssh/ssh_host_*_key*"), root / "etc/resolv.conf", root / "etc/hostname"):
        stale.unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("")
    for unit in MASKED:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    (root / "var/log/journal").mkdir(parents=True, exist_ok=True)
    journald = root / "etc/systemd/journald.conf.d"
    journald.mkdir(parents=True, exist_ok=True)
    (journald / "test-host.conf").write_text(JOURNALD)
    for user, sudoers in USERS.items():
        subprocess.run(["chroot", root, "useradd", "-m", "-s", "/bin/bash", user], check=True)
        # A key logs in only to an account that is not locked, and "!" in shadow means locked.
        subprocess.run(["chroot", root, "usermod", "-p", "*", user], check=True)
        if sudoers:
            rule = root / "etc/sudoers.d" / user
            rule.write_text(sudoers + "\n")
            rule.chmod(0o440)
    fake = root / "usr/local/bin/nvidia-smi"
    shutil.copyfile(FAKE_NVIDIA_SMI, fake)
    fake.chmod(0o755)
