"""Healthy or not, and the only code that restores."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .base import (
    CRASH_LOOP,
    JSON,
    LOG_CAP,
    POLL_S,
    SETTLE_S,
    HostError,
    as_error,
    make_dir,
    read_bytes,
    safe,
    write_file,
    write_json,
)
from .facts import gpus
from .form import Form
from .guard import lift_guard, try_lift_guard
from .service import Service
from .supervisors import Systemd
from .system import boot_id, http_get, mismatches, port_owner, server_info

if TYPE_CHECKING:
    from typing import Any, NoReturn


class Vigil:
    """Watches one start of a service: its state, its restarts, its log."""

    def __init__(self, service: Service, health: JSON | None, mark: Any, known: tuple[str, ...]) -> None:
        self.service, self.mark, self.known = service, mark, known
        self.fatal = [re.compile(pattern) for pattern in (health or {}).get("fatal") or []]
        self.recent: list[str] = []
        self.first: JSON | None = None
        self.steady: JSON | None = None

    def read_log(self) -> list[str]:
        lines, self.mark = self.service.sup.log_since(self.mark)
        lines = [safe(line, self.known, 2000) for line in lines]
        self.recent = (self.recent + lines)[-40:]
        return lines

    def fail(self, reason: str) -> NoReturn:
        with contextlib.suppress(HostError, OSError):
            self.read_log()
        raise HostError("failed", reason, log=self.recent[-20:])

    def look(self) -> JSON:
        """One look; failed on a dead service, a crash loop or a fatal line, and once `steady` on any restart."""
        show = self.service.sup.show()
        self.first = self.first or show
        for line in self.read_log():
            for pattern in self.fatal:
                if pattern.search(line):
                    self.fail(f"fatal line in its log: {line[:500]}")
        if show["state"] in ("failed", "inactive", "unknown"):
            self.fail(f"the service ended ({show['state']}, {show['result'] or show['sub']})")
        if show["restarts"] - self.first["restarts"] >= CRASH_LOOP:
            self.fail(f"crash loop: {show['restarts'] - self.first['restarts']} restarts")
        if self.steady and (show["pid"], show["restarts"]) != (self.steady["pid"], self.steady["restarts"]):
            self.fail("the service died after it was healthy")
        return show


def wait_healthy(service: Service, n: int, health: JSON | None, vigil: Vigil, watch: Callable[[], None]) -> None:
    """Until generation ``n`` is healthy: /health answers 200 from a process of ours and the resolved arguments are
    those expected. Without health facts: active for `SETTLE_S`. ``watch`` is called often and may raise.
    """
    limit = float((health or {}).get("timeout_s") or 120)
    deadline, active_since, last = time.monotonic() + limit, None, "it never answered"
    while True:
        watch()
        show = vigil.look()
        if health is None:
            active_since = (active_since or time.monotonic()) if show["state"] == "active" else None
            if active_since is not None and time.monotonic() - active_since >= SETTLE_S:
                break
            last = f"it was {show['state']}"
        elif show["state"] in ("active", "reloading"):
            wrong, last = try_health(service, n, health)
            if wrong:
                vigil.fail("resolved arguments are not the profile's: " + "; ".join(wrong))
            if not last:
                break
        if time.monotonic() > deadline:
            vigil.fail(f"not healthy within {limit:g} s: {last}")
        time.sleep(POLL_S)
    vigil.steady = vigil.look()


def try_health(service: Service, n: int, health: JSON) -> tuple[list[str], str]:
    """(what differs for good, why not healthy yet); both empty when healthy."""
    port, expect = int(health["port"]), health.get("expect") or {}
    try:
        code, _ = http_get(port, "/health", service.api_key(n))
    except Exception as error:  # not listening yet, or it speaks something else
        return [], f"/health: {type(error).__name__}: {error}"
    if code != 200:
        return [], f"/health answered {code}"
    owner = port_owner(port, service.sup.members())
    if owner is None or not owner["ours"]:
        return [f"port {port} is answered by a process that is not ours: {owner}"], ""
    if not expect:
        return [], ""
    try:
        return mismatches(expect, server_info(port, service.api_key(n))), ""
    except HostError as error:
        return [], error.message


def recover(service: Service, reason: str, boot: bool = False) -> JSON:
    """Finish what an applier left, whatever it left. The caller holds the lock. Idempotent.

    Nothing pending: only the journal is completed, also of a transaction that ended before it was accepted. Nothing
    stopped yet: the transaction is closed, unchanged.
    Else the generation before it is restored and proven. At boot (ordered before the service) nothing is started
    from here: the start job that waits behind us, or one queued without waiting, runs the restored unit.
    Raises stuck, with the commands to run, when the restore fails; then it stays pending and may be run again.
    """
    state = service.state()
    pending = state["pending"]
    if pending is None:
        try_lift_guard(service)
        service.free_reserve()  # an applier may have been killed between its confirm and its tidying
        service.close_journal()
        service.close_unaccepted(reason)
        return {"result": "nothing", "generation": state["confirmed"]}
    txn, confirmed = pending["txn"], state["confirmed"]
    service.free_reserve()
    service.sweep()
    entries = service.journal.entries(txn)
    begun = {entry["step"] for entry in entries if entry.get("event") == "begin"}
    if entries and "stop" not in begun:
        return conclude(service, txn, "unchanged", confirmed, reason)
    if not boot and service.sup.going_down():
        service.try_log(txn, "recover", "note", reason=f"{reason}; the host is going down, its next boot recovers")
        return {"result": "left to boot", "generation": confirmed}
    service.try_log(txn, "recover", "begin", reason=reason, boot=boot)
    log = keep_evidence(service, pending, reason) if "start" in begun else []
    try:
        proven = restore(service, pending, boot)
    except Exception as error:
        told = as_error(error)
        if not boot and service.sup.going_down():
            service.try_log(txn, "recover", "note", reason=f"{told.message}; the host is going down")
            return {"result": "left to boot", "generation": confirmed}
        if boot:  # the start job that waits behind us would run what was never proven
            service.sup.ask_stop(0, block=False)
        commands = by_hand(service, pending)
        why = f"{reason}; then the restore failed: {told.message}"
        service.try_log(txn, "recover", "fail", reason=told.message, log=told.more.get("log", []))
        service.try_log(txn, "end", "stuck", generation=confirmed, reason=why, commands=commands)
        raise HostError("stuck", why, hint="\n".join(commands), commands=commands) from error
    service.try_log(txn, "recover", "done", proven=proven)
    down = downtime(entries, pending) if proven and not boot else None
    return conclude(service, txn, "recovered", pending["from"], reason, proven=proven, downtime_s=down, log=log)


def conclude(service: Service, txn: str, event: str, confirmed: int | None, reason: str, **more: Any) -> JSON:
    """Stand down and complete the journal; what cannot be journaled now is completed by whoever comes next."""
    last = service.stand_down(txn, event, confirmed, reason=reason, **more)
    service.tidy(confirmed)
    try_lift_guard(service)
    try:
        service.close_journal()
    except OSError as error:
        print(f"ddtree-host: journal: {error}", file=sys.stderr)
    return {"result": event, "generation": confirmed, "reason": reason, "end": last}


def restore(service: Service, pending: JSON, boot: bool) -> bool:
    """Put ``pending.from`` back and start it; True when it is proven healthy."""
    sup, before = service.sup, pending["from"]
    stop_s = float(pending.get("stop_timeout_s") or 60)
    if boot:
        form = Form() if before is None else sup.form_of(before)
        if sup.show()["state"] in ("active", "activating") and sup.members():
            sup.halt(stop_s)
        sup.place(form)
        if before is None:
            sup.ask_stop(0, block=False)  # the boot's own start job, made from the unit that is gone now
        elif form.links:
            sup.start(30, block=False)
        return False
    sup.halt(stop_s)  # first of all: what failed its proof serves no more, whatever comes
    lift_guard(service)  # it was for what is not proven
    sup.place(Form() if before is None else sup.form_of(before))
    if before is None:
        return True
    if pending.get("was") == "inactive":
        return False
    meta = service.meta(before)
    health, mark = meta.get("health"), sup.log_mark()
    sup.start(float((health or {}).get("timeout_s") or 120))
    if pending.get("was") == "failing":
        return False
    group = meta.get("nodes")
    if group is not None and group.get("rank") != 0:
        return False  # it is healthy once the others are, and only rank 0 answers
    try:
        wait_healthy(service, before, health, Vigil(service, health, mark, service.secret_values(before)), lambda: None)
    except HostError:
        if group is None:
            raise
        return False  # another node may be away, or stand on another deploy
    return True


def downtime(entries: list[JSON], pending: JSON) -> float | None:
    """Seconds from the stop's begin to now; None when nothing ran or the clock is another boot's."""
    began = [entry["mono"] for entry in entries if (entry["step"], entry["event"]) == ("stop", "begin")]
    if not began or pending.get("boot") != boot_id() or pending.get("was") != "active":
        return None
    return round(time.monotonic() - float(began[0]), 3)


def keep_evidence(service: Service, pending: JSON, reason: str) -> list[str]:
    """The last log lines, the verdict and the GPUs' state into the failed generation; never stops a recovery."""
    txn, base = pending["txn"], service.generation(pending["to"])
    lines: list[str] = []
    try:
        known = service.secret_values(pending["to"])
        lines = [safe(line, known, 2000) for line in service.sup.log_tail(200)]
        cards = gpus()
        if base.is_dir():
            place = make_dir(base / "evidence" / txn)
            write_file(place / "log.txt", "\n".join(lines).encode()[-LOG_CAP:] + b"\n", 0o640)
            verdict = read_bytes(service.txn_dir(txn) / "verdict.json", 8 << 20)
            if verdict is not None:
                write_file(place / "verdict.json", verdict)
            write_json(place / "why.json", {"reason": reason, "gpus": cards})
    except (OSError, HostError) as error:
        service.try_log(txn, "evidence", "fail", reason=as_error(error).message)
    else:
        where = str(base / "evidence" / txn)
        service.try_log(txn, "evidence", "done", log=lines[-20:], gpus=cards, where=where)
    return lines[-20:]


def by_hand(service: Service, pending: JSON) -> list[str]:
    """The commands for whoever has to mend it."""
    before, unit = pending["from"], service.unit_path
    commands = [" ".join([str(service.agent), "recover", "--root", str(service.root), "--service", service.name])]
    if isinstance(service.sup, Systemd):
        commands += [f"systemctl status {service.sup.unit}", f"journalctl -u {service.sup.unit} -n 100"]
        if before is not None:
            source = service.generation(before) / "unit"
            commands += [f"cp {source} {unit} && systemctl daemon-reload && systemctl restart {service.sup.unit}"]
    else:
        commands += [f"tail -n 100 {service.run / 'log'}"]
    return commands
