"""What ``ddtree hosts --prometheus`` writes for node_exporter's textfile collector, in the text format. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: name -> (type, help); the order of the file.
METRICS = {
    "ddtree_host_reachable": ("gauge", "1 when the host answered."),
    "ddtree_service_deployed": ("gauge", "1 when a generation is confirmed."),
    "ddtree_service_active": ("gauge", "1 when the service runs."),
    "ddtree_service_restarts_total": (
        "counter",
        "Restarts by the supervisor since the service was last started by hand.",
    ),
    "ddtree_speculation_expected": ("gauge", "1 when the profile speculates."),
    "ddtree_accept_length_floor": ("gauge", "min_accept_length of the profile."),
    "ddtree_verdict_passed": ("gauge", "1 when the last verdict passes."),
    "ddtree_verdict_timestamp_seconds": ("gauge", "When the last verdict was written."),
    "ddtree_unproven": ("gauge", "1 when no verdict binds what is deployed."),
    "ddtree_doctor_errors": ("gauge", "Findings of ddtree doctor that are errors."),
    "ddtree_gpus_busy": ("gauge", "GPUs that somebody uses."),
    "ddtree_look_timestamp_seconds": ("gauge", "When this was looked at."),
}


def exposition(rows: Sequence[tuple[str, str, Mapping[str, float | None]]]) -> str:
    """(host, service, values by metric) in the text format; None is left out: nothing is known, so nothing is said."""
    lines = []
    for name, (kind, text) in METRICS.items():
        samples = [(host, service, values.get(name)) for host, service, values in rows]
        known = [(host, service, value) for host, service, value in samples if value is not None]
        if known:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [
                f'{name}{{host="{host}",service="{service}"}} {float(value):.15g}' for host, service, value in known
            ]
    return "\n".join([*lines, ""])
