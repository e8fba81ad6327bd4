"""``ddtree render``: the unit and its companions, nothing touched."""

from __future__ import annotations

from ddtree_ops.cli.app import HostOption, JsonOption, ProfileOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

UNKNOWN_RELEASE = "0" * 16


@command("render")
def render(
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Print what a deploy would put on the host. Contacts nothing.

    The generation number is shown as 1; a plan shows the real one.
    """
    from ddtree_ops import units
    from ddtree_ops.cli.fleet import nodes, select
    from ddtree_ops.deploy.fitting import refuse_impossible, release_ids
    from ddtree_ops.model.archs import silenced_rules

    screen = Screen(json_=json_)
    found = []
    for deployment in nodes(select(host, service, profile, workspace)):
        refuse_impossible(deployment)
        for rule in silenced_rules(deployment):
            screen.warn(f"{deployment.host.name}: {rule}")
        ids = release_ids(deployment)
        release = UNKNOWN_RELEASE
        if len(ids) == 1:
            (release,) = ids.values()
        else:
            which = ", ".join(f"{one} with Python {python}" for python, one in ids.items())
            screen.warn(f"{deployment.host.name}: the release depends on the host and is shown as zeros: {which}")
        files = dict(units.render(deployment, release, 1).files)
        found.append(
            {"host": deployment.host.name, "service": deployment.service_name, "release": release, "files": files}
        )
        for name, text in files.items() if not screen.json else ():
            screen.say(f"# {deployment.host.name}: {deployment.service_name}: {name}")
            screen.say(text)
    if screen.json:
        screen.document({"ok": True, "hosts": found})
    return 0
