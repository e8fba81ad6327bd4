"""The commit message of a snapshot: what changed, in the operator's words. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_SUBJECT = 100
MAX_VALUE = 40

_ARGUMENTS = {
    "speculative_algorithm": "algorithm",
    "speculative_ddtree_budget": "budget",
    "speculative_ddtree_topk": "topk",
}


def message(old: Mapping[str, str], new: Mapping[str, str], host: str, service: str) -> str:
    """Subject ``<host>: <service> budget 16 -> 8, release ab12 -> cd34`` and, where it gets long, the rest as a body.

    ``old``: the files of the last snapshot (``stored``), empty for a first one; ``new``: those of ``files``.
    """
    before, after = _Facts(old), _Facts(new)
    parts = list(_changes(before, after)) if old else ["first snapshot", *_state(after)]
    subject = f"{host}: {service} "
    shown: list[str] = []
    for part in parts:
        if shown and len(subject + ", ".join([*shown, part])) > MAX_SUBJECT:
            break
        shown.append(part)
    rest = parts[len(shown) :]
    head = subject + (", ".join(shown) or "no change")
    return head + "".join(f"\n\n{part}" if i == 0 else f"\n{part}" for i, part in enumerate(rest)) + "\n"


class _Facts:
    """One side's files by their name below the service's directory, and what the message asks of them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.texts = {path.split("/", 3)[-1]: text for path, text in files.items()}
        self.arguments = self._json("server-args.json")
        generation = self._json("generation.json")
        meta = generation.get("meta") if isinstance(generation.get("meta"), dict) else {}
        self.meta: dict[str, Any] = {**generation, **(meta or {})}
        self.release = self._json("release.json").get("id") or self.meta.get("release") or self.meta.get("release_id")
        self.hardware = self._json("hardware.json")
        self.verdict = self._json("verdict.json").get("kind")

    def _json(self, name: str) -> dict[str, Any]:
        """What another hand edited may be no JSON any more: then nothing is known of it."""
        try:
            value = json.loads(self.texts.get(name, "{}"))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def argument(self, key: str) -> Any:
        if key in self.arguments:
            return self.arguments[key]
        profile = self.meta.get("profile")
        return profile.get(_ARGUMENTS[key]) if isinstance(profile, dict) else None


def _state(facts: _Facts) -> Iterator[str]:
    for key, word in _ARGUMENTS.items():
        value = facts.argument(key)
        if value is not None:
            yield f"{word} {_value(value)}"
    if facts.release:
        yield f"release {_value(facts.release)[:8]}"
    if facts.verdict:
        yield f"verdict {_value(facts.verdict)}"


def _changes(old: _Facts, new: _Facts) -> Iterator[str]:
    for key, word in _ARGUMENTS.items():
        yield from _change(word, old.argument(key), new.argument(key))
    if old.release != new.release:
        yield "release {} -> {}".format(*_abbreviated(_value(old.release), _value(new.release)))
    yield from _change("verdict", old.verdict, new.verdict)
    yield from _change("driver", old.hardware.get("driver"), new.hardware.get("driver"))
    if old.hardware.get("gpus") != new.hardware.get("gpus"):
        yield "gpus changed"
    yield from _change("generation", old.meta.get("n"), new.meta.get("n"))
    told = set(_ARGUMENTS)
    for key in sorted((set(old.arguments) | set(new.arguments)) - told):
        yield from _change(key, old.arguments.get(key), new.arguments.get(key))
    for name in sorted(set(old.texts) | set(new.texts)):
        if name.endswith(".json") and name not in ("generation.json", "process.json"):
            continue
        if name == "generation.json" and old.meta.get("n") != new.meta.get("n"):
            continue
        if old.texts.get(name) != new.texts.get(name):
            word = "added" if name not in old.texts else "removed" if name not in new.texts else "changed"
            yield f"{name} {word}"


def _change(word: str, old: Any, new: Any) -> Iterator[str]:
    if old != new:
        yield f"{word} {_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    shown = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    shown = " ".join("".join(c if c.isprintable() else " " for c in shown).split()) or '""'
    return shown if len(shown) <= MAX_VALUE else shown[: MAX_VALUE - 1] + "…"


def _abbreviated(old: str, new: str) -> tuple[str, str]:
    """Both cut to the same number of characters, at least four, that still tells them apart."""
    length = next((n for n in range(4, max(len(old), len(new)) + 1) if old[:n] != new[:n]), 40)
    return old[:length], new[:length]
