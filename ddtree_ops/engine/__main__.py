"""`python -m ddtree_ops.engine`: load, serve, end cleanly.

Exit codes: 0 after SIGTERM or SIGINT (during the load it dies of them); 1 when the models cannot be loaded, the port is
taken, the step loop failed, or another rank is gone; 2 for wrong arguments.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import ArgumentError, Arguments, parse_address, parse_arguments
from .config import ConfigError
from .rendezvous import RankLostError, listen

if TYPE_CHECKING:
    from .group import Group
    from .loading import Resolved

log = logging.getLogger("ddtree_ops.engine")


def main(argv: list[str] | None = None) -> int:
    """Run the engine until it is told to stop; returns the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        return _serve(arguments)
    except ArgumentError as error:
        log.error("%s", error)
        return 2
    except (ConfigError, RankLostError) as error:
        log.error("%s", error)
        return 1


def _serve(a: Arguments) -> int:
    try:
        api_key = _read_key(a.api_key_file) if a.api_key_file else None
        # Bound before the load so that a taken port fails at once; it listens only when there is something to serve.
        listener = _bind(a.host, a.port)
    except OSError as error:
        log.error("%s: %s", a.api_key_file or f"{a.host}:{a.port}", error.strerror or error)
        return 1
    address = parse_address(a.dist_init_addr) if a.dist_init_addr else None
    try:
        meeting = listen(address) if address and a.node_rank == 0 else None
    except OSError as error:
        log.error("--dist-init-addr %s: %s", a.dist_init_addr, error.strerror or error)
        return 1

    # Only now, with the arguments known to be sound, the second that torch takes.
    import torch

    from .faults import FAULTS
    from .group import Group
    from .loading import build_decoder, resolve
    from .metrics import Metrics
    from .scheduler import Scheduler
    from .server import create_app
    from .service import Service, load_tokenizer
    from .serving import Server

    if a.num_threads is not None:
        torch.set_num_threads(a.num_threads)
    resolved = resolve(a)
    if resolved.num_draft_tokens is not None and resolved.width < resolved.num_draft_tokens:
        log.warning(
            "trees have %d nodes, not %d: no more paths exist", resolved.width - 1, resolved.num_draft_tokens - 1
        )
    group = None if address is None else Group(a.node_rank, a.nnodes)
    if group is not None and group.rank:
        return _follow(a, resolved, group, listener)
    tokenizer = load_tokenizer(a, resolved.model.vocab_size)
    decoder = build_decoder(a, resolved, group)
    if a.fault is not None:
        log.warning("FAULT PLANTED: %s (%s). Output is meant to be wrong.", a.fault, FAULTS[a.fault])
    if a.host not in ("127.0.0.1", "::1", "localhost") and api_key is None:
        log.warning("%s is reachable from elsewhere and no --api-key-file is given", a.host)
    if group is not None:
        _meet(a, resolved, group, meeting)
    metrics = Metrics(a.served_model_name or str(a.model_path), resolved.draft.block_size - 1 if resolved.draft else 0)
    server = Server()
    scheduler = Scheduler(decoder, resolved.width, a.max_running_requests, metrics, server.crashed)
    port = listener.getsockname()[1]
    service = Service(a, resolved, decoder, scheduler, metrics, tokenizer, port, api_key)
    log.info("%s, W = %d, %s", a.speculative_algorithm or "no speculation", resolved.width, a.dtype)
    return server.serve_until_stopped(create_app(service), scheduler, listener)


def _follow(a: Arguments, resolved: Resolved, group: Group, listener: socket.socket) -> int:
    from .loading import DTYPES, load_target
    from .ranks import Follower
    from .server import create_follower_app
    from .serving import Server

    _, trunk = load_target(a, resolved, group)
    _meet(a, resolved, group, None)
    server = Server()
    follower = Follower(trunk, group, resolved.model.hidden_size, DTYPES[a.dtype], server.crashed)
    return server.serve_until_stopped(create_follower_app(), follower, listener)


def _meet(a: Arguments, resolved: Resolved, group: Group, meeting: socket.socket | None) -> None:
    from .loading import identity

    log.info("rank %d of %d: waiting for the others at %s", group.rank, group.size, a.dist_init_addr)
    group.form(parse_address(a.dist_init_addr or ""), meeting)
    group.agree(identity(a, resolved))
    log.info("rank %d of %d: all are here", group.rank, group.size)


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return listener


def _read_key(path: Path) -> str:
    key = path.read_text("ascii", errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{path}: must hold one line of printable ASCII")
    return key


if __name__ == "__main__":
    # Until it serves, a signal ends it in the kernel: an exception out of a handler gets lost in torch's import, which
    # catches all, and out of its C++ it aborts the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = main()
    logging.shutdown()
    # The step loop's thread may be inside a long matrix product; the interpreter's own exit would wait or crash on it.
    os._exit(code)
