"""``ddtree help``: the documents, at hand where the tool is."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli import complete
from ddtree_ops.cli.app import JsonOption, command
from ddtree_ops.cli.screen import Screen
from ddtree_ops.data import data_dir
from ddtree_ops.errors import UsageError


@command("help")
def help_(
    topic: Annotated[
        str | None, typer.Argument(help="A document; without it they are listed.", autocompletion=complete.topics)
    ] = None,
    json_: JsonOption = False,
) -> int:
    """Show a document: keys of the inventory, exit codes, operating, the gate, and more. Example: ddtree help operating

    Everything that the repository's docs/ holds, as Markdown; in a terminal it is laid out.
    """
    screen = Screen(json_=json_)
    documents = {path.stem: path for path in sorted(data_dir("docs").glob("*.md"))}
    if topic is None:
        titles = {
            name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in documents.items()
        }
        if screen.json:
            screen.document({"ok": True, "topics": titles})
        else:
            screen.table("", ["topic", "what it is"], [list(row) for row in titles.items()])
        return 0
    if topic not in documents:
        from ddtree_ops.model.check import nearest

        raise UsageError(f"no topic '{topic}'{nearest(topic, documents)}", hint=f"ddtree help: {', '.join(documents)}")
    text = documents[topic].read_text(encoding="utf-8")
    if screen.json:
        screen.document({"ok": True, "topic": topic, "markdown": text})
    else:
        screen.markdown(text)
    return 0
