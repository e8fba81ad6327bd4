"""A new workspace from the packaged inventories."""

from __future__ import annotations

from pathlib import Path

from ddtree_ops.data import data_dir
from ddtree_ops.errors import UsageError
from ddtree_ops.model.workspace import INVENTORIES

_IGNORED = """\
# Keys and secrets do not belong in a workspace; these lines are the last guard, not the first.
*.pem
*.key
id_*
.env
*.part
"""


def init_workspace(directory: Path) -> list[Path]:
    """Write the default inventories and a .gitignore; the paths written, relative to ``directory``, in order.

    ``directory`` is made when it does not exist; a .gitignore that it has is left as it is. Raises UsageError, before
    anything is written, when an inventory is there already, and when the directory cannot be used.
    """
    source = data_dir("inventories")
    contents = {
        Path(INVENTORIES) / file.relative_to(source): file.read_bytes() for file in sorted(source.rglob("*.yaml"))
    }
    if not (directory / ".gitignore").exists():
        contents[Path(".gitignore")] = _IGNORED.encode()
    there = [path for path in contents if (directory / path).exists() or (directory / path).is_symlink()]
    if there:
        more = f" (and {len(there) - 1} more)" if len(there) > 1 else ""
        raise UsageError(f"{directory / there[0]} exists already{more}; nothing was written", hint="choose another DIR")
    try:
        for path, data in contents.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as stream:
                stream.write(data)
    except OSError as error:
        raise UsageError(f"{directory}: cannot make a workspace there: {error.strerror}") from error
    return list(contents)
