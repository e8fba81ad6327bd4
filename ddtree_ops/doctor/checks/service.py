"""The port, the service, what runs, and how long ago it was proven."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.doctor.check import Case, Seen, check
from ddtree_ops.units import expectations

GROUP = "service"
FIELD = "facts of the field"
STALE_DAYS = 30
#: What a cause in the log means and what to do: names of the collector's running.LOG_CAUSES.
MEANING = {
    "illegal-access": ("illegal memory access on the GPU", "lower budget or max_running_requests; cuda_graph: false"),
    "fabric": ("CUDA error 802: the fabric manager was not ready", "see the checks fabric-manager and fabric-version"),
    "out-of-memory": ("out of GPU memory", "a smaller memory_fraction or max_running_requests; see memory-fit"),
    "device-assert": (
        "a kernel's assertion, mostly a token id beyond the vocabulary",
        "patch 04-token-id-range; see the log",
    ),
    "port": ("its port was taken", "see port-taken"),
    "compiler": (
        "FlashInfer compiles kernels at the first start and found no ninja, nvcc or c++",
        "apt-get install g++ and the CUDA toolkit, env.CUDA_HOME in the profile; ninja comes with the release",
    ),
    "collective-timeout": (
        "ranks waited for one another until the time limit",
        "ddtree doctor --active --only all-reduce",
    ),
}


@check(
    "port-taken",
    "port",
    "error",
    "nobody else listens on the service's port",
    needs=("port",),
    reference="an old server answers health checks of the new one",
)
def port_taken(case: Case) -> Iterator[Seen]:
    owner = case.facts.port.owner
    if owner is not None and not owner.ours and (owner.pid is not None or not case.active):
        who = f"{owner.command or '?'} (pid {owner.pid})" if owner.pid else "a process that we may not see"
        yield Seen(
            f"{who} listens on {case.facts.port.number}",
            "the service or nobody",
            f"{case.ssh}: ss -ltnp 'sport = :{case.facts.port.number}'; end it, or another port in the inventory",
        )


@check("service-masked", GROUP, "error", "the unit can be started", needs=("service",), reference="systemctl(1), mask")
def service_masked(case: Case) -> Iterator[Seen]:
    if case.facts.service.load == "masked":
        yield Seen(
            f"{case.deployment.service_name}.service is masked",
            "not masked",
            f"somebody wanted it never to start: ask, then {case.ssh}: systemctl unmask {case.deployment.service_name}",
        )


@check(
    "service-failed",
    GROUP,
    "error",
    "the service has not failed",
    needs=("service",),
    reference="systemctl(1), Result=",
)
def service_failed(case: Case) -> Iterator[Seen]:
    service = case.facts.service
    if service.state == "failed" and not case.facts.log.causes:
        yield Seen(
            f"failed ({service.result or '?'}), {service.restarts or 0} restarts",
            "active, or stopped on purpose",
            f"ddtree logs --host {case.deployment.host.name} --service {case.deployment.service_name}",
        )


@check(
    "service-crash-loop",
    GROUP,
    "error",
    "the service does not restart by itself over and over",
    needs=("service",),
    reference="systemd.service(5), NRestarts",
)
def service_crash_loop(case: Case) -> Iterator[Seen]:
    service = case.facts.service
    if case.active and (service.restarts or 0) >= 2 and not case.facts.log.causes:
        yield Seen(
            f"{service.restarts} restarts, now {service.state} ({service.sub})",
            "0 since it was started",
            f"ddtree logs --host {case.deployment.host.name}; ddtree rollback --host {case.deployment.host.name}",
        )


@check(
    "service-log",
    GROUP,
    "error",
    "no known cause of death in the service's log",
    needs=("log",),
    reference="what goes wrong in the field; ddtree_ops/host/agent/causes.py",
)
def service_log(case: Case) -> Iterator[Seen]:
    # Of a server that answers, what its log says of the past is over.
    if case.facts.server.answers and not (case.facts.service.restarts or 0):
        return
    for cause in case.facts.log.causes:
        meaning, do = MEANING.get(
            cause.cause, (cause.cause, "build a release for this host: ddtree build; then deploy")
        )
        yield Seen(f"{meaning}: {cause.line}", "none", do)


@check(
    "service-limits",
    GROUP,
    "warning",
    "the unit's limits are those that CUDA needs",
    needs=("service",),
    gpus=True,
    reference="LimitMEMLOCK=infinity, LimitNOFILE=1048576 (templates/service.unit.j2)",
)
def service_limits(case: Case) -> Iterator[Seen]:
    service = case.facts.service
    if service.load != "loaded" or service.generation is None:
        return
    if service.memlock not in (None, "infinity", "18446744073709551615"):
        yield Seen(
            f"LimitMEMLOCK={service.memlock}",
            "infinity",
            f"ddtree plan --host {case.deployment.host.name} shows who changed the unit",
        )


@check(
    "service-reload",
    GROUP,
    "warning",
    "what systemd runs is what the unit file says",
    needs=("service",),
    reference="systemctl(1), NeedDaemonReload",
)
def service_reload(case: Case) -> Iterator[Seen]:
    if case.facts.service.needs_reload:
        yield Seen(
            "the unit file changed since systemd read it",
            "read again",
            f"ddtree plan --host {case.deployment.host.name}; {case.ssh}: systemctl daemon-reload",
        )


@check(
    "service-silent",
    GROUP,
    "error",
    "a running server answers",
    needs=("service", "server"),
    reference="GET /server_info on the host's loopback",
)
def service_silent(case: Case) -> Iterator[Seen]:
    service, server = case.facts.service, case.facts.server
    if case.profile.nodes is not None and case.profile.nodes.rank:
        return  # of a service over several hosts rank 0 answers
    if (
        service.state == "active"
        and server.answers is False
        and (service.restarts or 0) < 2
        and not case.facts.log.causes
    ):
        yield Seen(
            f"active, and {server.problem or 'no answer'}",
            "an answer (a load takes minutes: look again)",
            f"ddtree logs --host {case.deployment.host.name} -f",
        )


@check(
    "server-arguments",
    GROUP,
    "error",
    "what runs is what was asked",
    needs=("server",),
    reference="stock SGLang turns DFLASH's topk and steps back to 1 with a warning only",
)
def server_arguments(case: Case) -> Iterator[Seen]:
    info = case.facts.server.info
    wanted = {key: value for key, value in expectations(case.profile).items() if key != "max_running_requests"}
    wrong = {key: info[key] for key, value in wanted.items() if key in info and info[key] != value}
    if wrong:
        yield Seen(
            ", ".join(f"{key} = {value!r}" for key, value in wrong.items()),
            ", ".join(f"{key} = {wanted[key]!r}" for key in wrong),
            f"ddtree plan --host {case.deployment.host.name}; then deploy",
        )


@check(
    "server-capped",
    GROUP,
    "warning",
    "as many requests at once as was asked",
    needs=("server",),
    reference="the memory fraction caps concurrency silently",
)
def server_capped(case: Case) -> Iterator[Seen]:
    info, asked = case.facts.server.info, case.profile.max_running_requests
    runs = info.get("effective_max_running_requests_per_dp", info.get("max_running_requests"))
    if asked and isinstance(runs, int | float) and runs < asked:
        yield Seen(
            f"{runs:.0f} requests at once",
            f"{asked} (max_running_requests)",
            "a larger memory_fraction, a shorter context_length, or ask for less",
        )


@check(
    "accept-length",
    GROUP,
    "error",
    "speculation is on and helps",
    needs=("server",),
    reference="1.00 is speculation silently off; wrong layers or mask embedding give 1.0 to 1.4",
)
def accept_length(case: Case) -> Iterator[Seen]:
    value, floor = case.facts.server.info.get("avg_spec_accept_length"), case.profile.min_accept_length
    if case.profile.algorithm == "none" or not isinstance(value, int | float) or value <= 0:
        return
    if floor is not None and value < floor:
        yield Seen(
            f"accept length {value:.2f}",
            f"at least {floor:g} (min_accept_length)",
            f"ddtree verify-exactness --host {case.deployment.host.name}; see the drafter's checks",
        )


@check(
    "verdict-stale",
    GROUP,
    "warning",
    "what runs was proven, lately, and on this driver",
    needs=("service",),
    reference="a verdict binds to generation and driver",
)
def verdict_stale(case: Case) -> Iterator[Seen]:
    service, proven = case.facts.service, case.facts.service.unit_proven
    if service.generation is None:
        return
    do = f"ddtree verify-exactness --host {case.deployment.host.name}"
    now = case.facts.clock.unix
    if proven is None or proven.kind is None:
        yield Seen(f"generation {service.generation} has no verdict", "EXACT or NEAR-TIE", do)
    elif proven.kind not in ("EXACT", "NEAR-TIE"):
        yield Seen(
            f"the last verdict is {proven.kind}", "EXACT or NEAR-TIE", do, "error" if proven.kind == "FAIL" else None
        )
    elif proven.driver and case.facts.driver.module and proven.driver != case.facts.driver.module:
        yield Seen(f"proven on driver {proven.driver}, now {case.facts.driver.module}", "one driver", do)
    elif proven.at is not None and now is not None and now - proven.at > STALE_DAYS * 86_400:
        yield Seen(f"proven {(now - proven.at) / 86_400:.0f} days ago", f"within {STALE_DAYS} days", do)
