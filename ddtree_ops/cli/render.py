"""``ddtree render``: the unit and its companions, nothing touched."""

from __future__ import annotations

from ddtree_ops.cli.app import HostOption, JsonOption, ProfileOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

UNKNOWN_RELEASE = "0" * 16


@command("render", "Deploy")
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
    from ddtree_ops.cli.fleet import select
    from ddtree_ops.errors import UsageError
    from ddtree_ops.release import release_id

    screen = Screen(json_=json_)
    found = []
    for deployment in select(host, service, profile, workspace):
        try:
            release = release_id(deployment.profile.engine, arch=deployment.host.gpus.arch)
        except UsageError as error:
            release = UNKNOWN_RELEASE
            screen.warn(f"{deployment.host.name}: the release's id is not known, shown as zeros: {error.message}")
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
