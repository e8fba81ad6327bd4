"""Facts in, findings out. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.deploy.plan import model_paths
from ddtree_ops.doctor import checks as _registered  # noqa: F401  importing registers the checks
from ddtree_ops.doctor.check import CHECKS, GROUPS, Case, Check, Finding, Seen
from ddtree_ops.errors import UsageError
from ddtree_ops.model import Workspace
from ddtree_ops.model.archs import Silenced, arch_table, silenced_rules
from ddtree_ops.model.check import nearest
from ddtree_ops.model.types import CheckOverride
from ddtree_ops.model.yamlfile import position
from ddtree_ops.units import cache_directory


@dataclass
class Report:
    """What the checks of one service said. ``not_made``: {id: why it could not be judged}; ``silenced``: by profile."""

    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    not_made: dict[str, str] = field(default_factory=dict)
    silenced: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True when something is an error."""
        return any(finding.severity == "error" for finding in self.findings)

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def summary(self) -> str:
        """``2 errors, 1 warning, 58 passed``, for one line."""
        if not (self.findings or self.passed or self.not_made or self.silenced):
            return "nothing was checked: none of these checks is about this service"
        counts = [(self.count("error"), "error"), (self.count("warning"), "warning"), (self.count("info"), "note")]
        said = [f"{number} {word}{'s' * (number != 1)}" for number, word in counts if number]
        said += [f"{len(self.passed)} passed"]
        said += [f"{len(self.not_made)} not made"] if self.not_made else []
        said += [f"{len(self.silenced)} silenced"] if self.silenced else []
        return ", ".join(said)

    def as_json(self) -> dict[str, Any]:
        return {
            "failed": self.failed,
            "findings": [finding.as_json() for finding in self.findings],
            "passed": self.passed,
            "not_made": self.not_made,
            "silenced": [finding.as_json() for finding in self.silenced],
            "arch_rules": arch_table().version,
        }


def chosen(known: Collection[str], only: Collection[str], skip: Collection[str]) -> set[str]:
    """The checks to make, out of ``known`` ids; a group's name stands for its checks. Raises UsageError for others."""

    def spread(names: Collection[str]) -> set[str]:
        found: set[str] = set()
        for name in names:
            # Active checks are no Check: whatever is known beside those is one of them.
            group = {id_ for id_ in known if (CHECKS[id_].group if id_ in CHECKS else "active") == name}
            if name not in known and not group:
                raise UsageError(
                    f"no check {name!r}{nearest(name, [*known, *GROUPS])}", hint=f"checks: {', '.join(sorted(known))}"
                )
            found |= group or {name}
        return found

    left = (spread(only) if only else set(known)) - spread(skip)
    if not left:
        raise UsageError("--only and --skip leave no check to make")
    return left


def examine(case: Case, wanted: Collection[str] | None = None) -> Report:
    """Make the checks (all, or those of ``wanted`` ids) and take what they found as the profile says."""
    refuse_unknown(case.profile.checks)
    report = Report()
    for check in sorted(CHECKS.values(), key=lambda each: GROUPS.index(each.group)):
        if (wanted is not None and check.id not in wanted) or (check.gpus and not case.uses_gpus):
            continue
        why = unjudgeable(case, check)
        if why is not None:
            report.not_made[check.id] = why
            continue
        take(report, check.id, [finding(check, seen) for seen in check.judge(case)], case.profile.checks)
        if check.id == "arch-rule":
            report.silenced += [silent_rule(check, rule) for rule in silenced_rules(case.deployment)]
    return report


def silent_rule(check: Check, rule: Silenced) -> Finding:
    """A rule that the profile silences: it ends no plan, and is shown with the reason all the same."""
    seen = Seen(rule.why, "no such thing in the profile", "change the profile")
    return dataclasses.replace(finding(check, seen), id=rule.rule, reference=rule.source, reason=rule.reason)


def take(report: Report, id_: str, found: list[Finding], overrides: Mapping[str, CheckOverride]) -> None:
    """Add a check's findings to the report, raised, lowered or silenced as the profile says, with its reason."""
    override = overrides.get(id_)
    if not found:
        report.passed.append(id_)
    elif override is None:
        report.findings += found
    elif override.severity == "off":
        report.silenced += [dataclasses.replace(each, reason=override.reason) for each in found]
    else:
        severity = override.severity
        report.findings += [dataclasses.replace(each, severity=severity, reason=override.reason) for each in found]


def finding(check: Check, seen: Seen) -> Finding:
    return Finding(
        id=check.id,
        group=check.group,
        severity=seen.severity or check.severity,
        seen=seen.seen,
        expected=seen.expected,
        do=seen.do,
        reference=check.reference,
    )


def unjudgeable(case: Case, check: Check) -> str | None:
    """Why a check cannot be judged by these facts; None when it can."""
    facts = case.facts
    for section in check.needs:
        if section in facts.malformed:
            return f"{section} is malformed"
        if section in facts.absent:
            return f"{section} was not collected"
        unasked = [path for path in named(case, section) if path not in getattr(facts, section)]
        if unasked and f"model {unasked[0]}" not in facts.collector.unfinished:
            return f"nothing was asked of {unasked[0]}: these facts are of another profile"
        late = [part for part in facts.collector.unfinished if part == section or part.startswith(f"{section[:-1]} /")]
        if late:
            return f"{late[0]} did not end in time"
        if (other := of_another(case, section)) is not None:
            return f"these facts are of {other}"
        if getattr(getattr(facts, section, None), "readable", True) is False:
            return f"{section} is not readable for {facts.rights.user or 'this user'}"
    return None


def of_another(case: Case, section: str) -> str | None:
    """The service or port that the collector was asked about, where it is not this one's."""
    name, number = case.facts.service.name, case.facts.port.number
    if section in ("service", "log") and name not in (None, case.deployment.service_name):
        return f"the service {name}"
    if section in ("port", "server") and number not in (None, case.deployment.service.port):
        return f"the port {number}"
    return None


def named(case: Case, section: str) -> list[str]:
    """What the collector must have been asked by name: without the name nothing is known of it."""
    if section == "models":
        return model_paths(case.deployment)
    if section == "disks":
        return [case.deployment.host.root, cache_directory(case.deployment)]
    return []


def refuse_unknown(overrides: Mapping[str, CheckOverride]) -> None:
    """Raises UsageError for a check that the profile changes and that does not exist."""
    for name, override in overrides.items():
        if problem := misnamed(name, override):
            raise UsageError(f"the profile's checks: {problem}", hint="ddtree doctor --list shows the checks")


def refuse_misnamed(workspace: Workspace) -> None:
    """As `refuse_unknown`, for every profile of a workspace, with file and line, before any host is asked."""
    for profile in workspace.profiles.values():
        for name, override in profile.values.get("checks", {}).items():
            if problem := misnamed(name, override):
                at = profile.origins[f"checks.{name}"]
                raise UsageError(
                    position(at.file, at.line, at.path, problem), hint="ddtree doctor --list shows the checks"
                )


def misnamed(name: str, override: CheckOverride | None) -> str:
    """Why a profile cannot say that of a check or arch rule; "" when it can."""
    from ddtree_ops.doctor.active import ACTIVE

    rules = [rule.id for rule in arch_table().rules]
    known = [*CHECKS, *ACTIVE, *rules]
    if name not in known:
        return f"no check or arch rule {name!r}{nearest(name, known)}"
    if name in rules and override is not None and override.severity != "off":
        return f'an arch rule holds or is silenced (severity: "off"); {override.severity} means nothing for it'
    return ""
