"""Requests, the command line, replies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from .applier import Applier
from .base import JSON, NAME, HostError, absolute, answer, named
from .engine import supervise
from .facts import collect, generation, history, logs, probe, status
from .guard import guard
from .keeping import prune, releases
from .releases import install, missing
from .service import Service
from .staging import staged
from .verbs import apply, bootstrap, follow, go, power, record, recover_verb, unlock, verdict

VERBS: dict[str, Callable[[Service, JSON], JSON]] = {
    "probe": probe, "status": status, "history": history, "generation": generation, "logs": logs, "collect": collect,
    "bootstrap": bootstrap, "missing": missing, "staged": staged, "install": install,
    "releases": releases, "prune": prune,
    "apply": apply, "go": go, "verdict": verdict, "record": record, "recover": recover_verb, "unlock": unlock,
    "guard": guard,
    "stop": power, "start": power, "restart": power,
}  # fmt: skip


def main_request(text: str) -> int:
    """One request by stdin; see the module's head."""

    def act() -> JSON:
        request = json.loads(text)
        if not isinstance(request, dict) or request.get("verb") not in VERBS:
            raise HostError("usage", "not a request with a verb known here")
        root, unit_dir = absolute(request.get("root"), "root"), absolute(request.get("unit_dir"), "unit_dir")
        service = Service(root, request.get("service", ""), str(request.get("supervisor")), unit_dir)
        return VERBS[request["verb"]](service, request)

    return answer(act)


def main(argv: list[str]) -> int:
    """The installed command: run, follow, supervise, receive, recover, status, history, logs."""
    import argparse  # slow to import, and a request needs none

    parser = argparse.ArgumentParser(
        prog="ddtree-host", description="The host's half of ddtree-ops.", allow_abbrev=False
    )
    parser.add_argument("verb", choices=("run", "follow", "supervise", "recover", "status", "history", "logs"))
    parser.add_argument("--root", default="/opt/ddtree")
    parser.add_argument("--service")
    parser.add_argument("--txn")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--supervisor")
    parser.add_argument("--unit-dir")
    parser.add_argument("--reason", default="asked for on the host")
    parser.add_argument("--boot", action="store_true")
    given = parser.parse_args(argv)
    os.umask(0o022)
    root = absolute(given.root, "root")

    def service() -> Service:
        if given.supervisor:
            return Service(root, given.service, given.supervisor, absolute(given.unit_dir, "unit_dir"))
        return Service.at(root, named(NAME, given.service, "service"))

    if given.verb == "run":
        return Applier(service(), service().plan(given.txn)).run()
    if given.verb == "follow":
        return follow(service(), given.txn, given.offset)
    if given.verb == "supervise":
        return supervise(service())
    if given.verb == "recover":
        return recover_command(service, given.reason, given.boot)
    return answer(lambda: VERBS[given.verb](service(), {"verb": given.verb}))


def recover_command(service: Callable[[], Service], reason: str, boot: bool) -> int:
    """`recover` at boot, after an applier's death and by hand: status 0 unless it is stuck.

    At boot and after an applier a held lock means that somebody is at it: nothing to do for us.
    """
    try:
        reply = recover_verb(service(), {"reason": "the host restarted" if boot else reason, "boot": boot})
    except HostError as error:
        print(json.dumps({"ok": False, "error": {"kind": error.kind, "message": error.message, **error.more}}))
        return 0 if error.kind == "locked" and boot else 1
    print(json.dumps({"ok": True, **reply}))
    return 0


if __name__ == "__main__" and sys.argv[0] != "-":
    raise SystemExit(main(sys.argv[1:]))
