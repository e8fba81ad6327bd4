"""Hosts that a release cannot be brought to: a clear error, what runs is untouched, nothing half-made is left."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release import Release
from ddtree_ops.remote.ship import ship

from ..unit.release.test_build import SITE, make
from ..unit.release.wheelwright import make_wheel
from .harness import TestHost
from .test_ship import ROOT, Line, whole, with_noise

STAGING = "/var/tmp/ddtree-staging-deploy"


class Guarded:
    """A host on which a service runs from a first release, out of a small disk of its own."""

    def __init__(self, host: TestHost, directory: Path) -> None:
        host.reset()
        # There are no loop devices in a host; a tmpfs is as full and as read-only as a disk.
        host.sh(f"mkdir -p {ROOT}; mount -t tmpfs -o size=400M,mode=755 tmpfs {ROOT}")
        self.host, self.line = host, Line(host, "deploy")
        self.first = make(directory / "first")
        self.line.agent.bootstrap()
        ship(self.line, self.first)
        python = f"{ROOT}/releases/{self.first.id}/venv/bin/python"
        script = "import time, torch; time.sleep(1e6)"
        host.sh(f"systemd-run -q --unit=guarded --uid=ddtree {python} -I -c '{script}'")
        self._pid, self._tree = self._main_pid(), self._listing()

    def _main_pid(self) -> str:
        return self.host.sh("systemctl show -p MainPID --value guarded").strip()

    def _listing(self) -> str:
        return self.host.sh(
            f"cd {ROOT}; find . -type f ! -path './store/*' ! -name .lock -printf '%p %s %T@\\n' | sort"
        )

    def look(self) -> None:
        """What is there now is what has to stay."""
        self._tree = self._listing()

    def untouched(self) -> bool:
        """The service runs on, and below the root all is as it was (whole blobs in the store apart)."""
        blobs = self.host.sh(
            f"cd {ROOT}/store; find . -type f -printf '%f  %p\\n' | grep -v tmp | sha256sum -c --quiet -"
        )
        odd = self.host.sh(f"find {ROOT}/store -name '*tmp*'; find {ROOT}/releases -name '*tmp-*'")
        assert (blobs, odd) == ("", "")
        assert self._listing() == self._tree
        return self._main_pid() == self._pid != "0"

    def refused(self, release: Release, match: str, *, sent: bool = False) -> str:
        """Shipping fails with these words, and before anything is sent unless ``sent``."""
        self.look()
        before = self.host.bytes_to
        with pytest.raises(Failed, match=match) as caught:
            ship(self.line, release)
        if not sent:
            assert self.host.bytes_to - before < 300_000
        assert self.untouched()
        return f"{caught.value.message}\n{caught.value.hint}"

    def refused_meanwhile(self, release: Release, match: str, change: Callable[[], object]) -> None:
        """Shipping fails with these words when the change comes with a third of the release sent."""
        changed = False

        def told(sent: int, total: int) -> None:
            nonlocal changed
            if sent > total // 3 and not changed:
                changed = True
                change()

        self.look()
        with pytest.raises(Failed, match=match):
            ship(self.line, release, told)
        assert changed
        assert self.untouched()

    def takes(self, release: Release) -> None:
        """With room again it is shipped after all."""
        self.empty()
        ship(self.line, release)
        assert whole(self.host, release)

    def fill(self, leave: int) -> None:
        """Leave so many MiB free below the root."""
        free = int(self.host.sh(f"df -B1M --output=avail {ROOT} | tail -1"))
        self.host.sh(f"fallocate -l {free - leave}M {ROOT}/store/.ballast")

    def empty(self) -> None:
        self.host.sh(f"rm -f {ROOT}/store/.ballast")


@pytest.fixture(scope="module")
def once(lab: object, _two: tuple[TestHost, TestHost], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    host = _two[0]
    host.up()
    yield Guarded(host, tmp_path_factory.mktemp("guarded"))
    host.reset()


@pytest.fixture
def guarded(once: Guarded) -> Iterator[Guarded]:
    assert once.untouched()
    yield once
    once.empty()
    once.host.sh(
        f"rm -rf {STAGING}; cd {ROOT}/releases; "
        f"for r in *; do [ $r = {once.first.id} ] || {{ chmod -R u+w $r; rm -r $r; }}; done"
    )
    once.look()


def changed(release: Release, **requires: object) -> Release:
    """The same release under another id, with other requirements."""
    text = {**release.manifest, "requires": {**release.manifest["requires"], **requires}}
    text["id"] = hashlib.sha256(repr(text).encode()).hexdigest()[:16]
    return Release(text["id"], text, release.cache)


def with_slow_smoke(release: Release) -> Release:
    """Its import ends when the disk is full, or after 15 seconds."""
    lines = "import os, time\nend = time.monotonic() + 15\n"
    lines += "while os.statvfs(__file__).f_bfree and time.monotonic() < end:\n    time.sleep(0.1)\n"
    sha256, size = release.cache.add_blob([lines.encode()])
    slow = {"path": f"{SITE}/slow.py", "sha256": sha256, "size": size, "mode": 0o644}
    text = {**release.manifest, "files": [*release.manifest["files"], slow], "smoke": ["import slow"]}
    return Release(release.id, text, release.cache)


def bigger(release: Release, megabytes: int) -> Release:
    return changed(with_noise(release, megabytes))


@pytest.mark.timeout(600)
def test_a_disk_without_room_is_told_before_anything_is_sent(guarded: Guarded) -> None:
    guarded.fill(leave=60)
    guarded.refused(bigger(guarded.first, 40), rf"needs \d+ MiB, (59|60) MiB are free at {ROOT}")


@pytest.mark.timeout(600)
def test_a_disk_of_staging_that_fills_up_meanwhile(guarded: Guarded) -> None:
    """Somebody else's bytes come between the look at the disk and our writing."""
    release = bigger(guarded.first, 60)
    guarded.host.sh(f"mkdir -p {STAGING}; mount -t tmpfs -o size=20M,uid=deploy,mode=700 tmpfs {STAGING}")
    guarded.refused(release, f"disk-full|needs .* free at .*{STAGING}")
    guarded.host.sh(f"mount -o remount,size=200M {STAGING}")
    full = f"mount -o remount,size=25M {STAGING} || fallocate -l 150M {STAGING}/ballast"
    guarded.refused_meanwhile(release, "no space left", lambda: guarded.host.sh(full))
    assert guarded.host.sh(f"find {STAGING} -name '*.part'") == ""
    guarded.host.sh(f"umount {STAGING}; rmdir {STAGING}")
    guarded.takes(release)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("left", "words"),
    [(20, "no space left"), (80, r"needs \d+ MiB, \d+ MiB are free")],
    ids=["for-the-store", "for-the-release"],
)
def test_a_disk_of_releases_that_fills_up_meanwhile(guarded: Guarded, left: int, words: str) -> None:
    release = bigger(guarded.first, 60)
    guarded.refused_meanwhile(release, words, lambda: guarded.fill(left))
    guarded.takes(release)


@pytest.mark.timeout(600)
def test_a_disk_that_is_full_when_the_release_is_made(guarded: Guarded) -> None:
    """The last write meets it: the files are there, the smoke import runs until no block is free."""
    release = with_slow_smoke(bigger(guarded.first, 60))
    watch = f"cd {ROOT}; until find releases/*/{SITE}/slow.py 2>/dev/null | grep -q .; do :; done; sleep 1; "
    watch += "dd if=/dev/zero of=store/.ballast bs=4k 2>/dev/null || true"
    beside = threading.Thread(target=guarded.host.sh, args=(watch,))
    beside.start()
    guarded.refused(release, "no space left", sent=True)
    beside.join()
    guarded.takes(release)


def test_a_read_only_root(guarded: Guarded) -> None:
    guarded.host.sh(f"mount -o remount,ro {ROOT}")
    try:
        guarded.refused(bigger(guarded.first, 1), f"{ROOT} is on a read-only file system")
        with pytest.raises(Failed, match="read-only file system"):
            guarded.line.agent.call("bootstrap", source_b64="cGFzcw==")
    finally:
        guarded.host.sh(f"mount -o remount,rw {ROOT}")


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        ({"python": "3.12"}, r"needs Python 3\.12, this host has 3\.11\.\d+ \(/usr/bin/python3"),
        ({"glibc": "2.99"}, r"needs glibc 2\.99, this host has 2\.36"),
        ({"machine": "aarch64"}, "is for aarch64, this is x86_64"),
        ({"driver": "580.65.06"}, r"needs NVIDIA driver 580\.65\.06 or later, this host has none"),
        ({"provided": {"torch": "2.11.0"}}, r"torch 2\.11\.0, /usr/bin/python3\S* has none"),
    ],
)
def test_a_host_that_does_not_fit(guarded: Guarded, requires: dict[str, object], words: str) -> None:
    release = changed(guarded.first, **requires)
    if "python" in requires:
        files = [
            {**file, "path": file["path"].replace("python3.11", "python3.12")} for file in release.manifest["files"]
        ]
        release = Release(release.id, {**release.manifest, "files": files}, release.cache)
    guarded.refused(release, words)


@pytest.mark.timeout(600)
def test_without_python3_venv(guarded: Guarded) -> None:
    """Debian's python3-venv is ensurepip; venv itself is in libpython3-stdlib, which python3-minimal does without."""
    library = "/usr/lib/python3.11"
    release = bigger(guarded.first, 1)
    index = {"wheels": "index", "index_requirements": [{"name": "x", "version": "1", "hashes": ["0" * 64]}]}
    assert guarded.host.sh(f"dpkg -S {library}/ensurepip/__init__.py").startswith("python3.11-venv:")
    guarded.host.sh(f"mv {library}/ensurepip {library}/ensurepip.away")
    try:
        from_index = Release("ab" * 8, {**release.manifest, "id": "ab" * 8, **index}, release.cache)
        guarded.refused(from_index, "needs pip here")
        ship(guarded.line, release)
        assert whole(guarded.host, release)
    finally:
        guarded.host.sh(f"mv {library}/ensurepip.away {library}/ensurepip")
    guarded.host.sh(f"mv {library}/venv {library}/venv.away")
    try:
        guarded.refused(bigger(guarded.first, 1), "has no venv module: apt-get install python3-venv")
    finally:
        guarded.host.sh(f"mv {library}/venv.away {library}/venv")


@pytest.mark.timeout(600)
def test_a_clock_that_is_years_off(guarded: Guarded) -> None:
    """libfaketime under every python3 of the host: 2031 for one release, 1999 for the next. Order is by counting."""
    host = guarded.host
    library = host.sh("find /usr/lib -name libfaketime.so.1").strip()
    releases = [bigger(guarded.first, 1), bigger(guarded.first, 2)]
    for release, date in zip(releases, ("2031-03-01 00:00:00", "1999-03-01 00:00:00"), strict=True):
        wrapper = f"#!/bin/sh\nLD_PRELOAD={library} FAKETIME='@{date}' exec /usr/bin/python3 \"$@\"\n"
        host.put("/usr/local/bin/python3", wrapper.encode(), 0o755)
        assert host.sh("python3 -c 'import time; print(time.localtime().tm_year)'").strip() == date[:4]
        ship(guarded.line, release)
        assert whole(host, release)
    try:
        told = guarded.line.agent.call("releases")["releases"]
        assert [row["id"] for row in told] == [releases[1].id, releases[0].id, guarded.first.id]
        shown = guarded.line.agent.call("prune", keep=1, dry=True)
        assert [row["id"] for row in shown["remove"]] == [releases[0].id]
        kept = {row["id"]: row["why"] for row in shown["keep"]}
        assert kept[guarded.first.id] == [f"process {guarded._pid}"]
        guarded.line.agent.call("prune", keep=1, dry=False, expect=[releases[0].id])
    finally:
        host.sh("rm /usr/local/bin/python3")


def test_links_that_the_ssh_user_planted(guarded: Guarded) -> None:
    """Into files that only root may read or write: replaced or refused; nothing of them is told or changed."""
    host, release = guarded.host, bigger(guarded.first, 1)
    victim = release.manifest["files"][-1]["sha256"]
    shadow = host.sh("sha256sum /etc/shadow")
    host.sh(
        f"mkdir -p {STAGING}; ln -s /etc/shadow {STAGING}/{victim}; ln -s /etc/shadow {STAGING}/{'0' * 64}", "deploy"
    )
    ship(guarded.line, release)
    assert whole(host, release)
    assert host.sh(f"grep -rlF root: {ROOT}/store || true") == ""
    release = bigger(guarded.first, 2)
    victim = release.manifest["files"][-1]["sha256"]
    host.sh(f"ln -s /etc/shadow {STAGING}/{victim}.part", "deploy")
    said = guarded.refused(release, "symbolic", sent=True)
    assert "root:" not in said
    assert host.sh("sha256sum /etc/shadow") == shadow
    host.sh(f"rm -r {STAGING}")
    ship(guarded.line, release)


@pytest.mark.timeout(600)
def test_wheels_from_the_hosts_own_index(guarded: Guarded, tmp_path: Path) -> None:
    """pip there, every hash pinned; an index that has another file, or does not have it, is told by name."""
    host = guarded.host
    wheel = make_wheel(tmp_path, "fromindex", {"fromindex/__init__.py": b"value = 5\n"})
    shelf = "/srv/index/fromindex"
    host.put(f"{shelf}/{wheel.name}", wheel.read_bytes())
    host.put(f"{shelf}/index.html", f'<a href="{wheel.name}">{wheel.name}</a>'.encode())
    host.put("/etc/pip.conf", b"[global]\nindex-url = http://127.0.0.1:8099\n")
    host.sh(
        "systemd-run -q --unit=index -p WorkingDirectory=/srv/index python3 -m http.server 8099 -b 127.0.0.1; sleep 1"
    )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()

    def wanting(*entries: tuple[str, str, str], smoke: str = "import fromindex") -> Release:
        listed = [{"name": name, "version": version, "hashes": [sha]} for name, version, sha in entries]
        more = {"wheels": "index", "index_requirements": listed, "smoke": [smoke], "format": 2}
        made = changed(bigger(guarded.first, 1), glibc="2.17")
        text = {**made.manifest, **more, "id": hashlib.sha256(repr(listed).encode()).hexdigest()[:16]}
        return Release(text["id"], text, made.cache)

    guarded.refused(
        wanting(("fromindex", "1.0", "0" * 64)), "another fromindex==1.0 than the one that is pinned", sent=True
    )
    guarded.refused(wanting(("nowhere", "1.0", digest)), "host's index does not have nowhere==1.0", sent=True)
    good = wanting(("fromindex", "1.0", digest))
    ship(guarded.line, good)
    home = f"{ROOT}/releases/{good.id}"
    ask = "import fromindex, importlib.util as u; print(fromindex.value, u.find_spec('pip'))"
    assert host.sh(f'{home}/venv/bin/python -I -c "{ask}"') == "5 None\n"
    assert host.sh(f"ls {home}").split() == ["installed.json", "manifest.json", "share", "venv"]
    assert host.run(["grep", "-r", "tmp-", f"{home}/venv/bin", f"{home}/venv/pyvenv.cfg"]).returncode == 1
    host.sh("systemctl stop index")
    other = wanting(("fromindex", "1.0", digest), ("other", "1.0", digest))
    guarded.refused(other, "does not reach its index", sent=True)
