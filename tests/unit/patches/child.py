"""The Python of one tree: reads [module, function, arguments] a line, answers {"returned"} or {"raised"} a line."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings

from .absent import absent_packages


def main() -> None:
    # What SGLang prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    # Before there is something that looks like triton to it.
    importlib.import_module("torch._inductor.compile_fx")
    with absent_packages():
        for line in sys.stdin:
            module, name, arguments = json.loads(line)
            try:
                function = getattr(importlib.import_module(module), name)
                answer = {"returned": function(*arguments)}
            except Exception as error:
                answer = {"raised": [type(error).__name__, str(error), traceback.format_exc()]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    # torch takes seconds to take itself down
    os._exit(0)


if __name__ == "__main__":
    main()
