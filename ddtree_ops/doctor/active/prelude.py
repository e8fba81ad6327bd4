"""How an active script begins and ends. It runs in a release's Python on a host, as a file of its own.

A script defines ``main(request) -> answer``; an answer has ``ok`` and, when that is False, ``seen`` and ``expected``.
Whatever a script prints besides is ignored: its answer is the line that begins with ``DDTREE-ACTIVE``.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MARK = "DDTREE-ACTIVE "


def run(main: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the request of the command line; an exception is an answer too."""
    began = time.monotonic()
    try:
        answer = main(json.loads(sys.argv[1]))
    except Exception as error:  # whatever torch, a kernel or a driver raises is what we were sent to see
        last = traceback.format_exc().strip().splitlines()[-12:]
        answer = {"ok": False, "seen": f"{type(error).__name__}: {error}"[:1500], "expected": "no error", "trace": last}
    answer["seconds"] = round(time.monotonic() - began, 2)
    print(MARK + json.dumps(answer), flush=True)


def wrong(seen: str, expected: str, **figures: Any) -> dict[str, Any]:
    """An answer that is a finding."""
    return {"ok": False, "seen": seen, "expected": expected, **figures}
