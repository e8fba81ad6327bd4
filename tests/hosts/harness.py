"""Test hosts: real systemd as PID 1 and real sshd in systemd-nspawn, each with its own disk, network and cgroup.

Every run takes a slot (an flock), and all names a slot uses are its own: several runs on one machine do not meet, and
what a killed run left in a slot is cleared by the next one that takes it. Needs root; PID 1 need not be systemd.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from .base import USERS, ensure_base
from .machine import (
    CGROUPS,
    HarnessError,
    alive,
    is_free,
    is_supervisor,
    kill_cgroup,
    nobody_in,
    read_pid,
    remove_cgroup,
    sh,
    wait_for,
)

HERE = Path(__file__).parent
STATE = Path(os.environ.get("DDTREE_TESTHOSTS", "/var/tmp/ddtree-testhosts"))
SLOTS = range(8)
FIRST_NET = 216  # slot n uses 10.(216+n).0.0/16
TOOLS = ("systemd-nspawn", "mmdebstrap", "ip", "tc", "ssh", "ssh-keygen", "mkfs.ext4", "losetup", "unshare", "nsenter")
EXT4_GOINGDOWN = 0x8004587D
NO_LOG_FLUSH = 2


class TestHost:
    """One host: ssh at ``address``:22 with ``hostkey`` ("ssh-ed25519 AAAA..."), users root, deploy, asks and plain."""

    __test__ = False  # pytest: a helper, not a test class

    def __init__(self, lab: Lab, name: str, index: int, bpf: bool = True) -> None:
        """Without ``bpf`` its systemd cannot enforce IPAddressDeny=, as in many containers."""
        self.lab, self.name, self.index, self.bpf = lab, name, index, bpf
        self.directory = lab.directory / "h" / name
        self.machine = f"{lab.prefix}-{name}"
        self.device = f"{lab.prefix}v{index}"
        self.address = f"{lab.net}.{index}.2"
        self.port = 22
        self.identity_file = lab.directory / "id_ed25519"
        self.known_hosts = lab.directory / "known_hosts"
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def hostkey(self) -> str:
        return " ".join((self.directory / "ssh_host_ed25519_key.pub").read_text().split()[:2])

    @property
    def leader(self) -> int:
        """Pid (of this machine) of the host's PID 1; 0 when it does not run."""
        nspawn = read_pid(self.directory / "nspawn.pid")
        try:
            if Path(f"/proc/{nspawn}/comm").read_text().strip() != "systemd-nspawn":
                return 0
            for child in Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split():
                for line in Path(f"/proc/{child}/status").read_text().splitlines():
                    if line.startswith("NSpid:") and line.split()[-1] == "1":
                        return int(child)
        except OSError:
            return 0
        return 0

    def run(
        self, argv: Sequence[str], stdin: bytes | None = None, user: str = "root", timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs on the host by way of its namespaces, so it works while the link is cut. Never raises for a status."""
        leader = self.leader
        if not leader:
            raise HarnessError(f"{self.name}: not running")
        home = "/root" if user == "root" else f"/home/{user}"
        become = [] if user == "root" else ["runuser", "-u", user, "--"]
        # A working directory given to nsenter would be one of this machine's.
        environment = [
            *("env", "-i", "--chdir=/"),
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"HOME={home}",
        ]
        enter = ["nsenter", f"--target={leader}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        return subprocess.run(
            [*enter, *environment, f"USER={user}", "LANG=C.UTF-8", *become, *argv],
            input=stdin or b"",
            capture_output=True,
            timeout=timeout,
        )

    def sh(self, script: str, user: str = "root") -> str:
        """Output of a shell script that must succeed."""
        done = self.run(["sh", "-ec", script], user=user)
        if done.returncode:
            raise HarnessError(
                f"{self.name}: {script}: status {done.returncode}: {done.stderr.decode(errors='replace')}"
            )
        return done.stdout.decode()

    def ssh(self, command: str, user: str = "root", timeout: float = 30) -> subprocess.CompletedProcess[bytes]:
        """Runs a command line through the machine's ssh client."""
        options = ("BatchMode=yes", "ConnectTimeout=2", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes")
        return subprocess.run(
            [
                *(
                    "ssh",
                    "-F",
                    "/dev/null",
                    "-i",
                    str(self.identity_file),
                    "-o",
                    f"UserKnownHostsFile={self.known_hosts}",
                ),
                *(word for option in options for word in ("-o", option)),
                *(f"{user}@{self.address}", command),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )

    def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        done = self.run(
            ["sh", "-ec", 'mkdir -p "$(dirname "$1")"; cat >"$1"; chmod "$2" "$1"; sync "$1"', "sh", path, f"{mode:o}"],
            stdin=content,
        )
        if done.returncode:
            raise HarnessError(f"{self.name}: put {path}: {done.stderr.decode(errors='replace')}")

    def up(self) -> None:
        """Boots it (made on first use) and waits until ssh answers and systemd says it is running."""
        if not (self.directory / "ready").exists():
            self._make_disk()
        self._link_up()
        if self.leader:
            return
        self._clear()
        for cgroup in self._cgroups():
            cgroup.mkdir(exist_ok=True)
        with (self.directory / "console.log").open("ab") as console:
            self._supervisor = self._namespace(fill=False, stdout=console, stderr=console, start_new_session=True)
        try:
            wait_for("its PID 1", lambda: self.leader, 10)
            wait_for("sshd", self._sshd_answers, 30)
            # Degraded is refused: a test must not blame our unit for a failed unit of the base.
            state = self.run(["systemctl", "is-system-running", "--wait"]).stdout.decode().strip()
            if state != "running":
                raise HarnessError(f"systemd is {state}: {self.run(['systemctl', '--failed']).stdout.decode()}")
        except HarnessError as error:
            console_tail = (self.directory / "console.log").read_text(errors="replace")[-2000:]
            raise HarnessError(f"{self.name}: {error}\n{console_tail}") from error

    def down(self) -> None:
        """Clean power-off; the disk is kept."""
        leader = self.leader
        if leader:
            sh("kill", "-s", "RTMIN+4", leader)  # systemd(1): poweroff.target
            with contextlib.suppress(HarnessError):
                wait_for("power-off", lambda: not alive(leader), 20)
        self._clear()

    def powerloss(self) -> None:
        """Cable out, what was not synced is lost (ext4 shut down, no log flush), PID 1 killed. ``up`` afterwards."""
        leader = self.leader
        if not leader:
            raise HarnessError(f"{self.name}: not running")
        self.cut()
        shutdown = (
            "import fcntl,os,struct,sys;"
            f"fcntl.ioctl(os.open(sys.argv[1],os.O_RDONLY),{EXT4_GOINGDOWN},struct.pack('I',{NO_LOG_FLUSH}))"
        )
        supervisor = read_pid(self.directory / "supervisor.pid")
        sh("nsenter", f"--target={supervisor}", "--mount", sys.executable, "-c", shutdown, self.directory / "disk")
        sh("kill", "-KILL", leader)
        self._clear()

    def cut(self) -> None:
        """Pulls the cable: packets vanish, nobody is told."""
        sh("ip", "-n", self.machine, "link", "set", "eth0", "down")

    def uncut(self) -> None:
        self._link_up()

    def shape(self, bytes_per_s: int | None) -> None:
        """Limits what goes to the host (tc-tbf(8)); a queue of 50 ms. None: as fast as it goes."""
        sh("tc", "qdisc", "del", "dev", self.device, "root", check=False)
        if bytes_per_s is not None:
            bucket = ("rate", f"{bytes_per_s * 8}bit", "burst", 16_000, "limit", max(32_000, bytes_per_s // 20))
            sh("tc", "qdisc", "add", "dev", self.device, "root", "tbf", *bucket)

    @property
    def bytes_to(self) -> int:
        """Bytes that went over the link to the host since it was made, headers included."""
        return int(Path(f"/sys/class/net/{self.device}/statistics/tx_bytes").read_text())

    def break_sessions(self, user: str) -> None:
        """Ends the user's ssh connections from the host's side, as a middlebox would: at once, told to nobody else."""
        self.run(["pkill", "-KILL", "-f", f"^sshd: {user}"])

    def reset(self) -> None:
        """A new empty disk under the same name, address and host key; running afterwards."""
        self._clear()
        (self.directory / "ready").unlink(missing_ok=True)
        self.up()

    def destroy(self) -> None:
        self._clear()
        sh("ip", "link", "del", self.device, check=False)
        sh("ip", "netns", "del", self.machine, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _sshd_answers(self) -> bool:
        if not self.leader:
            raise HarnessError("nspawn ended")
        try:
            with socket.create_connection((self.address, self.port), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def _make_disk(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        key = self.directory / "ssh_host_ed25519_key"
        if not key.exists():
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{self.name}", "-f", key)
        image = self.directory / "disk.img"
        image.unlink(missing_ok=True)
        with image.open("wb") as disk:
            disk.truncate(self.lab.disk_bytes)
        sh("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", image)
        filler = self._namespace(fill=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = filler.communicate(timeout=60)[0]
        if filler.returncode:
            raise HarnessError(f"{self.name}: filling the disk: {output.decode(errors='replace')}")
        self._disk_free()
        (self.directory / "ready").touch()
        self.lab.write_known_hosts()

    def _namespace(self, *, fill: bool, **options: Any) -> subprocess.Popen[bytes]:
        task = {
            "directory": str(self.directory),
            "base": str(self.lab.base),
            "fill": fill,
            "hostname": self.name,
            "machine": self.machine,
            "users": list(USERS),
            "bpf": self.bpf,
            "cgroups": [] if fill else [str(cgroup) for cgroup in self._cgroups()],
        }
        unshare = ["unshare", "--mount", "--propagation", "private", sys.executable, "-I", str(HERE / "supervise.py")]
        process = subprocess.Popen([*unshare, json.dumps(task)], stdin=subprocess.DEVNULL, **options)
        (self.directory / "supervisor.pid").write_text(str(process.pid))
        return process

    def _link_up(self) -> None:
        if not Path("/run/netns", self.machine).exists():
            sh("ip", "netns", "add", self.machine)
        if not Path("/sys/class/net", self.device).exists():
            sh("ip", "link", "add", self.device, "type", "veth", "peer", "name", "eth0", "netns", self.machine)
            sh("ip", "addr", "add", f"{self.lab.net}.{self.index}.1/30", "dev", self.device)
            sh("ip", "-n", self.machine, "addr", "add", f"{self.address}/30", "dev", "eth0")
        sh("ip", "link", "set", self.device, "up")
        # What asked for its address while the link was cut would answer "No route to host" to the first who comes now.
        sh("ip", "neigh", "flush", "dev", self.device)
        # No default route inside: whatever is outside the pair answers "unreachable" at once.
        sh("ip", "-n", self.machine, "link", "set", "lo", "up")
        sh("ip", "-n", self.machine, "link", "set", "eth0", "up")

    def _cgroups(self) -> list[Path]:
        return [parent / self.machine for parent in CGROUPS if (parent / "cgroup.procs").exists()]

    def _disk_free(self) -> None:
        image = self.directory / "disk.img"
        wait_for(f"{self.name}: its disk to be free", partial(is_free, image), 10)

    def _clear(self) -> None:
        """Kills what is left of the host, through its cgroup: a guest's PID 1 outlives a killed nspawn."""
        supervisor = read_pid(self.directory / "supervisor.pid")
        if self._supervisor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(2 if not self.leader else 0)
        for cgroup in self._cgroups():
            kill_cgroup(cgroup)
        if self._supervisor is not None:
            self._supervisor.wait(10)
            self._supervisor = None
        elif supervisor:
            wait_for(f"{self.name}: supervisor {supervisor} to end", lambda: not is_supervisor(supervisor), 10)
        for name in ("nspawn.pid", "supervisor.pid"):
            (self.directory / name).unlink(missing_ok=True)
        if (self.directory / "disk.img").exists():
            self._disk_free()
        for cgroup in self._cgroups():
            remove_cgroup(cgroup)


class Lab:
    """The test hosts of one run. ``host(name)`` makes and boots one on first use; ``close`` destroys them all."""

    def __init__(self, slot: int, lock: IO[str], disk_bytes: int = 4 << 30) -> None:
        self.slot, self.disk_bytes = slot, disk_bytes
        self.directory = STATE / f"slot{slot}"
        self.prefix = f"ddt{slot}"
        self.net = f"10.{FIRST_NET + slot}"
        self._lock = lock
        self.hosts: dict[str, TestHost] = {}
        self._clear_leftovers()
        self.base = ensure_base(STATE)
        (self.directory / "h").mkdir(parents=True)
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test hosts", "-f", self.directory / "id_ed25519")
        # Traffic to a host that is down must never leave this machine by its default route.
        sh("ip", "route", "replace", "unreachable", f"{self.net}.0.0/16", "metric", "4000000")

    def host(self, name: str, *, bpf: bool = True) -> TestHost:
        """The running host of that name."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = TestHost(self, name, len(self.hosts) + 1, bpf)
        host.up()
        return host

    def join(self) -> None:
        """Lets the hosts that are up reach one another, and nothing else: each by its own link to this machine."""
        for host in self.hosts.values():
            Path(f"/proc/sys/net/ipv4/conf/{host.device}/forwarding").write_text("1")
            near = f"{self.net}.{host.index}.1"
            sh("ip", "-n", host.machine, "route", "replace", f"{self.net}.0.0/16", "via", near)

    def write_known_hosts(self) -> None:
        """Out of the keys on disk, never by asking the hosts."""
        made = [host for host in self.hosts.values() if (host.directory / "ready").exists()]
        text = "".join(f"{host.name},{host.address} {host.hostkey}\n" for host in made)
        (self.directory / "known_hosts").write_text(text)

    def close(self) -> None:
        for host in self.hosts.values():
            host.destroy()
        self._clear_leftovers()
        self._lock.close()

    def _clear_leftovers(self) -> None:
        """Whatever carries this slot's names was made by this run or by one that is dead: the lock says so."""
        for parent in CGROUPS:
            for cgroup in parent.glob(f"{self.prefix}-*"):
                kill_cgroup(cgroup)
                wait_for(f"{cgroup} to be empty", partial(nobody_in, cgroup), 10)
                remove_cgroup(cgroup)
        for link in Path("/sys/class/net").glob(f"{self.prefix}v*"):
            sh("ip", "link", "del", link.name, check=False)
        for namespace in Path("/run/netns").glob(f"{self.prefix}-*"):
            sh("ip", "netns", "del", namespace.name, check=False)
        for image in self.directory.glob("h/*/disk.img"):
            wait_for(f"{image} to be free", partial(is_free, image), 10)
        if self.directory.exists():
            shutil.rmtree(self.directory)
        sh("ip", "route", "del", "unreachable", f"{self.net}.0.0/16", "metric", "4000000", check=False)


@contextlib.contextmanager
def laboratory(slots: Sequence[int] = SLOTS) -> Iterator[Lab]:
    """A slot of one's own for the length of the block, the first of ``slots`` that is free.

    Raises HarnessError when something it needs is missing.
    """
    if os.geteuid() != 0:
        raise HarnessError("test hosts need root (mounts, network namespaces)")
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        raise HarnessError(f"missing {', '.join(absent)}; run {HERE.name}/install-needs as root")
    STATE.mkdir(mode=0o700, parents=True, exist_ok=True)
    if STATE.is_symlink() or STATE.stat().st_uid != 0:
        raise HarnessError(f"{STATE} is not root's own directory")
    for slot in slots:
        lock = (STATE / f"slot{slot}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        lab = Lab(slot, lock)
        try:
            yield lab
        finally:
            lab.close()
        return
    raise HarnessError(f"all {len(slots)} slots of {STATE} are in use")
