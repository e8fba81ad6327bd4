"""What a run says while it goes on."""

from __future__ import annotations

from typing import Protocol


class Ui(Protocol):
    """Where a run tells what it does. The CLI draws it; nothing here formats for a terminal."""

    def step(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def progress(self, label: str, done: int, total: int) -> None: ...
