"""``ddtree`` whose host half halts where it is told: the rows stop the applier at one exact moment and no other.

Only the text that goes to the host differs from the real one, by the hooks at its end. /run/ddtree-halt on the host
names a moment: "STEP EVENT" (that line of the journal was just written) or "write NAME #N" (the N-th time that a file
of that name is about to be written). The applier stops itself there (SIGSTOP) and leaves /run/ddtree-halted. With
/run/ddtree-writes there, every write is listed in it.
"""

from __future__ import annotations

import hashlib
import signal
from typing import Any

from ddtree_ops import host

HOOKS = """
def _halting() -> None:
    halt, seen = Path("/run/ddtree-halt"), {}
    listed = Path("/run/ddtree-writes")
    append, write = Journal.append, globals()["write_file"]

    def at(moment):
        if (read_bytes(halt) or b"").decode().strip() == moment:
            halt.rename("/run/ddtree-halted")
            os.kill(os.getpid(), signal.SIGSTOP)

    def about_to_write(path):
        seen[path.name] = seen.get(path.name, 0) + 1
        label = f"write {path.name} #{seen[path.name]}"
        if listed.exists():
            with listed.open("a") as file:
                file.write(label + "\\\\n")
        at(label)

    def appended(journal, entry):
        about_to_write(journal.path)
        append(journal, entry)
        at(f"{entry.get('step')} {entry.get('event')}")

    def written(path, *more, **named):
        about_to_write(path)
        write(path, *more, **named)

    Journal.append = appended
    globals()["write_file"] = written


if sys.argv[1:2] == ["run"]:
    _halting()

""".replace("\\\\n", "\\n")
LAST = '\nif __name__ == "__main__" and sys.argv[0] != "-":\n'
_real = host.source


def halting_source() -> str:
    """The host's half with the hooks before its last lines."""
    head, found, tail = _real().rpartition(LAST)
    assert found, "the host's half no longer ends as it did"
    return head + HOOKS + found + tail


def use_halting_host() -> None:
    """From now on this process ships the host's half with the hooks."""
    changed: Any = host
    changed.source = halting_source
    changed.sha256 = lambda: hashlib.sha256(halting_source().encode()).hexdigest()


if __name__ == "__main__":
    from ddtree_ops.cli import main

    use_halting_host()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    main()
