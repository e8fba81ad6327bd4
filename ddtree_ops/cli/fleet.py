"""Which services a command means, and doing one thing to each: a table, one JSON document, the worst exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddtree_ops.cli.app import error_json, show_error
from ddtree_ops.cli.screen import Screen
from ddtree_ops.errors import DdtreeError, Interrupted, UsageError
from ddtree_ops.model import Deployment, Workspace, find_workspace, load_workspace, resolve

# design.md, "Several hosts: the worst of". 2 and 130 end a run at once and are not compared.
WORST_FIRST = (130, 9, 5, 4, 8, 1, 7, 6, 2, 3, 0)


def select(
    hosts: Sequence[str] | None, service: str | None, profile: str | None, workspace: Path | None
) -> list[Deployment]:
    """The deployments a command line names. Raises UsageError for an unknown name or an ambiguous choice."""
    loaded = load_workspace(find_workspace(workspace))
    return [resolve(loaded, name, service, profile) for name in host_names(loaded, hosts)]


def select_hosts(hosts: Sequence[str] | None, workspace: Path | None) -> list[Deployment]:
    """One deployment for each host that a command line names, whatever services it has: for what is the host's."""
    loaded = load_workspace(find_workspace(workspace))
    return [
        resolve(loaded, name, next(iter(loaded.hosts[name].services), None) if name in loaded.hosts else None)
        for name in host_names(loaded, hosts)
    ]


def host_names(workspace: Workspace, hosts: Sequence[str] | None) -> list[str]:
    """``--host`` as given, ``all`` expanded; without it the default host or the only one, else UsageError."""
    if hosts:
        names = list(workspace.hosts) if "all" in hosts else list(hosts)
        return list(dict.fromkeys(names))
    if workspace.default_host:
        return [workspace.default_host]
    if len(workspace.hosts) == 1:
        return list(workspace.hosts)
    raise UsageError("which host?", hint="--host " + " | ".join([*workspace.hosts, "all"]))


def each(
    screen: Screen,
    deployments: Sequence[Deployment],
    act: Callable[[Deployment], tuple[int, dict[str, Any]]],
    *,
    stop_at_first_failure: bool = False,
    table: bool = True,
) -> int:
    """Do ``act`` to each deployment in order. It returns an exit code and what ``--json`` shows of it.

    Prints a table when there are several hosts (``table`` False: act showed one itself); returns the worst exit code.
    """
    results: list[dict[str, Any]] = []
    codes: list[int] = []
    for deployment in deployments:
        name = deployment.host.name
        if len(deployments) > 1:
            screen.step(f"-- {name} --")
        try:
            code, result = act(deployment)
        except KeyboardInterrupt:  # nothing was being applied: that part answers by itself
            stopped = Interrupted(f"{name}: interrupted", hint=f"how things are: ddtree status --host {name}")
            show_error(stopped)
            code, result = stopped.exit_code, {"error": error_json(stopped)}
        except DdtreeError as error:
            show_error(error)
            code, result = error.exit_code, {"error": error_json(error)}
        codes.append(code)
        results.append({"host": name, "service": deployment.service_name, "exit_code": code, **result})
        if code == 130 or (stop_at_first_failure and code not in (0, 3)):
            left = [d.host.name for d in deployments[len(codes) :]]
            if left:
                screen.warn(f"stopped at the first failure; not touched: {', '.join(left)}")
                results += [{"host": host, "skipped": True} for host in left]
            break
    if screen.json:
        screen.document({"ok": max(codes, default=0) == 0, "hosts": results})
    elif table and len(deployments) > 1:
        screen.table("", ["host", "service", "result"], [_row(r) for r in results])
    return worst(codes)


def worst(codes: Sequence[int]) -> int:
    """The exit code of several hosts (design.md's order)."""
    return min(codes, key=WORST_FIRST.index, default=0)


def _row(result: dict[str, Any]) -> list[str]:
    if result.get("skipped"):
        return [result["host"], "", "not touched"]
    said = result["error"]["message"] if "error" in result else str(result.get("summary", "ok"))
    return [result["host"], result["service"], said]
