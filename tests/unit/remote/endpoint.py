"""A host entry of an inventory, as far as a transport reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str = "here"
    transport: str = "local"
    address: str = "127.0.0.1"
    port: int = 22
    user: str = "root"
    sudo: bool = False
    host_key: str | None = None
    known_hosts: str | None = None
    identity_file: str | None = None
