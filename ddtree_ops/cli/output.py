"""Files that an option names for a result: replaced in one step, and never what is not an ordinary file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ddtree_ops.errors import Failed, UsageError


def refuse_unwritable(path: Path | None, option: str) -> None:
    """Raises UsageError for what cannot become a file, before any host is asked.

    A link or a device is refused: root would replace /dev/stdout itself, or write where somebody's link points.
    """
    if path is None:
        return
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise UsageError(f"{option} {path}: not an ordinary file", hint="name a file, not a link, device or directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        why = "may not be written to" if path.parent.is_dir() else "is no directory"
        raise UsageError(f"{option} {path}: {path.parent} {why}")


def write_whole(path: Path, text: str, option: str) -> None:
    """Replace the file in one step: whoever reads it meanwhile, or writes it too, never sees half of one.

    Raises UsageError as `refuse_unwritable`, Failed when the disk does not take it.
    """
    refuse_unwritable(path, option)
    part = "."
    try:
        # A name that nobody can foresee: a link planted under it would be followed.
        handle, part = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), 0o644)
        Path(part).replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(part).unlink()
        raise Failed(f"{option} {path}: {error.strerror}") from error
