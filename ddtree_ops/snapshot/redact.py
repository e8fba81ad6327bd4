"""Keeps secrets out of what is committed, by the name of a key and by the look of a value. Pure.

The host redacts before it answers; this is the second net, for a host whose half is older or was tampered with.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "<redacted>"
MIN_SECRET = 6

_SECRET_WORDS = frozenset(
    {
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "secrets",
        "token",
        "apikey",
        "bearer",
        "auth",
        "authorization",
    }
    | {"credential", "credentials", "cookie"}
)
_KEY_OWNERS = frozenset({"api", "access", "private", "secret", "signing", "encryption", "admin", "ssh", "hmac"})
_REFERENCES = frozenset({"file", "path", "dir", "env"})
_CREDENTIAL_REFERENCES = ("loadcredential", "loadcredentialencrypted", "importcredential")

_TOKENS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{12,}|hf_[A-Za-z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_URL_PASSWORD = re.compile(r"(\w+://[^\s/:@\"']*:)([^\s/@\"']+)(@)")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+([A-Za-z0-9._~+/=-]{6,})")
_ASSIGNMENT = re.compile(
    r"(?P<key>[A-Za-z_][\w.-]*)(?P<sep>=)(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s\"']*)"
)
_FLAG = re.compile(
    r"--(?P<key>[a-z][\w-]*)(?P<sep>\"?\s+)(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s\"'-][^\s\"']*)"
)


def secret_key(key: str) -> bool:
    """Whether a value under this name is a secret: HF_TOKEN, api_key, adminApiKey; not max_tokens, ssl_key_file."""
    if key.lower() in _CREDENTIAL_REFERENCES:
        return False
    words = [w.lower() for w in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", key)]
    if not words or words[-1] in _REFERENCES:
        return False
    pairs = itertools.pairwise(words)
    return (
        bool(_SECRET_WORDS & set(words)) or words == ["key"] or any(b == "key" and a in _KEY_OWNERS for a, b in pairs)
    )


def text(value: str, secrets: Iterable[str] = ()) -> str:
    """``value`` (a unit, an environment file) with secrets replaced: assignments and flags by name, tokens by look.

    ``secrets``: values known from elsewhere, replaced wherever they stand.
    """
    clean = _PEM.sub(REDACTED, value)
    clean = "\n".join(_line(line) for line in clean.split("\n"))
    return by_value(clean, secrets)


def by_value(value: str, secrets: Iterable[str] = ()) -> str:
    """``value`` without the ``secrets`` and without anything that looks like a well-known kind of token."""
    for known in sorted(secrets, key=len, reverse=True):
        value = value.replace(known, REDACTED)
    value = _PEM.sub(REDACTED, value)
    value = _URL_PASSWORD.sub(rf"\1{REDACTED}\3", value)
    value = _BEARER.sub(rf"\1 {REDACTED}", value)
    return _TOKENS.sub(REDACTED, value)


def document(value: Any, secrets: Iterable[str] = ()) -> Any:
    """A JSON value with the strings under secret keys, and strings that look like secrets, replaced."""
    known = list(secrets)
    if isinstance(value, Mapping):
        return {str(k): _hidden(v) if secret_key(str(k)) else document(v, known) for k, v in value.items()}
    if isinstance(value, list | tuple):
        before = [None, *value]
        return [
            _hidden(item) if _secret_flag(flag) else document(item, known)
            for flag, item in zip(before, value, strict=False)
        ]
    return text(value, known) if isinstance(value, str) else value


def found_secrets(texts: Iterable[str], documents: Iterable[Any]) -> set[str]:
    """Every value that stands under a secret name somewhere, so that it can be removed everywhere else too."""
    found: set[str] = set()
    for value in texts:
        found |= _assigned_secrets(value)
    for value in documents:
        _gather(value, found)
    return {value for value in found if len(value) >= MIN_SECRET and value != REDACTED}


def _gather(value: Any, found: set[str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if secret_key(str(key)) and isinstance(item, str):
                found.add(item)
            else:
                _gather(item, found)
    elif isinstance(value, list | tuple):
        for flag, item in zip([None, *value], value, strict=False):
            if _secret_flag(flag) and isinstance(item, str):
                found.add(item)
            else:
                _gather(item, found)
    elif isinstance(value, str):
        found |= _assigned_secrets(value)


def _assigned_secrets(value: str) -> set[str]:
    matches = (m for line in value.split("\n") for m in [*_ASSIGNMENT.finditer(_inner(line)), *_FLAG.finditer(line)])
    return {match["value"].strip("\"'") for match in matches if secret_key(match["key"])}


def _secret_flag(item: Any) -> bool:
    """Whether the next word of a command line is a secret."""
    return isinstance(item, str) and item.startswith("--") and "=" not in item and secret_key(item)


def _hidden(value: Any) -> Any:
    """Strings and what contains them are hidden; a number, a flag or null under such a name is no secret."""
    return value if value is None or isinstance(value, bool | int | float) or value == "" else REDACTED


def _inner(line: str) -> str:
    """The part of ``Environment="A=b" "C=d"`` in which assignments stand without their outer quotes."""
    match = re.match(r"\s*(?:Environment|SetCredential)\s*=", line)
    return re.sub(r"(^|\s)[\"']", r"\1", line[match.end() :]) if match else line


def _line(line: str) -> str:
    directive, _, rest = line.partition("=")
    if directive.strip().lower() in ("setcredential", "setcredentialencrypted"):
        return f"{directive}={REDACTED}"
    if directive.strip() == "Environment":
        # One directive may set several variables, each quoted as a whole: "KEY=value with spaces".
        quoted = re.compile(r"(?P<q>[\"'])(?P<key>[A-Za-z_]\w*)=(?:\\.|(?!(?P=q)).)*(?P=q)")
        rest = quoted.sub(lambda m: f"{m['q']}{m['key']}={REDACTED}{m['q']}" if secret_key(m["key"]) else m[0], rest)
        return f"{directive}={_ASSIGNMENT.sub(_assigned, rest)}"
    if re.fullmatch(r"\s*[A-Za-z_]\w*\s*", directive) and secret_key(directive.strip()) and rest:
        return f"{directive}={REDACTED}"
    return _FLAG.sub(_flagged, _ASSIGNMENT.sub(_assigned, line))


def _assigned(match: re.Match[str]) -> str:
    return f"{match['key']}={REDACTED}" if secret_key(match["key"]) and match["value"] else match[0]


def _flagged(match: re.Match[str]) -> str:
    return f"--{match['key']}{match['sep']}{REDACTED}" if secret_key(match["key"]) else match[0]
