"""What shipping does before a host installs: list, send, verify each blob's hash. argv: cache, manifest, host's name,
address, host key, identity file. Prints how much was sent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ddtree_ops.release import Cache, Release
from ddtree_ops.remote import openssh
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.ship import _Shipment, staging_of
from ddtree_ops.remote.transport import Transport, connect
from tests.unit.remote.endpoint import Entry


class Link:
    """What a deploy's session is for shipping."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.agent = Agent(connect(entry), "/opt/ddtree", "svc", "systemd")

    def reconnect(self) -> None:
        raise SystemExit("the link was lost")

    def beside(self) -> Transport:
        return connect(self.entry)

    def carrier(self) -> openssh.Carrier | None:
        return openssh.carrier(self.entry)


def main() -> None:
    cache, manifest, name, address, host_key, identity = sys.argv[1:]
    entry = Entry(name=name, transport="ssh", address=address, host_key=host_key, identity_file=identity)
    link, told = Link(entry), json.loads(Path(manifest).read_text())
    release = Release(told["id"], told, Cache(Path(cache)))
    shipment = _Shipment(link, release, lambda done, total: None, print, ())
    staging = staging_of(link.agent.transport)
    assert staging is not None
    offer = link.agent.call("missing", manifest=told, staging=staging, timeout=120)
    sizes = {file["sha256"]: file["size"] for file in told["files"]}
    wrong = shipment._upload(staging, {sha256: sizes[sha256] for sha256 in offer["missing"]}, offer)
    assert not wrong, wrong
    print(f"whole, {shipment._sent} bytes sent")


if __name__ == "__main__":
    main()
