"""One host's service, connected: what a plan needs to know of it, and what comes before any change."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ddtree_ops import host as host_side
from ddtree_ops.deploy.drift import SWITCH_FILE
from ddtree_ops.deploy.evidence import evidence_of
from ddtree_ops.deploy.facts import Facts, facts
from ddtree_ops.deploy.fitting import fitting, release_ids
from ddtree_ops.deploy.plan import LEASE_S, UNIT_DIR, Known, Plan, Transfer, make_plan, model_paths, sha256
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Locked
from ddtree_ops.model import Deployment, Profile
from ddtree_ops.model.validate import is_loopback
from ddtree_ops.remote import openssh
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.openssh import Carrier
from ddtree_ops.remote.transport import Transport, connect, connect_when_needed
from ddtree_ops.units import render
from ddtree_ops.units.render import warm


@dataclasses.dataclass(frozen=True)
class Options:
    """What the operator allowed beyond the plain case."""

    adopt: bool = False
    overwrite: bool = False


class Session:
    """One host's service, connected: the transport and the agent.

    ``others``: sessions with the further nodes of a service over several hosts, by rank; it closes them too.
    """

    def __init__(self, deployment: Deployment, transport: Transport, others: Sequence[Session] = ()) -> None:
        self.deployment, self.others = deployment, others
        self._use(transport)

    @property
    def every(self) -> list[Session]:
        """One session a node, this one first."""
        return [self, *self.others]

    def _use(self, transport: Transport) -> None:
        host = self.deployment.host
        self.transport = transport
        self.agent = Agent(
            transport,
            root=host.root,
            service=self.deployment.service_name,
            supervisor=host.supervisor,
            unit_dir=UNIT_DIR,
        )

    def reconnect(self) -> None:
        """Dial again in place of a link that is lost. Raises Unreachable."""
        self.transport.close()
        self._use(connect(self.deployment.host))

    def close(self) -> None:
        for one in self.every:
            one.transport.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def beside(self) -> Transport:
        """One more connection to the host, for the caller to close. Raises Unreachable."""
        return connect(self.deployment.host)

    def carrier(self) -> Carrier | None:
        """A faster way to the host for bulk, where there is one."""
        if self.deployment.host.transport != "ssh":
            return None
        return openssh.carrier(self.deployment.host)

    def probe(self, releases: Collection[str] = ()) -> Facts:
        """One round trip, no write. ``releases``: ids to ask for."""
        reply = self.agent.call(
            "probe",
            model_paths=model_paths(self.deployment),
            releases=sorted(releases),
            port=self.deployment.service.port,
        )
        return facts(reply)

    def look(self) -> Facts:
        """The probe that a plan is made from."""
        ids = release_ids(self.deployment)
        _warm()
        return self.probe(ids.values())

    def plan(self, options: Options, seen: Facts | None = None, why: str = "") -> tuple[Plan, Facts]:
        """Probe and compare; touches nothing. More round trips only where something changes.

        ``seen``: what `look` found already; ``why``: a reason to change it though nothing here differs. Raises Failed
        for a host that no release of the profile's base fits.
        """
        deployment = self.deployment
        seen = self.look() if seen is None else seen
        wanted = release_ids(deployment)[fitting(deployment, seen.system).python]
        evidence = evidence_of(deployment)
        known = Known(evidence=evidence, why=why)
        made = make_plan(deployment, wanted, seen, adopt=options.adopt, overwrite=options.overwrite, known=known)
        if not made.changes:
            return made, seen
        commit = (seen.generation.meta if seen.generation else {}).get("workspace_commit")
        known = Known(
            author=author(deployment.workspace_path),
            ancestor=None if commit is None else is_ancestor(deployment.workspace_path, str(commit)),
            transfer=None if wanted in seen.releases_installed else self._transfer(wanted),
            cannot_guard=self.cannot_guard(deployment.profile),
            old_env=self._old_env(seen, wanted),
            evidence=evidence,
            why=why,
        )
        return make_plan(deployment, wanted, seen, adopt=options.adopt, overwrite=options.overwrite, known=known), seen

    def _transfer(self, release: str) -> Transfer:
        """What the store lacks of a release that is built; of one that is not, nothing can be said."""
        from ddtree_ops.release.cache import Cache
        from ddtree_ops.remote.ship import LIST_TIMEOUT_S, staging_of

        manifest = Cache().finished(release)
        if manifest is None:
            return Transfer(None, None)
        sizes = {file["sha256"]: file["size"] for file in manifest["files"]}
        offer = self.agent.call(
            "missing", manifest=manifest, staging=staging_of(self.transport), timeout=LIST_TIMEOUT_S
        )
        lacks = set(offer["missing"]) - set(offer["complete"])
        held = sum(size for sha, size in offer["partial"].items() if sha in lacks)
        return Transfer(len(lacks), sum(sizes[sha] for sha in lacks) - held)

    def cannot_guard(self, profile: Profile) -> str | None:
        """None where the service itself listens on loopback only; else the host tries it with a transient unit."""
        if is_loopback(profile.bind):
            return None
        if profile.router is not None:
            return "a guard would keep the router from its backends, too"
        if self.deployment.host.supervisor != "systemd":
            return "there is no systemd to enforce it"
        return str(self.agent.call("guard")["why"])

    def _old_env(self, seen: Facts, release: str) -> str | None:
        """The environment file of what runs, where it differs from the one rendered for the same generation."""
        old = seen.generation
        if old is None or old.adopted or SWITCH_FILE[self.deployment.host.supervisor] != "unit":
            return None
        same = render(self.deployment, release, old.n).files["env"]
        if sha256(same) == old.files.get("env"):
            return None
        return str(self.agent.call("generation", n=old.n)["files"].get("env", ""))


@functools.cache
def _warm() -> None:
    """Once, beside the waiting for the first host's answer: what rendering needs is slow to load."""
    threading.Thread(target=warm, name="warm", daemon=True).start()


def open_session(deployment: Deployment) -> Session:
    """A session with the deployment's host, dialled by what is first asked; leaving its block closes the connection."""
    others = [Session(one, connect_when_needed(one.host)) for one in deployment.others]
    return Session(deployment, connect_when_needed(deployment.host), others)


def author(workspace: Path) -> dict[str, Any]:
    """Who deploys from where: recorded in the generation."""
    import getpass
    import socket

    commit = _git(workspace, "rev-parse", "HEAD")
    return {
        "who": getpass.getuser(),
        "client": socket.gethostname(),
        "workspace_commit": commit.stdout.strip() or None if commit.returncode == 0 else None,
        "created": time.time(),
    }


def is_ancestor(workspace: Path, commit: str) -> bool:
    """Whether the commit is HEAD or in its history. A commit that is not even here is not."""
    return _git(workspace, "merge-base", "--is-ancestor", "--end-of-options", commit, "HEAD").returncode == 0


def _git(workspace: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(workspace), *words], capture_output=True, text=True, check=False)


def settle(session: Session, seen: Facts, ui: Ui) -> bool:
    """Before a change: resolve an unfinished deploy. True when something was recovered and the probe is stale.

    Raises Locked when somebody's deploy is alive.
    """
    if seen.lock is not None and seen.lock.alive:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.lock.since))
        raise Locked(
            f"{session.deployment.host.name}: {session.deployment.service_name} is being deployed by "
            f"{seen.lock.who or 'somebody'} from {seen.lock.client or '?'} since {since}: {seen.lock.what or '?'} "
            f"(txn {seen.lock.txn})",
            hint="wait for it, or end it with: ddtree unlock --reason '...'",
        )
    if seen.unfinished is None and seen.state.pending is None:
        return False
    ui.step(f"an earlier deploy ({seen.unfinished}) did not finish; recovering it first")
    by = author(session.deployment.workspace_path)
    session.agent.call(
        "recover",
        reason="a later deploy found it unfinished",
        who=by["who"],
        client=by["client"],
        timeout=restore_limit_s(session.deployment),
    )
    return True


def restore_limit_s(deployment: Deployment) -> float:
    """How long a restore may take, in seconds: stop what is there, load what was there before."""
    return deployment.profile.stop_timeout_s + deployment.profile.load_timeout_s + LEASE_S


def bootstrap(session: Session, seen: Facts, ui: Ui) -> None:
    """Install or refresh ``bin/ddtree-host`` when the host has another one, or does not keep it compiled."""
    if seen.agent_sha256 == host_side.sha256() and session.agent.kept is not False:
        return
    ui.step("installing ddtree-host")
    session.agent.bootstrap()
