"""Shipping on this machine, with the real host script; over ssh and a real link: tests/hosts/test_ship.py."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from ddtree_ops import host
from ddtree_ops.errors import Failed, Unreachable
from ddtree_ops.release import Release
from ddtree_ops.remote import Agent, Result, Transport, connect
from ddtree_ops.remote.pieces import Piece, lots_of, remaining, stream
from ddtree_ops.remote.ship import CONNECTIONS, SLICE, ship

from ..release.test_build import make
from .endpoint import Entry


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return make(tmp_path / "build")


WAITS = (0.0,) * 5


class Here:
    """This machine as a `Link`."""

    def __init__(self, root: Path) -> None:
        self.agent = Agent(connect(Entry()), str(root), "svc", "process")

    def reconnect(self) -> None:
        raise AssertionError("there is no link to lose")

    def beside(self) -> Transport:
        raise AssertionError("nothing is sent")

    def carrier(self) -> None:
        raise AssertionError("nothing is sent")


class Afar:
    """This machine behind a link that is cut at the given bytes of the stream: a command's pipes break there."""

    name, user, may_root = "afar", f"test-{os.getpid()}", True

    def __init__(self, root: Path, cuts: Sequence[int] = (), away: int = 0) -> None:
        self._inner, self._root = connect(Entry()), root
        self.cuts, self.away = list(cuts), away
        self.sent = 0
        self.verbs: list[str] = []
        self.fast: Afar | None = None
        self.more, self.others, self.other_cuts = 0, list[Afar](), list[tuple[int, ...]]()
        self.agent = Agent(self, str(root), "svc", "process")  # type: ignore[arg-type]

    def run(self, argv: Sequence[str], *, stdin: bytes | Iterable[bytes] = b"", **more: object) -> Result:
        self.verbs.append("receive" if "-c" in argv else "call")
        if isinstance(stdin, bytes):
            return self._inner.run(argv, stdin=stdin, **more)  # type: ignore[arg-type]
        cut = False

        def link() -> Iterator[bytes]:
            nonlocal cut
            for chunk in stdin:
                if self.cuts and self.sent + len(chunk) > self.cuts[0]:
                    cut = True
                    chunk = chunk[: self.cuts.pop(0) - self.sent]
                self.sent += len(chunk)
                yield chunk
                if cut:
                    return

        result = self._inner.run(argv, stdin=link(), **more)  # type: ignore[arg-type]
        if cut:
            raise Unreachable("afar: the connection is lost")
        return result

    def reconnect(self) -> None:
        if self.away:
            self.away -= 1
            raise Unreachable("afar: no connection")

    def beside(self) -> Transport:
        if self.more == 0:
            raise Unreachable("afar: no more connections")
        self.more -= 1
        other = Afar(self._root, self.other_cuts.pop(0) if self.other_cuts else ())
        self.others.append(other)
        return other  # type: ignore[return-value]

    def carrier(self) -> Afar | None:
        return self.fast

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Its commands end by themselves."""


@pytest.fixture
def afar(tmp_path: Path) -> Iterator[Callable[..., Afar]]:
    yield lambda *cuts, away=0: Afar(tmp_path / "root", cuts, away)
    shutil.rmtree(f"/var/tmp/ddtree-staging-{Afar.user}", ignore_errors=True)


def with_noise(release: Release, *sizes: int) -> Release:
    files = list(release.manifest["files"])
    for n, size in enumerate(sizes):
        sha256, _ = release.cache.add_blob([os.urandom(size)])
        files.append({"path": f"share/noise/{n}", "sha256": sha256, "size": size, "mode": 0o644})
    return Release(release.id, {**release.manifest, "files": files}, release.cache)


def test_ship_installs_and_the_second_time_does_nothing(release: Release, tmp_path: Path) -> None:
    root = tmp_path / "root"
    report = ship(Here(root), release)
    assert report == (len(release.manifest["files"]), 0, release.manifest["total_size"], 0, ())
    installed = root / "releases" / release.id
    for file in release.manifest["files"]:
        path = installed / file["path"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
        assert path.stat().st_mode & 0o777 == file["mode"] & 0o555
        # Never a hard link: one write would damage every release, or the client's cache.
        assert path.stat().st_nlink == 1
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert ship(Here(root), release).bytes_sent == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert not list(release.cache.directory.glob("staging-*"))
    assert all(release.blob(file["sha256"]).is_file() for file in release.manifest["files"])


def test_one_list_one_stream_one_install(release: Release, afar: Callable[..., Afar]) -> None:
    link = afar()
    report = ship(link, release)
    assert link.verbs == ["call", "receive", "call"]
    assert report.bytes_sent == link.sent > 0
    again = ship(link, release)
    assert (link.verbs[3:], again.bytes_sent) == (["call"], 0)
    assert not list(Path(f"/var/tmp/ddtree-staging-{Afar.user}").iterdir())


@pytest.mark.parametrize("away", [0, 3])
def test_a_cut_costs_what_was_in_flight(release: Release, afar: Callable[..., Afar], away: int) -> None:
    whole = with_noise(release, 3_000_000, 10, 500_000)
    link = afar(60_000, 700_000, 700_001, 3_000_000, away=away)
    told: list[str] = []
    seen: list[int] = []
    report = ship(link, whole, lambda done, total: seen.append(done), told.append, WAITS)
    assert report.cuts == 4
    assert len(told) == 4 + away
    # Each cut costs the agent once more, and here what the pipe and zlib's window held back.
    assert report.bytes_sent < 3_500_000 + 4 * 200_000
    assert seen == sorted(seen) or max(seen) == seen[-1]
    assert (link._root / "releases" / whole.id / "installed.json").is_file()


def test_a_host_that_stays_away_is_given_up(release: Release, afar: Callable[..., Afar]) -> None:
    link = afar(200_000, away=99)
    with pytest.raises(Unreachable, match="no connection") as caught:
        ship(link, with_noise(release, 1_000_000), waits=WAITS)
    assert "goes on from there" in caught.value.hint
    assert link.away == 99 - len(WAITS)


def test_cuts_that_bring_nothing_are_bounded(release: Release, afar: Callable[..., Afar]) -> None:
    link = afar(*[100] * 50)
    with pytest.raises(Unreachable):
        ship(link, release, waits=WAITS)
    assert link.verbs.count("receive") == len(WAITS) + 1


def test_a_sender_that_slept_goes_on(
    release: Release, afar: Callable[..., Afar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link held, but the host took the silence for its end: that is no failure."""
    link, source = afar(), host.receiver()
    assert "\nIDLE_S = 12.0" in source
    monkeypatch.setattr(host, "receiver", lambda: source.replace("\nIDLE_S = 12.0", "\nIDLE_S = 4.0"))
    slept: list[str] = []

    class Sleepy:
        manifest = release.manifest

        def blob(self, sha256: str) -> Path:
            if len(slept) == 2:
                time.sleep(16)  # longer than a loaded machine takes to start the receiver
            slept.append(sha256)
            return release.blob(sha256)

    assert ship(link, Sleepy(), waits=WAITS).cuts >= 1


class Spoilt:
    """A release whose blob ``sha256`` is read wrong at those of its readings that ``wrong`` says."""

    def __init__(self, release: Release, sha256: str, spoilt: Path, *wrong: bool) -> None:
        self._release, self._sha256, self._spoilt, self._wrong = release, sha256, spoilt, list(wrong)
        self.manifest = release.manifest

    def blob(self, sha256: str) -> Path:
        spoilt = sha256 == self._sha256 and bool(self._wrong) and self._wrong.pop(0)
        return self._spoilt if spoilt else self._release.blob(sha256)


def test_a_wrong_byte_is_sent_again_once(release: Release, afar: Callable[..., Afar], tmp_path: Path) -> None:
    victim = release.manifest["files"][0]["sha256"]
    content = release.blob(victim).read_bytes()
    spoilt = tmp_path / "spoilt"
    spoilt.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    told: list[str] = []
    link = afar()
    ship(link, Spoilt(release, victim, spoilt, True), warn=told.append)
    assert link.verbs == ["call", "receive", "call", "receive", "call"]
    assert len(told) == 1 and victim in told[0]
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(Failed, match=f"{victim} arrived wrong, was sent again and is wrong again"):
        ship(afar(), Spoilt(release, victim, spoilt, True, False, True))  # right when it is looked at in between
    assert not list((tmp_path / "root").glob("releases/*/installed.json"))


def test_a_blob_that_changes_in_staging_is_sent_again(release: Release, afar: Callable[..., Afar]) -> None:
    """Root's own copy is what is hashed: what the SSH user's directory did to it is found there."""
    link = afar()
    victim = release.manifest["files"][0]["sha256"]
    content = release.blob(victim).read_bytes()
    inner = link.run

    def run(argv: Sequence[str], **more: object) -> Result:
        result = inner(argv, **more)  # type: ignore[arg-type]
        if link.verbs == ["call", "receive"]:
            staging = Path(f"/var/tmp/ddtree-staging-{Afar.user}")
            for path in staging.glob("pack.*"):
                path.write_bytes(path.read_bytes().replace(content, bytes(len(content))))
        return result

    link.run = run  # type: ignore[method-assign]
    told: list[str] = []
    ship(link, release, warn=told.append)
    assert len(told) == 1 and victim in told[0]


def test_a_damaged_cache_is_named(release: Release, afar: Callable[..., Afar], tmp_path: Path) -> None:
    victim = release.blob(release.manifest["files"][0]["sha256"])
    victim.write_bytes(bytes(len(victim.read_bytes())))
    for link in (afar(), Here(tmp_path / "other")):
        with pytest.raises(
            Failed, match=f"{victim.name} arrived wrong because this machine's cache is damaged"
        ) as caught:
            ship(link, release)
        assert str(victim) in caught.value.hint
    assert not list(tmp_path.glob("*/releases/*/installed.json"))


def test_a_blob_that_shrank_ends_the_stream(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"short")
    with pytest.raises(Failed, match="shorter"):
        b"".join(stream([Piece("b", 0, 6)], lambda name: tmp_path / name, lambda size: None))


def test_what_remains_is_sent_from_its_byte_on() -> None:
    wanted = {"a": 10, "b": 5, "c": 7, "d": 0, "e": 3}
    assert remaining(wanted, [], {}) == [("d", 0, 0), ("e", 0, 3), ("b", 0, 5), ("c", 0, 7), ("a", 0, 10)]
    # Whole ones are left out; a full part is still to be named; one that is too long starts over.
    assert remaining(wanted, ["a", "x"], {"b": 4, "c": 7, "e": 9, "y": 1}) == [
        *[("b", 4, 5), ("c", 7, 7)],
        *[("d", 0, 0), ("e", 0, 3)],
    ]


@pytest.mark.parametrize("more", [0, 1, 9])
def test_much_goes_over_several_connections(
    release: Release, afar: Callable[..., Afar], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the host takes; a cut of one of them is like any other cut."""
    monkeypatch.setattr(sys.modules["ddtree_ops.remote.ship"], "SEVERAL_FROM", 5 << 20)
    link = afar()
    link.more, link.other_cuts = more, [(1_500_000,)]
    whole = with_noise(release, *[1 << 20] * 8)
    report = ship(link, whole, waits=WAITS)
    assert min(more, CONNECTIONS - 1) <= len(link.others) <= more
    assert report.cuts == min(more, 1)
    arrived = link.sent + sum(other.sent for other in link.others)
    assert arrived <= report.bytes_sent < arrived + SLICE * max(1, report.cuts)
    assert all(other.sent > 1 << 20 for other in link.others[: CONNECTIONS - 1])
    assert (link._root / "releases" / whole.id / "installed.json").is_file()


def test_lots_are_of_one_weight_and_keep_their_order() -> None:
    pieces = [Piece("begun", 90, 100), *(Piece(f"{n}", 0, n) for n in (1, 2, 3, 50, 60, 100))]
    lots = lots_of(pieces, 2)
    assert sorted(piece for lot in lots for piece in lot) == sorted(pieces)
    assert [sum(piece.size - piece.offset for piece in lot) for lot in lots] == [113, 113]
    assert all(lot == sorted(lot, key=pieces.index) for lot in lots)
    assert lots_of(pieces, 1) == [pieces]


@pytest.fixture
def always_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every link counts as fast, and little is much."""
    for name, value in (("FAST", 0), ("FIRST", 100_000), ("BULK_FROM", 200_000)):
        monkeypatch.setattr(f"ddtree_ops.remote.ship.{name}", value)


@pytest.mark.usefixtures("always_fast")
def test_a_fast_link_has_its_bulk_carried(release: Release, afar: Callable[..., Afar], tmp_path: Path) -> None:
    """What comes first tells how fast the link is; each blob goes once, whichever way."""
    big, link = with_noise(release, *[60_000] * 20), afar()
    link.fast = Afar(tmp_path / "root")
    report = ship(link, big)
    assert report.cuts == 0 and link.verbs.count("receive") == 1 and link.fast.verbs == ["receive"] * 2
    assert report.bytes_sent == link.sent + link.fast.sent < 1_500_000 + 3 * len(link.agent.source)
    assert ship(link, big).bytes_sent == 0


@pytest.mark.usefixtures("always_fast")
def test_a_carrier_that_fails_costs_what_it_carried_and_no_more(
    release: Release, afar: Callable[..., Afar], tmp_path: Path
) -> None:
    big, link = with_noise(release, *[60_000] * 20), afar()
    link.fast = Afar(tmp_path / "root", cuts=(300_000,))
    warnings: list[str] = []
    report = ship(link, big, warn=warnings.append, waits=WAITS)
    assert report.cuts == 1 and len(warnings) == 1
    assert link.fast.verbs == ["receive"] * 2 and link.verbs.count("receive") == 2, "it is not tried again"
    assert ship(link, big).bytes_sent == 0


@pytest.mark.usefixtures("always_fast")
def test_without_a_carrier_it_goes_as_ever(release: Release, afar: Callable[..., Afar]) -> None:
    big, link = with_noise(release, *[60_000] * 20), afar()
    assert ship(link, big).cuts == 0 and link.fast is None
    assert ship(link, big).bytes_sent == 0
