"""``ddtree verify-exactness``: the gate alone, against what runs now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment


@command("verify-exactness", "Prove")
def verify_exactness(
    host: HostOption = None,
    service: ServiceOption = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file of prompts instead of the packaged set.")
    ] = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Prove that the running service emits exactly the target model's tokens.

    Exit 0 for EXACT (and NEAR-TIE where the profile's policy allows it), 4 for FAIL, 8 for INCONCLUSIVE.
    """
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy import run
    from ddtree_ops.exactness import load_prompts

    screen = Screen(json_=json_)
    overrides = {"prompts": load_prompts(prompts), "prompt_set": prompts.name} if prompts else None

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with run.open_session(deployment) as session:
            seen = session.probe()
            verdict = run.verify(session, seen, screen, overrides)
        passed = verdict.passed()
        screen.say(f"{deployment.host.name}: {deployment.service_name}: {verdict.kind}", "green" if passed else "red")
        for line in verdict.lines():
            screen.say(f"  {line}")
        return verdict.exit_code(), {"verdict": verdict.to_json(), "summary": verdict.kind}

    return each(screen, select(host, service, None, workspace), act)
