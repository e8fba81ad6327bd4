"""Inside a tree's Python: SGLang's own way to have a configuration without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .bases import here


@contextmanager
def configured(*, alone: bool = True, **arguments: Any) -> Iterator[Any]:
    """As if a server had been started with these arguments, on one rank; not ``alone``: on the ranks that there are."""
    from sglang.srt.runtime_context import get_context, get_parallel

    one = here().alone()
    with (
        get_context().override_server_args(**arguments) as server_args,
        get_parallel().override(**one if alone else {}),
    ):
        yield server_args
