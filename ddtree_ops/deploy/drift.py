"""How a host differs from what ddtree left there, and from what was proven there. Pure: facts in, lines out."""

from __future__ import annotations

from ddtree_ops.deploy.facts import Facts

SWITCH_FILE = {"systemd": "unit", "process": "process.json"}


def find_drift(facts: Facts, supervisor: str) -> list[str]:
    """What differs between the host and what ddtree last left there, one line each; empty when nothing does.

    While a deploy has not ended the host is as that deploy left it: nothing can be said then.
    """
    if facts.state.pending is not None:
        return []
    unit, generation = facts.unit, facts.generation
    found = [f"drop-in {path} was added by somebody else" for path in sorted(unit.dropins)]
    if unit.masked:
        found.append(f"{unit.path} is masked")
    elif unit.kind == "link":
        found.append(f"{unit.path} was replaced by a link")
    found += [line for line in facts.drift if line.startswith("the guard") or "of generation" in line]
    if facts.state.confirmed is None or generation is None:
        if unit.sha256 is not None or (facts.drift and not found):
            found.insert(0, f"{unit.fragment or unit.path} exists and ddtree did not make it")
        return found
    if generation.adopted:
        return found if unit.masked else list(facts.drift)
    want = generation.files.get(SWITCH_FILE[supervisor])
    if unit.sha256 is None and not (unit.masked or unit.kind == "link"):
        found.append(f"{unit.path} is gone")
    elif unit.sha256 is not None and unit.sha256 != want:
        found.append(f"{unit.path} was edited on the host")
    if supervisor == "systemd" and unit.sha256 is not None and unit.enabled not in (True, "enabled"):
        found.append(f"the service is {unit.enabled or 'not enabled'}: it would not start at boot")
    else:
        found += [line for line in facts.drift if line.startswith("its links")]
    for path, identity in (generation.meta.get("models") or {}).items():
        now = facts.models.get(path)
        if now is None:
            continue
        if not now.present:
            found.append(f"the model at {path} is gone")
        elif now.identity != identity:
            found.append(f"the model at {path} is no longer the one that was proven")
    running = facts.server_info
    if facts.active.state == "active" and running is not None:
        for key, value in ((generation.meta.get("health") or {}).get("expect") or {}).items():
            if running.get(key) != value:
                found.append(f"the running server shows {key} = {running.get(key)!r}, deployed was {value!r}")
    return found


def unproven(facts: Facts) -> str | None:
    """Why the last verdict does not bind what runs now; None when it does."""
    verdict, generation, pending = facts.last_verdict, facts.generation, facts.state.pending
    if pending is not None:
        return f"deploy {pending.txn} has not ended: generation {pending.to} may be what serves"
    if generation is None:
        return "nothing was ever proven here"
    if verdict is None:
        return f"generation {generation.n} has no verdict"
    if generation.adopted:
        return "a hand-made unit has no profile to be proven by"
    if not verdict.get("passed"):
        return f"the last verdict is {verdict.get('kind')}"
    binds = verdict.get("binds") or {}
    if binds.get("generation") != generation.n:
        return f"the last verdict is of generation {binds.get('generation')}"
    if binds.get("python") != facts.system.python:
        return f"the interpreter was {binds.get('python')} when it was proven, it is {facts.system.python} now"
    if binds.get("driver") and facts.system.driver and binds["driver"] != facts.system.driver:
        return f"the driver was {binds['driver']} when it was proven, it is {facts.system.driver} now"
    return None
