"""Which services a command means, and doing one thing to each: a table, one JSON document, the worst exit code."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ddtree_ops.cli.app import error_json, show_error
from ddtree_ops.cli.screen import Screen
from ddtree_ops.errors import WORST_FIRST, DdtreeError, Interrupted, UsageError
from ddtree_ops.model import Deployment, Workspace, find_workspace, load_workspace, resolve
from ddtree_ops.remote.agent import ARGV, TIMEOUT_S, elevates
from ddtree_ops.remote.openssh import begin
from ddtree_ops.remote.rights import may_root

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
Done: TypeAlias = dict[int, tuple[int, dict[str, Any]]]  # by index of the deployment: exit code, result
# 2 and 130 end a run at once and are not compared.
CODES = (130, *WORST_FIRST, 2, 3, 0)
PARALLEL = 32  # hosts looked at at once; the work is waiting


def load(workspace: Path | None) -> Workspace:
    """The workspace that a command line means, with all that its files say checked. Raises UsageError."""
    loaded = load_workspace(find_workspace(workspace))
    if any(profile.values.get("checks") for profile in loaded.profiles.values()):
        from ddtree_ops.doctor.examine import refuse_misnamed

        refuse_misnamed(loaded)
    return loaded


def select(
    hosts: Sequence[str] | None, service: str | None, profile: str | None, workspace: Path | None
) -> list[Deployment]:
    """The deployments a command line names. Raises UsageError for an unknown name or an ambiguous choice."""
    loaded = load(workspace)
    return chosen(loaded, hosts, service, profile)


def chosen(
    workspace: Workspace, hosts: Sequence[str] | None, service: str | None, profile: str | None
) -> list[Deployment]:
    """The same in a workspace that is loaded. A service over several hosts is one, whichever of them is named."""
    found: dict[tuple[str, str], Deployment] = {}
    for name in host_names(workspace, hosts):
        made = resolve(workspace, name, service, profile)
        if made.service.lead is not None:
            made = resolve(workspace, made.service.lead, made.service_name, profile)
        found[made.host.name, made.service_name] = made
    return list(found.values())


def nodes(deployments: Sequence[Deployment]) -> list[Deployment]:
    """One deployment a host that they run on: for what each host has of its own."""
    return list(itertools.chain.from_iterable(one.every for one in deployments))


def dialled(deployments: list[Deployment]) -> list[Deployment]:
    """The same, and ssh(1) connects to their hosts while the command that will ask them is still being loaded."""
    for host in {one.host.name: one.host for one in nodes(deployments) if one.host.transport == "ssh"}.values():
        begin(host, ARGV, timeout=TIMEOUT_S, root=elevates(host.supervisor, may_root(host)))
    return deployments


def select_hosts(hosts: Sequence[str] | None, workspace: Path | None) -> list[Deployment]:
    """One deployment for each host that a command line names, whatever services it has: for what is the host's."""
    loaded = load(workspace)
    return [
        resolve(loaded, name, next(iter(loaded.hosts[name].services), None) if name in loaded.hosts else None)
        for name in host_names(loaded, hosts)
    ]


def host_names(workspace: Workspace, hosts: Sequence[str] | None) -> list[str]:
    """``--host`` with ``all`` and groups expanded; without it the default host or the only one, else UsageError."""
    if hosts:
        if "all" in hosts:
            return list(workspace.hosts)
        return list(dict.fromkeys(itertools.chain(*(workspace.groups.get(name, [name]) for name in hosts))))
    if workspace.default_host:
        return [workspace.default_host]
    if len(workspace.hosts) == 1:
        return list(workspace.hosts)
    raise UsageError("which host?", hint="--host " + " | ".join([*workspace.hosts, *workspace.groups, "all"]))


def each(
    screen: Screen,
    deployments: Sequence[Deployment],
    act: Callable[[Deployment], tuple[int, dict[str, Any]]],
    *,
    stop_at_first_failure: bool = False,
    width: int = 1,
    table: bool = True,
) -> int:
    """Do ``act`` to each deployment in order, to ``width`` of them at once. It returns an exit code and what ``--json``
    shows of it.

    Prints a table when there are several hosts (``table`` False: act showed one itself); returns the worst exit code.
    """
    if width == 1:
        done = _one_by_one(screen, deployments, act, stop_at_first_failure)
    else:
        done = _side_by_side(screen, deployments, act, width, stop_at_first_failure)
    return finish(screen, deployments, done, table=table)


def everywhere(
    deployments: Sequence[Deployment], look: Callable[[Deployment], T]
) -> tuple[dict[int, T], dict[int, DdtreeError]]:
    """``look`` at all of them at once, changing nothing: what was found and what failed, by index of the deployment.

    Ctrl-C does not wait for hosts that do not answer: those that had not yet fail with Interrupted.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    looked: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()
    for index in range(len(deployments)):
        waiting.put(index)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index = waiting.get_nowait()
                try:
                    looked.put((index, look(deployments[index])))
                except BaseException as error:
                    looked.put((index, error))

    if len(deployments) == 1:
        work()
    else:
        for _ in range(min(PARALLEL, len(deployments))):
            threading.Thread(target=work, daemon=True).start()
    found: dict[int, T] = {}
    failed: dict[int, DdtreeError] = {}
    try:
        for _ in deployments:
            index, value = looked.get()
            if isinstance(value, DdtreeError):
                failed[index] = value
            elif isinstance(value, BaseException):
                raise value
            else:
                found[index] = value
    except KeyboardInterrupt:
        for index in {*range(len(deployments))} - {*found} - {*failed}:
            failed[index] = interrupted(deployments[index])
    return dict(sorted(found.items())), dict(sorted(failed.items()))


def interrupted(deployment: Deployment) -> Interrupted:
    """Ctrl-C while nothing was being applied there: that part answers by itself."""
    name = deployment.host.name
    return Interrupted(f"{name}: interrupted", hint=f"how things are: ddtree status --host {name}")


def survey(
    screen: Screen,
    deployments: Sequence[Deployment],
    look: Callable[[Deployment], T],
    show: Callable[[Deployment, T], tuple[int, dict[str, Any]]],
    *,
    table: bool = True,
) -> int:
    """Look at all deployments at once, show what was found in order; the worst exit code."""
    found, failed = everywhere(deployments, look)
    done: Done = {}
    for index, deployment in enumerate(deployments):
        if index in failed:
            done[index] = failure(failed[index])
            continue
        if len(deployments) > 1 and table:
            screen.step(f"-- {deployment.host.name} --")
        done[index] = show(deployment, found[index])
    return finish(screen, deployments, done, table=table)


def failure(error: DdtreeError) -> tuple[int, dict[str, Any]]:
    """An expected failure, shown; its exit code and what ``--json`` says of it."""
    show_error(error)
    return error.exit_code, {"error": error_json(error)}


def finish(screen: Screen, deployments: Sequence[Deployment], done: Done, *, table: bool = True) -> int:
    """Show what became of each deployment (absent in ``done``: not touched); the worst exit code."""
    results = []
    for index, deployment in enumerate(deployments):
        base = {"host": deployment.host.name, "service": deployment.service_name}
        if index in done:
            code, result = done[index]
            results.append({**base, "exit_code": code, **result})
        else:
            results.append({**base, "skipped": True})
    left = [row["host"] for row in results if row.get("skipped")]
    if left:
        screen.warn(f"stopped at the first failure; not touched: {', '.join(left)}")
    codes = [code for code, _ in done.values()]
    if screen.json:
        screen.document({"ok": max(codes, default=0) == 0, "hosts": results})
    elif table and len(deployments) > 1:
        screen.table("", ["host", "service", "result"], [_row(r) for r in results])
    return worst(codes)


def attempt(
    act: Callable[[Deployment], tuple[int, dict[str, Any]]], deployment: Deployment
) -> tuple[int, dict[str, Any]]:
    """``act``, its expected failures shown and turned into their exit code and what ``--json`` shows."""
    try:
        return act(deployment)
    except KeyboardInterrupt:
        return failure(interrupted(deployment))
    except DdtreeError as error:
        return failure(error)


def _one_by_one(
    screen: Screen,
    deployments: Sequence[Deployment],
    act: Callable[[Deployment], tuple[int, dict[str, Any]]],
    stop_at_first_failure: bool,
) -> Done:
    done: Done = {}
    for index, deployment in enumerate(deployments):
        if len(deployments) > 1:
            screen.step(f"-- {deployment.host.name} --")
        done[index] = attempt(act, deployment)
        if _stops(done[index][0], stop_at_first_failure):
            break
    return done


def _side_by_side(
    screen: Screen,
    deployments: Sequence[Deployment],
    act: Callable[[Deployment], tuple[int, dict[str, Any]]],
    width: int,
    stop_at_first_failure: bool,
) -> Done:
    """Threads, for the work is waiting. Ctrl-C reaches the main thread only: it tells the others."""
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    from ddtree_ops.deploy.attend import interrupt_all

    done: Done = {}
    running: dict[Future[tuple[int, dict[str, Any]]], int] = {}
    waiting = iter(range(len(deployments)))
    stopped = interrupted = False
    with ThreadPoolExecutor(width) as pool:
        while True:
            try:
                while not stopped and len(running) < width and (index := next(waiting, None)) is not None:
                    running[pool.submit(attempt, act, deployments[index])] = index
                if not running:
                    return done
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    index = running.pop(future)
                    done[index] = future.result()
                    stopped = stopped or _stops(done[index][0], stop_at_first_failure)
            except KeyboardInterrupt:
                if interrupted:  # the threads cannot be left otherwise; each host's lease brings it back
                    show_error(Interrupted("interrupted twice; the hosts go back by themselves", hint="ddtree hosts"))
                    os._exit(Interrupted.exit_code)
                stopped = interrupted = True
                screen.warn("interrupted: the hosts are told to go back; waiting until they have")
                interrupt_all()


def _stops(code: int, at_first_failure: bool) -> bool:
    return code == 130 or (at_first_failure and code not in (0, 3))


def worst(codes: Sequence[int]) -> int:
    """The exit code of several hosts (design.md's order)."""
    return min(codes, key=CODES.index, default=0)


def _row(result: dict[str, Any]) -> list[str]:
    if result.get("skipped"):
        return [result["host"], "", "not touched"]
    said = result["error"]["message"] if "error" in result else str(result.get("summary", "ok"))
    return [result["host"], result["service"], said]
