"""The verbs that change something, and follow."""

from __future__ import annotations

import base64
import contextlib
import json
import marshal
import os
import pwd
import select
import signal
import sys
import time
from pathlib import Path
from types import CodeType

from .applier import check_plan
from .base import (
    GO,
    JSON,
    TXN,
    USER,
    HostError,
    digest,
    fsync_dir,
    integer,
    make_dir,
    member,
    named,
    number,
    read_bytes,
    read_json,
    run,
    safe,
    write_file,
    write_json,
)
from .recovery import recover
from .service import Service
from .system import start_ticks

RECOVER_UNIT = """\
[Unit]
Description=Finish or undo an interrupted deploy of %i before it starts (ddtree)
RequiresMountsFor={root}
Before=%i.service
ConditionPathExists={root}/services/%i/state.json

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={python} -I {root}/bin/ddtree-host recover --boot --root {root} --service %i
TimeoutStartSec=300

[Install]
WantedBy=multi-user.target
"""


def bootstrap(service: Service, request: JSON) -> JSON:
    """Write bin/ddtree-host, the directories, and as root under systemd the user and the boot one-shot."""
    source = base64.b64decode(member(request, "source_b64", str), validate=True)
    code = compile(source, "ddtree-host", "exec")
    changed = []
    root = service.root
    for path, mode in (
        (root / "bin", 0o755),
        (root / "releases", 0o755),
        (root / "services", 0o755),
        (root / "store", 0o700),
    ):
        make_dir(path, mode)
    if service.sup.name == "systemd" and os.geteuid() == 0:
        try:
            pwd.getpwnam(USER)
        except KeyError:
            shell = next((path for path in ("/usr/sbin/nologin", "/sbin/nologin") if Path(path).exists()), "/bin/false")
            done = run(["useradd", "--system", "--user-group", "--no-create-home", "--shell", shell, USER])
            if done.returncode != 0:
                raise HostError("failed", f"useradd: {safe(done.stderr.strip())}") from None
            changed.append("user")
        text = RECOVER_UNIT.format(root=root, python=sys.executable).encode()
        unit = service.unit_dir / "ddtree-recover@.service"
        if read_bytes(unit) != text:
            write_file(unit, text)
            run(["systemctl", "daemon-reload"], 90)
            changed.append(unit.name)
    if read_bytes(service.agent, 8 << 20) != source:
        write_file(service.agent, source, 0o755)
        changed.append("bin/ddtree-host")
    if keep_compiled(root, source, code):
        changed.append("bin/ddtree-host, compiled")
    return {"changed": changed, "agent_sha256": digest(source)}


def keep_compiled(root: Path, source: bytes, code: CodeType) -> bool:
    """Keep the code of ``source`` for this very Python beside it, for questions that come without the source
    (`remote.agent.BRIEF` reads it): compiling takes longer than answering. Whether it had to be written.
    """
    path = root / "bin" / f"ddtree-host.{sys.implementation.cache_tag}"
    head = f"{digest(source)} {sys.hexversion:x} ".encode()
    if (read_bytes(path, 16 << 20) or b"").startswith(head):
        return False
    data = marshal.dumps(code)
    write_file(path, head + f"{digest(data)}\n".encode() + data)
    return True


def apply(service: Service, request: JSON) -> JSON:
    """Check the sealed plan, start the applier detached, answer once it holds the lock and accepted the plan."""
    plan = member(request, "plan", dict)
    txn = named(TXN, plan.get("txn"), "txn")
    holder = service.holder()
    if holder and holder["alive"]:
        raise service.locked_by(holder)
    if service.dir.is_dir():
        service.close_journal()
    check_plan(service, plan)
    if plan.get("supervisor") != service.sup.name or plan.get("unit_dir") not in (None, str(service.unit_dir)):
        raise HostError("usage", "the plan is of another supervisor or unit_dir")
    directory = service.txn_dir(txn)
    if directory.exists():
        raise HostError("refused", f"transaction {txn} exists already")
    make_dir(directory, 0o700)
    write_json(directory / "plan.json", plan, 0o600)
    write_file(directory / "lease", b"", 0o600)
    argv = [
        *service.agent_argv("run"),
        "--txn",
        txn,
        "--supervisor",
        service.sup.name,
        "--unit-dir",
        str(service.unit_dir),
    ]
    load = float((plan.get("health") or {}).get("timeout_s") or 120)
    service.sup.spawn(argv, txn, stop_s=float(plan["stop_timeout_s"]) + load + 120)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        refused = read_json(directory / "refused.json")
        if refused is not None:
            raise HostError(refused["kind"], refused["message"])
        if any(e.get("step") == "accept" and e.get("event") == "done" for e in service.journal.entries(txn)):
            return {"txn": txn}
        time.sleep(0.05)
    # It may still be on its way: a verdict that is no pass stops it before it stops anything.
    why = "the applier did not start within 20 s"
    leave_verdict(directory, {"kind": "INCONCLUSIVE", "passed": False, "reasons": [why]})
    raise HostError("failed", f"{why}; should it start yet, it ends without a change (see history)")


def leave_verdict(directory: Path, given: JSON) -> bool:
    """Put verdict.json there, whole; False when one is there already."""
    temp = directory / f".verdict.{os.urandom(4).hex()}"
    write_json(temp, given)
    try:
        os.link(temp, directory / "verdict.json")
    except FileExistsError:
        return False
    finally:
        temp.unlink()
    fsync_dir(directory)
    return True


def verdict(service: Service, request: JSON) -> JSON:
    """Leave the client's verdict for the applier; the first one counts. Whether it came in time, the journal says."""
    txn, given = named(TXN, request.get("txn"), "txn"), member(request, "verdict", dict)
    if not isinstance(given.get("passed"), bool):
        raise HostError("usage", "verdict.passed is neither true nor false")
    if (service.state()["pending"] or {}).get("txn") != txn:
        raise HostError("refused", f"transaction {txn} is not in progress")
    if not leave_verdict(service.txn_dir(txn), given):
        raise HostError("refused", f"transaction {txn} has its verdict already")
    return {"txn": txn}


def go(service: Service, request: JSON) -> JSON:
    """Every node of the service is where this one is: an applier that holds goes on."""
    txn = named(TXN, request.get("txn"), "txn")
    if (service.state()["pending"] or {}).get("txn") != txn:
        raise HostError("refused", f"transaction {txn} is not in progress")
    write_file(service.txn_dir(txn) / GO, b"", 0o600)
    return {"txn": txn}


def record(service: Service, request: JSON) -> JSON:
    """Keep a verdict from outside a deploy beside the confirmed generation's; what is confirmed stays so.

    With ``note`` it is only journaled: a look too short to stand for, or against, the whole gate's verdict.
    """
    n, given = integer(request.get("n"), "n"), member(request, "verdict", dict)
    if not isinstance(given.get("passed"), bool):
        raise HostError("usage", "verdict.passed is neither true nor false")
    who, client = safe(str(request.get("who", "")), cap=100), safe(str(request.get("client", "")), cap=100)
    note = safe(member(request, "note", str, ""), cap=500)
    txn = f"record-{int(time.time())}-{os.urandom(2).hex()}"
    with service.lock(txn, who, client, "a verdict"):
        state = service.state()
        if state["pending"] is not None:
            raise HostError("refused", "a deploy is unfinished: it has its own verdict")
        if state["confirmed"] != n:
            raise HostError("refused", f"the verdict is of generation {n}, confirmed is {state['confirmed']}")
        if not note:
            write_json(service.generation(n) / "verified.json", {**given, "t": round(time.time(), 3)})
        told = f"{note or 'verify-exactness'}: {safe(str(given.get('kind')), cap=40)}"
        service.log(txn, "record", "note", who=who, client=client, generation=n, reason=told)
    return {"txn": txn, "generation": n}


def recover_verb(service: Service, request: JSON) -> JSON:
    """`recover`, for the client and the command line. Survives the client: SIGHUP and SIGTERM are ignored."""
    reason, boot = safe(member(request, "reason", str, "asked for"), cap=500), member(request, "boot", bool, False)
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    if not service.dir.is_dir():
        return {"result": "nothing", "generation": None}
    who, client = safe(str(request.get("who", "")), cap=100), safe(str(request.get("client", "")), cap=100)
    with service.lock(f"recover-{os.getpid()}", who, client, "recover"):
        return recover(service, reason, boot)


def power(service: Service, request: JSON) -> JSON:
    """stop, start, restart by an operator: under the lock, journaled."""
    verb, state = request["verb"], service.state()
    if state["confirmed"] is None:
        raise HostError("refused", f"{service.name} was never deployed here")
    who, client = safe(str(request.get("who", "")), cap=100), safe(str(request.get("client", "")), cap=100)
    timeout = number(request.get("timeout_s", 60), "timeout_s", 1, 3600)
    txn = f"{verb}-{int(time.time())}-{os.urandom(2).hex()}"
    with service.lock(txn, who, client, verb):
        if service.state()["pending"] is not None:
            raise HostError("refused", "a deploy is unfinished; recover it first")
        if verb in ("stop", "restart"):
            service.sup.halt(timeout)
        if verb in ("start", "restart"):
            service.sup.start(timeout)
        service.log(txn, verb, "note", who=who, client=client, reason=safe(str(request.get("reason", "")), cap=500))
    show = service.sup.show()
    return {"active": {key: show[key] for key in ("state", "sub", "pid", "since_unix", "restarts", "result")}}


def unlock(service: Service, request: JSON) -> JSON:
    """Tell a live applier to stop: it recovers and ends. ``released``: whether it did so within ``wait_s``."""
    reason, holder = safe(member(request, "reason", str), cap=500), service.holder()
    if holder is None or not holder["alive"]:
        return {"released": True, "was": None, "unfinished": (service.state()["pending"] or {}).get("txn")}
    pid, txn = holder.get("pid"), holder.get("txn")
    if not isinstance(pid, int) or start_ticks(pid) != holder.get("start"):
        raise HostError(
            "failed",
            "the lock is held by a process that did not say who it is; see: fuser -v " + str(service.dir / "lock"),
        )
    if TXN.fullmatch(str(txn)) and service.txn_dir(str(txn)).is_dir():
        with contextlib.suppress(OSError):  # on a full disk the applier ends without the reason
            by = {key: safe(str(request.get(key, "")), cap=100) for key in ("who", "client")}
            write_json(service.txn_dir(str(txn)) / "unlock.json", {"reason": f"unlocked: {reason}", **by})
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + number(request.get("wait_s", 30), "wait_s", 0, 3600)
    while (now := service.holder()) and now["alive"] and now.get("pid") == pid and time.monotonic() < deadline:
        time.sleep(0.2)
    still = bool(now and now["alive"] and now.get("pid") == pid)
    return {"released": not still, "was": holder, "unfinished": (service.state()["pending"] or {}).get("txn")}


def follow(service: Service, txn: str, offset: int) -> int:
    """Print the transaction's journal lines from the ``offset``-th on, as they come, up to a terminal one.

    A byte on stdin renews the lease. When the applier is gone without an end, a last line says so ("gone") and the
    status is 3: `recover` is what comes next.
    """
    lease, seen, lonely = service.txn_dir(txn) / "lease", offset, 0.0
    listen = True
    while True:
        entries = service.journal.entries(txn)
        for entry in entries[seen:]:
            print(json.dumps(entry), flush=True)
        seen = max(seen, len(entries))
        if entries and entries[-1].get("step") == "end":
            return 0
        holder = service.holder()
        lonely = 0.0 if holder and holder["alive"] else lonely or time.monotonic()
        if lonely and time.monotonic() - lonely > 5:
            print(json.dumps({"t": time.time(), "txn": txn, "step": "follow", "event": "gone"}), flush=True)
            return 3
        if not listen:
            time.sleep(0.2)
        elif select.select([0], [], [], 0.2)[0]:
            listen = bool(os.read(0, 4096))
            if listen:
                lease.touch()
