"""Asks the host's half: one script by stdin, one JSON document back, one round trip a call."""

from __future__ import annotations

import base64
import functools
import json
import zlib
from typing import Any

from .. import host as host_side
from ..errors import DdtreeError, Failed, Locked, NeedsHand, Unreachable, UsageError
from .transport import Result, Transport, printable

# kinds of ddtree_host.py
KINDS: dict[str, type[DdtreeError]] = {
    "usage": UsageError,
    "moved": Failed,
    "locked": Locked,
    "disk-full": Failed,
    "refused": Failed,
    "failed": Failed,
    "stuck": NeedsHand,
    "cut": Unreachable,  # the link held, and yet nothing came: a sender that slept
}


class Agent:
    """``ddtree_host.py`` on one host, for one service. Nothing needs to be installed there but python3."""

    def __init__(
        self,
        transport: Transport,
        root: str,
        service: str,
        supervisor: str,
        unit_dir: str = "/etc/systemd/system",
        source: str | None = None,
    ) -> None:
        """``root`` is the host's directory (/opt/ddtree), ``source`` another script than the package's own."""
        self.transport = transport
        self.source = host_side.source() if source is None else source
        self.root, self.service, self.supervisor, self.unit_dir = root, service, supervisor, unit_dir

    @property
    def elevates(self) -> bool:
        """Whether root's verbs run as root. A host with plain processes may be all its user's own."""
        return self.supervisor == "systemd" or self.transport.may_root

    def bootstrap(self) -> None:
        """Installs or refreshes ``<root>/bin/ddtree-host``, its directories, and under systemd its user and unit."""
        self.call("bootstrap", source_b64=base64.b64encode(self.source.encode()).decode())

    def call(self, verb: str, *, as_root: bool = True, timeout: float = 60, **fields: Any) -> dict[str, Any]:
        """The reply without its ``ok``. Raises by the host's error kind (`KINDS`), Failed when it is no reply."""
        request = {
            "verb": verb,
            "root": self.root,
            "service": self.service,
            "supervisor": self.supervisor,
            "unit_dir": self.unit_dir,
            **fields,
        }
        script = (
            f"import base64, zlib\nunpacked = lambda text: zlib.decompress(base64.b64decode(text)).decode()\n"
            f"exec(compile(unpacked('{self._packed_source}'), 'ddtree-host', 'exec'))\n"
            f"raise SystemExit(main_request(unpacked('{packed(json.dumps(request))}')))\n"
        )
        result = self.transport.run(
            ["python3", "-I", "-"], stdin=script.encode(), timeout=timeout, root=as_root and self.elevates
        )
        return self.reply(verb, result)

    @functools.cached_property
    def _packed_source(self) -> str:
        return packed(self.source)

    def reply(self, verb: str, result: Result) -> dict[str, Any]:
        """What a command of the host's half answered; raises as `call` does."""
        where = f"{self.transport.name}: {verb}"
        if result.code == 127:
            raise Unreachable(
                f"{self.transport.name}: no python3 there", hint="install it: python3 >= 3.9, nothing else"
            )
        try:
            reply = json.loads(result.stdout)
        except ValueError:
            reply = None
        if result.code == 0 and isinstance(reply, dict):
            error = reply.get("error")
            if reply.pop("ok", None) is True:
                return reply
            if isinstance(error, dict):
                message, hint = (printable(str(error.get(key, "")).encode(), 8000) for key in ("message", "hint"))
                raise KINDS.get(str(error.get("kind")), Failed)(f"{where}: {message}", hint=hint)
        said = printable(result.stderr) or printable(result.stdout) or "nothing"
        raise Failed(f"{where}: no answer (status {result.code})", hint=f"it said: {said}")


def packed(text: str) -> str:
    """The text compressed, in a form that needs no escaping: the script travels with every call."""
    return base64.b64encode(zlib.compress(text.encode())).decode()
