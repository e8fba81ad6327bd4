"""One deploy from accept to its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .base import (
    FILE,
    GO,
    JSON,
    POLL_S,
    RELEASE,
    TXN,
    HostError,
    as_error,
    digest,
    integer,
    make_dir,
    member,
    named,
    number,
    read_bytes,
    read_json,
    remove,
    safe,
    write_file,
    write_json,
    write_link,
)
from .facts import dropin_hashes
from .form import Form, put_entry
from .guard import cannot_guard, place_guard, try_lift_guard
from .recovery import Vigil, downtime, recover, wait_healthy
from .releases import installed
from .service import Service
from .system import boot_id, port_owner


def check_plan(service: Service, plan: JSON) -> None:
    """Refuse a plan that is malformed, or that does not fit this host as it is now. Reads only."""
    named(TXN, plan.get("txn"), "txn")
    expect, health = member(plan, "expect", dict), member(plan, "health", (dict, type(None)), None)
    target = integer(plan.get("target"), "target")
    for key in ("stop_timeout_s", "gate_timeout_s", "lease_s"):
        number(plan.get(key), key, 0.1, 10**6)
    if health is not None:
        integer(health.get("port"), "health.port", 1, 65535)
        number(health.get("timeout_s"), "health.timeout_s", 0.1, 10**6)
        member(health, "expect", dict)
        for pattern in member(health, "fatal", list):
            re.compile(pattern)
    if plan.get("format") != 1:
        raise HostError("usage", f"plan format {plan.get('format')!r} is not known here")
    if plan.get("service") != service.name or plan.get("root") != str(service.root):
        raise HostError("usage", "the plan is of another service or root")
    if not service.agent.is_file():
        raise HostError("refused", "bin/ddtree-host is not installed; bootstrap first")
    state = service.state()
    if state["pending"] is not None:
        raise HostError("refused", f"deploy {state['pending']['txn']} is unfinished; recover it first")
    check_moved(service, expect, state)
    check_generation(service, plan, target)
    check_release(service, plan, target)
    member(plan, "guard", bool, False)
    member(plan, "together", bool, False)
    check_surroundings(service, plan, health)


def check_moved(service: Service, expect: JSON, state: JSON) -> None:
    now, moved = service.sup.now(), []
    wanted = member(expect, "state", dict)
    if (wanted.get("confirmed"), wanted.get("pending")) != (state["confirmed"], state["pending"]):
        moved.append(f"state: confirmed {state['confirmed']}, expected {wanted.get('confirmed')}")
    found = digest(now.data) if now.kind == "file" else None
    if expect.get("unit_sha256") != found:
        moved.append(f"unit: sha256 {found}, expected {expect.get('unit_sha256')}")
    dropins = dropin_hashes(service)
    if member(expect, "dropins", dict) != dropins:
        moved.append(f"drop-ins: {sorted(dropins)}, expected {sorted(expect['dropins'])}")
    if expect.get("next_generation") != service.next_generation():
        moved.append(f"next generation: {service.next_generation()}, expected {expect.get('next_generation')}")
    if moved:
        raise HostError("moved", "the host moved since the plan was made: " + "; ".join(moved), moved=moved)


def check_generation(service: Service, plan: JSON, target: int) -> None:
    generation = member(plan, "generation", (dict, type(None)), None)
    if generation is None:
        service.meta(target)
        service.sup.form_of(target)
        if damage := service.damaged(target):
            raise HostError("refused", "; ".join(damage))
        return
    for name, text in member(generation, "files", dict).items():
        named(FILE, name, "generation file")
        if not isinstance(text, str) or len(text) > 8 << 20 or name == "generation.json":
            raise HostError("usage", f"generation file {name}: not a text, too long or a reserved name")
    member(generation, "meta", dict)
    first = service.next_generation()
    if plan.get("adopt") and service.adopt_generation() == first:
        first += 1
    if target != generation.get("n") or target != first:
        raise HostError("usage", f"generation {generation.get('n')} is not the next one, {first}")


def check_release(service: Service, plan: JSON, target: int) -> None:
    release = plan.get("release")
    if release is None and plan.get("generation") is None:
        release = service.meta(target).get("release")
    if release is not None and not installed(service.root, named(RELEASE, release, "release")):
        raise HostError("refused", f"release {release} is not installed")


def check_surroundings(service: Service, plan: JSON, health: JSON | None) -> None:
    """Drift without leave, things we cannot remove, a foreign process on the port."""
    drift = service.drift()
    if drift and not (plan.get("adopt") or plan.get("overwrite")):
        raise HostError("refused", "the host is not as it was left: " + "; ".join(drift), drift=drift)
    show = service.sup.show()
    if plan.get("adopt") and service.sup.now().masked:
        raise HostError("refused", "the unit is masked: there is nothing to adopt")
    if show["load"] == "masked" and not service.sup.now().masked:
        raise HostError("refused", f"the unit is masked elsewhere: systemctl unmask --runtime {service.name}")
    for path in show["dropin_paths"]:
        inner = Path(path).parent
        if inner.name == f"{service.name}.service.d" and inner != service.dropin_dir:
            raise HostError("refused", f"drop-in {path} is not in {service.unit_dir} and would stay; remove it first")
    if health is not None:
        owner = port_owner(int(health["port"]), service.sup.members())
        if owner is not None and not owner["ours"]:
            raise HostError("refused", f"port {health['port']} is taken by {owner['command']} (pid {owner['pid']})")


def why_not(verdict: JSON) -> str:
    """A verdict that is no pass, in one sentence: its first reason against it and its first finding."""
    parts = []
    reasons, findings = verdict.get("reasons"), verdict.get("findings")
    for reason in reasons if isinstance(reasons, list) else []:
        if not isinstance(reason, dict):
            parts.append(str(reason))
        elif reason.get("effect") != "note":
            parts.append(str(reason.get("message")))
    del parts[1:]
    for found in (findings if isinstance(findings, list) else [])[:1]:
        if isinstance(found, dict):
            words = {key: "end of text" if found.get(key) is None else found[key] for key in ("got", "expected")}
            where = f"{found.get('prompt')} at C={found.get('concurrency')}, position {found.get('position')}"
            gap = f"{found['gap']:.4g}" if isinstance(found.get("gap"), float) else "unknown"
            parts.append(f"{where}: got {words['got']}, expected {words['expected']}, gap {gap}")
    return safe(f"the verdict is {verdict.get('kind')}: " + ("; ".join(parts) or "no reason given"), cap=1000)


class Applier:
    """One transaction, from accept to its end. Holds the flock for its whole life; needs no client but the verdict."""

    def __init__(self, service: Service, plan: JSON) -> None:
        self.service, self.plan, self.sup = service, plan, service.sup
        self.txn: str = plan["txn"]
        self.dir = service.txn_dir(self.txn)
        self.terminated = False
        self.lease: int | None = None
        self.lease_at = time.monotonic()
        self.health: JSON | None = plan.get("health")
        load = float((self.health or {}).get("timeout_s") or 120)
        self.limit = float(plan["stop_timeout_s"]) + load + float(plan["gate_timeout_s"])
        self.deadline = time.monotonic() + self.limit
        self.vigil: Vigil | None = None
        self.downtime: float | None = None

    def run(self) -> int:
        """Walk the steps; on anything but confirm, recover. 0 confirmed, 1 not; the journal tells which end."""
        for ignored in (signal.SIGHUP, signal.SIGINT):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "terminated", True))
        try:
            what = f"{self.plan.get('action')} to generation {self.plan.get('target')}"
            with self.service.lock(self.txn, str(self.plan.get("who")), str(self.plan.get("client")), what):
                self.service.sweep()
                if self.service.state()["pending"] is None:
                    try_lift_guard(self.service)
                return self._walk()
        except HostError as error:
            self._refuse(error)
            return 1

    def _walk(self) -> int:
        step = "accept"
        try:
            for step, act in STEPS:
                if step in ("adopt", "generation", "hold") and not self._wants(step):
                    continue
                if step != "confirm":  # the verdict came in time
                    self.watch()
                self.service.log(self.txn, step, "begin", **(self._title() if step == "accept" else {}))
                self.service.log(self.txn, step, "done", **act(self))
            self.service.close_journal()
            return 0
        except Exception as error:  # also a bug in here must end in a recovery
            told = as_error(error)
            self.service.try_log(
                self.txn, step, "fail", kind=told.kind, reason=told.message, log=told.more.get("log", [])
            )
            state = self.service.state()
            mine = (state["pending"] or {}).get("txn") == self.txn or (state["last"] or {}).get("txn") == self.txn
            if mine:
                recover(self.service, f"{step}: {told.message}")
            else:
                self.service.tidy(state["confirmed"])
                try_lift_guard(self.service)
                self._refuse(told)
                self.service.try_log(self.txn, "end", "unchanged", generation=state["confirmed"], reason=told.message)
            return 1

    def _wants(self, step: str) -> bool:
        return bool(self.plan.get({"hold": "together"}.get(step, step)))

    def _title(self) -> JSON:
        keys = ("who", "client", "workspace_commit", "action", "target", "release")
        return {**{key: self.plan.get(key) for key in keys}, "from": self.service.state()["confirmed"]}

    def _refuse(self, error: HostError) -> None:
        write_json(self.dir / "refused.json", {"kind": error.kind, "message": error.message, **error.more})

    def watch(self) -> None:
        """Raise when we were told to stop, when the verdict is no pass, when the lease ran out, or at the deadline.

        A verdict that is no pass counts before the gate too: an operator's Ctrl-C does not wait for a long load.

        The lease is a file whose time changes (a full disk allows that); its age is measured here by the monotonic
        clock, so that no jump of the wall clock ends it early.
        """
        if self.terminated:
            why = read_json(self.dir / "unlock.json") or {}
            by = safe(f" by {why['who']} from {why.get('client')}", cap=200) if why.get("who") else ""
            raise HostError("failed", f"told to stop{by}: {why.get('reason', 'SIGTERM')}")
        verdict = read_json(self.dir / "verdict.json")
        if verdict is not None and verdict.get("passed") is not True:
            raise HostError("failed", why_not(verdict))
        now, lease = time.monotonic(), (self.dir / "lease").stat().st_mtime_ns
        if lease != self.lease:
            self.lease, self.lease_at = lease, now
        if now - self.lease_at > float(self.plan["lease_s"]):
            raise HostError("failed", f"the client was away for longer than its lease of {self.plan['lease_s']} s")
        if now > self.deadline:
            raise HostError("failed", f"no verdict within {self.limit:g} s (stop + load + gate)")

    # the steps, in the order of STEPS; each returns details for the journal

    def accept(self) -> JSON:
        """From here on the host knows of this transaction, and every way out of it ends in `stand_down`."""
        service, show = self.service, self.sup.show()
        check_plan(service, self.plan)
        write_json(service.dir / "service.json", {"supervisor": self.sup.name, "unit_dir": str(service.unit_dir)})
        service.hold_reserve()
        if self.sup.name == "systemd":
            make_dir(service.boot_link.parent)
            put_entry(service.boot_link, Form("link", os.fsencode(service.unit_dir / "ddtree-recover@.service")))
        failing = show["state"] == "failed" or show["sub"] == "auto-restart"
        was = (
            "failing" if failing else "active" if show["state"] in ("active", "activating", "reloading") else "inactive"
        )
        state = service.state()
        pending = {
            "txn": self.txn,
            "from": state["confirmed"],
            "to": self.plan["target"],
            "deadline": round(time.time() + self.limit, 3),
            "was": was,
            "boot": boot_id(),
            "stop_timeout_s": self.plan["stop_timeout_s"],
        }
        service.set_state(state["confirmed"], pending, state["last"])
        return {"was": was}

    def adopt(self) -> JSON:
        """Keep what is installed, byte for byte, as a generation of its own: what we come back to."""
        service, form, show = self.service, self.sup.now(), self.sup.show()
        n = service.adopt_generation()
        data = form.data if form.kind != "none" else read_bytes(Path(show["fragment"] or "/nonexistent")) or b""
        kept = {
            "kind": form.kind,
            "mode": form.mode,
            "uid": form.owner[0] if form.owner else 0,
            "gid": form.owner[1] if form.owner else 0,
            "dropins": sorted(form.dropins),
            "links": dict(form.links),
            "enabled": show["enabled"],
            "fragment": show["fragment"],
        }
        files = {"unit": data, **{f"dropins/{name}": text for name, text in form.dropins.items()}}
        meta = {"n": n, "txn": self.txn, "created": time.time(), "adopted": kept, "health": None, "release": None}
        service.write_generation(n, files, meta)
        state = service.state()
        service.set_state(n, {**state["pending"], "from": n}, state["last"])
        return {"generation": n, "fragment": show["fragment"]}

    def generation(self) -> JSON:
        given, n = self.plan["generation"], self.plan["target"]
        extra = {"n": n, "txn": self.txn, "release": self.plan.get("release"), "health": self.health}
        meta = {"created": time.time(), **given["meta"], **extra}
        files = {name: text.encode() for name, text in given["files"].items()}
        self.service.write_generation(n, files, meta)
        return {"generation": n}

    def verify_unit(self) -> JSON:
        found = self.sup.verify(self.plan["target"])
        if self.plan.get("guard") and (why := cannot_guard(self.service)):
            raise HostError("failed", f"the plan promises that nobody else reaches the port until confirm, but {why}")
        return found

    def hold(self) -> JSON:
        """Wait for the other nodes of the service: none stops anything before all of them could."""
        while not (self.dir / GO).exists():
            self.watch()
            time.sleep(POLL_S)
        return {}

    def stop(self) -> JSON:
        service = self.service
        old = self.sup.now()
        if self.plan.get("overwrite") and service.drift():
            keep = make_dir(self.dir / "overwritten", 0o700)
            for name, data in {service.unit_path.name: old.data, **old.dropins}.items():
                write_file(keep / name, data, 0o600)
        self.sup.halt(float(self.plan["stop_timeout_s"]))
        deadline = time.monotonic() + 10
        while self.health and (owner := port_owner(int(self.health["port"]), [])) is not None:
            if time.monotonic() > deadline:
                raise HostError(
                    "failed", f"port {self.health['port']} is still taken by {owner['command']} {owner['pid']}"
                )
            time.sleep(0.1)
        return {}

    def switch(self) -> JSON:
        if self.plan.get("guard"):
            place_guard(self.service)
        self.sup.place(self.sup.form_of(self.plan["target"]))
        return {}

    def start(self) -> JSON:
        n = self.plan["target"]
        if self.service.meta(n).get("adopted"):
            self.health = None
        self.vigil = Vigil(self.service, self.health, self.sup.log_mark(), self.service.secret_values(n))
        self.sup.start(float((self.health or {}).get("timeout_s") or 120))
        return {}

    def wait_health(self) -> JSON:
        assert self.vigil is not None
        wait_healthy(self.service, self.plan["target"], self.health, self.vigil, self.watch)
        self.downtime = downtime(self.service.journal.entries(self.txn), self.service.state()["pending"])
        return {"downtime_s": self.downtime}

    def gate(self) -> JSON:
        """Wait for the verdict while the service is watched. One that is here counts before the lease."""
        assert self.vigil is not None
        while True:
            verdict = read_json(self.dir / "verdict.json")
            if verdict is not None and verdict.get("passed") is True:
                return {"kind": verdict.get("kind")}
            self.watch()
            self.vigil.look()
            time.sleep(POLL_S)

    def confirm(self) -> JSON:
        n = self.plan["target"]
        remove(self.service.generation(n) / "verified.json")  # of an earlier time that this generation served
        write_json(self.service.generation(n) / "verdict.json", read_json(self.dir / "verdict.json"))
        self.service.stand_down(self.txn, "confirmed", n, reason="", downtime_s=self.downtime)
        self.service.tidy(n)
        try_lift_guard(self.service)
        with contextlib.suppress(OSError):  # display only
            write_link(self.service.dir / "current", f"generations/{n}")
        return {}


STEPS: tuple[tuple[str, Callable[[Applier], JSON]], ...] = (
    ("accept", Applier.accept),  # the plan fits; state.json says pending
    ("adopt", Applier.adopt),  # a foreign unit becomes a generation
    ("generation", Applier.generation),  # the new files are written, whole
    ("verify-unit", Applier.verify_unit),
    ("hold", Applier.hold),  # last step before anything stops
    ("stop", Applier.stop),  # from here on a failure restores
    ("switch", Applier.switch),
    ("start", Applier.start),
    ("health", Applier.wait_health),
    ("gate", Applier.gate),
    ("confirm", Applier.confirm),  # one fsynced rename
)
