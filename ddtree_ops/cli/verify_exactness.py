"""``ddtree verify-exactness``: the gate alone, against what runs now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment


@command("verify-exactness")
def verify_exactness(
    host: HostOption = None,
    service: ServiceOption = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file of prompts instead of the packaged set.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="self-score, replay, golden, and above temperature 0 same-seed, distribution; several times for "
            "several. Default: self-score, or replay where the server refuses logprobs.",
        ),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Keep the answers as a golden in the workspace; against a service that speculates (float32), its "
            "verify counts beside the golden that is there.",
        ),
    ] = False,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="URL", help="Compare with this running server as well.")
    ] = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Prove that the running service emits exactly the target model's tokens.

    Exit 0 for EXACT (and NEAR-TIE where the profile's policy allows it), 4 for FAIL, 8 for INCONCLUSIVE.
    """
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy.session import open_session
    from ddtree_ops.deploy.verify import Ask, verify
    from ddtree_ops.exactness import known_methods

    screen = Screen(json_=json_)
    ask = Ask(methods=known_methods(method or []), prompts=prompts, baseline=baseline, record=record)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with open_session(deployment) as session:
            done = verify(session, session.probe(), screen, ask)
        verdict, policy = done.verdict, done.profile.exactness.policy
        colour = "green" if verdict.passed(policy) else "red"
        screen.say(f"{deployment.host.name}: {deployment.service_name}: {verdict.kind}", colour)
        for line in verdict.lines():
            screen.say(f"  {line}")
        if done.recorded is not None:
            screen.say(f"  golden: {done.recorded}")
        recorded = None if done.recorded is None else str(done.recorded)
        code = verdict.exit_code(policy)
        return code, {"verdict": verdict.to_json(), "golden": recorded, "summary": verdict.kind}

    return each(screen, select(host, service, None, workspace), act)
