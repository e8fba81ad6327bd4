"""Where the ranks of one service meet: rank 0's socket, and the interface by which each rank is reached."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class RankLostError(RuntimeError):
    """Another rank is gone, or does not answer in time: this service cannot go on."""


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket bound to (host, port), not to every address. Raises OSError."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
    return bound


def resolve_host(host: str) -> str:
    """The IPv4 address of a name. Raises OSError."""
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return str(found[0][4][0])


def choose_interface(address: tuple[str, int]) -> None:
    """Make gloo use the interface that routes to (IPv4 address, port), unless GLOO_SOCKET_IFNAME is set already.

    By itself gloo takes the address that this host's own name resolves to: often 127.0.1.1, or none. Raises OSError
    when there is no route, or no interface has the address that the route begins at.
    """
    if not os.environ.get(INTERFACE):
        os.environ[INTERFACE] = _interface_towards(address)


def _interface_towards(address: tuple[str, int]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting only asks the routing table.
        probe.connect(address)
        local = ipaddress.ip_address(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                # The interface has no IPv4 address.
                continue
            own = ipaddress.ip_address(packed[20:24])
            # All of 127.0.0.0/8 is the loopback's.
            if own == local or (own.is_loopback and local.is_loopback):
                return name
    raise OSError(f"no interface has the address {local} that the route to {address[0]} begins at; set {INTERFACE}")
