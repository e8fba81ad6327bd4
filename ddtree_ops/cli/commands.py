"""Every command with its file and its one line of help; what is not called is not imported.

``ddtree --help`` and completion show the names and lines from here (importing all commands costs as much again as
Typer itself); the command that a line names is imported when it is called, asked for its help, or completed.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

PACKAGE = "ddtree_ops.cli"


class Entry(NamedTuple):
    """``module``: the file below cli/ that registers it; ``line``: the first sentence of its own help."""

    module: str
    line: str


COMMANDS = {
    "build": Entry("build", "Make a release, print its id."),
    "demo": Entry(
        "demo",
        "Deploy the reference engine here, prove it exact, measure AR, chain and DDTree, and take it all down again.",
    ),
    "plan": Entry("plan", "Show what deploy would change, as a diff."),
    "deploy": Entry("deploy", "Bring a host to what the inventory says, prove that it is exact, or put it back."),
    "doctor": Entry("doctor", "Preflight of a host: every check named, what was seen and expected, what to do."),
    "help": Entry("help", "Show a document: keys of the inventory, exit codes, operating, the gate, and more."),
    "history": Entry("history", "Every deploy and rollback of a service with its end, newest last."),
    "hosts": Entry("hosts", "Every service of every host: GPUs, what runs, how and when it was proven."),
    "init": Entry("init", "Make a workspace: inventories and profiles to edit."),
    "logs": Entry("logs", "The last lines of the service's log."),
    "stop": Entry("power", "Stop the service; it stays enabled and starts again at boot."),
    "start": Entry("power", "Start the service."),
    "restart": Entry("power", "Stop and start the service."),
    "recover": Entry("power", "Undo a deploy that did not finish: back to the generation that is proven."),
    "unlock": Entry("power", "End somebody's running deploy; the host recovers."),
    "releases": Entry(
        "releases", "The releases on a host, newest first: id, size, age, and which service's generations use them."
    ),
    "prune": Entry("releases", "Remove releases that nobody needs, with their blobs and stale uploads; shown first."),
    "render": Entry("render", "Print what a deploy would put on the host."),
    "rollback": Entry("rollback", "Go back to the previous (or the named) generation."),
    "snapshot": Entry(
        "snapshot", "Copy units, drop-ins, manifest and resolved server arguments into snapshots/ and commit them."
    ),
    "status": Entry(
        "status", "What runs on a host, since when, which release, its accept length and the last verdict."
    ),
    "verify-exactness": Entry(
        "verify_exactness", "Prove that the running service emits exactly the target model's tokens."
    ),
    "sweep": Entry(
        "sweep",
        "Measure AR, chain and DDTree shapes on a host, each proven exact first; the host ends as it began.",
    ),
    "report": Entry(
        "report",
        "Write report.md, report.html (self-contained) and the charts of a run; with two runs, their comparison.",
    ),
    "tune": Entry(
        "tune", "Find the fastest exact shape, AR and chain included, and write it as a profile with its evidence."
    ),
    "export": Entry("export", "Render a service for Kubernetes or Slurm."),
    "patch": Entry("patch", "Check, edit and refresh the patches of SGLang."),
}
#: How ``ddtree --help`` groups them; each is in one group.
GROUPS = {
    "Look (nothing is changed)": (
        *("plan", "status", "hosts", "doctor", "verify-exactness", "history", "logs", "releases", "render"),
    ),
    "Change a host": ("deploy", "rollback", "stop", "start", "restart", "recover", "unlock", "prune"),
    "Measure": ("sweep", "report", "tune"),
    "Make": ("init", "snapshot", "build", "export", "patch", "demo"),
    "Read": ("help",),
}
EXAMPLES = (
    ("ddtree init fleet", "a workspace to edit"),
    ("ddtree plan --host ct200", "what a deploy would change"),
    ("ddtree deploy --host ct200", "deploy, prove, or go back"),
    ("ddtree tune --host ct200", "the fastest exact shape"),
    ("ddtree help operating", "the first host, upgrades, 3 a.m."),
)
#: What the files of commands that were imported have registered, each a Typer application of its own.
registered: dict[str, typer.Typer] = {}


def load(name: str) -> Any:
    """The whole command of that name (a click command of the class that Typer makes)."""
    importlib.import_module(f"{PACKAGE}.{COMMANDS[name].module}")
    return typer.main.get_command(registered[name])


class Group(TyperGroup):
    """The root of ``ddtree``: names and lines are there at once, a command when it is resolved."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, entry in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=entry.line)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """In groups, whole lines, then examples."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, COMMANDS[name].line) for name in names])
        with formatter.section("Examples"):
            formatter.write_dl(list(EXAMPLES))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)
