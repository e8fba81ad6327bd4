"""`python -m ddtree_ops.engine`: load, serve, end cleanly.

Exit codes: 0 after SIGTERM or SIGINT; 1 when the models cannot be loaded, the port is taken, or the step loop
failed; 2 for wrong arguments.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from .arguments import ArgumentError, Arguments, parse_arguments
from .config import ConfigError

log = logging.getLogger("ddtree_ops.engine")


def main(argv: list[str] | None = None) -> int:
    """Run the engine until it is told to stop; returns the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    try:
        return _serve(arguments)
    except ArgumentError as error:
        log.error("%s", error)
        return 2
    except ConfigError as error:
        log.error("%s", error)
        return 1


def _leave(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _serve(a: Arguments) -> int:
    try:
        api_key = _read_key(a.api_key_file) if a.api_key_file else None
        # Bound before the load so that a taken port fails at once; it listens only when there is something to serve.
        listener = _bind(a.host, a.port)
    except OSError as error:
        log.error("%s: %s", a.api_key_file or f"{a.host}:{a.port}", error.strerror or error)
        return 1

    # Only now, with the arguments known to be sound, the second that torch takes.
    import torch

    from .faults import FAULTS
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
    tokenizer = load_tokenizer(a, resolved.model.vocab_size)
    decoder = build_decoder(a, resolved)
    if a.fault is not None:
        log.warning("FAULT PLANTED: %s (%s). Output is meant to be wrong.", a.fault, FAULTS[a.fault])
    if a.host not in ("127.0.0.1", "::1", "localhost") and api_key is None:
        log.warning("%s is reachable from elsewhere and no --api-key-file is given", a.host)
    metrics = Metrics(a.served_model_name or str(a.model_path), resolved.draft.block_size - 1 if resolved.draft else 0)
    server = Server()
    scheduler = Scheduler(decoder, resolved.width, a.max_running_requests, metrics, server.crashed)
    port = listener.getsockname()[1]
    service = Service(a, resolved, decoder, scheduler, metrics, tokenizer, port, api_key)
    log.info("%s, W = %d, %s", a.speculative_algorithm or "no speculation", resolved.width, a.dtype)
    return server.serve_until_stopped(create_app(service), scheduler, listener)


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
    code = main()
    logging.shutdown()
    # The step loop's thread may be inside a long matrix product; the interpreter's own exit would wait or crash on it.
    os._exit(code)
