"""Which keys a host may show, without paramiko: the rule of `hostkeys`, for what is asked before that is imported."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from pathlib import Path

from .transport import Endpoint


def known_name(host: Endpoint) -> str:
    """The host's name in a known_hosts file, as ssh(1) writes it."""
    return host.address if host.port == 22 else f"[{host.address}]:{host.port}"


def allowed_keys(host: Endpoint) -> list[str] | None:
    """``TYPE BASE64`` of each key that the inventory allows this host to show; [] when it names none.

    None for what `hostkeys.add_expected` refuses, and for what is not plainly readable here: that one then says why.
    """
    if host.host_key:
        key = _key(host.host_key.split())
        return None if key is None else [key]
    if not host.known_hosts:
        return []
    try:
        lines = Path(host.known_hosts).expanduser().read_text().splitlines()
    except (OSError, ValueError, RuntimeError):
        return None
    if any(line.lstrip().startswith("@") for line in lines):
        return None
    name, keys = known_name(host), []
    for line in lines:
        fields = line.split()
        # paramiko takes names literally: no patterns
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        if any(_is(name, word) for word in fields[0].split(",")) and (key := _key(fields[1:])) is not None:
            keys.append(key)
    return keys


def _is(name: str, word: str) -> bool:
    """Whether a word of a line's first field, plain or hashed (``|1|SALT|HASH``), is exactly this name."""
    if not word.startswith("|1|"):
        return word == name
    try:
        _, _, salt, told = word.split("|")
        made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(made, base64.b64decode(told))
    except (ValueError, binascii.Error):
        return False


def _key(words: list[str]) -> str | None:
    """Type and key of an OpenSSH public key line; None for what is none. The blob repeats the type (RFC 4253, 6.6)."""
    if len(words) < 2:
        return None
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (ValueError, binascii.Error):
        return None
    length = int.from_bytes(blob[:4], "big")
    if blob[4 : 4 + length] != words[0].encode() or len(blob) <= 4 + length:
        return None
    return f"{words[0]} {words[1]}"
