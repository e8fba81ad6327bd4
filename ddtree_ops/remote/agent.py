"""Asks the host's half: one script by stdin, one JSON document back, one round trip a call.

A question that changes nothing is first put without the host's half, to what the host keeps of it compiled: a
hundredth of the bytes and nothing to compile. A host that keeps none, or another one, says so and is sent it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
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

#: How a request begins: the interpreter, which reads what it is to do. Without ``site``, as nothing but the standard
#: library is wanted.
ARGV = ("python3", "-I", "-S", "-")
TIMEOUT_S = 60.0
#: Verbs that change nothing on the host: `Transport.ask` may carry them.
QUESTIONS = frozenset({"probe", "status", "history", "generation", "logs", "collect", "releases"})
# What `keep_compiled` (host/agent/verbs.py) wrote, and only root or ourselves could write. A question is soon over: no
# garbage is looked for, and the interpreter is not taken apart at its end.
BRIEF = """\
import gc
gc.disable()
import hashlib, marshal, os, stat, sys
def kept(path, wanted):
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            told = os.fstat(file.fileno())
            if not stat.S_ISREG(told.st_mode) or told.st_uid not in (0, os.geteuid()) or told.st_mode & 0o022:
                return None
            head, data = file.readline(200), file.read(16 << 20)
    except OSError:
        return None
    right = "%s %x %s\\n" % (wanted, sys.hexversion, hashlib.sha256(data).hexdigest())
    return marshal.loads(data) if head == right.encode() else None
code = kept({path!r} + sys.implementation.cache_tag, {sha256!r})
if code is None:
    print({absent!r})
    raise SystemExit(0)
exec(code)
status = main_request({request!r})
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
ABSENT = "ddtree-host is not kept here"


def elevates(supervisor: str, may_root: bool) -> bool:
    """Whether root's verbs run as root. A host with plain processes may be all its user's own."""
    return supervisor == "systemd" or may_root


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
        self._source = source
        #: Whether the host keeps this very agent compiled; None while nothing was asked.
        self.kept: bool | None = None
        self.root, self.service, self.supervisor, self.unit_dir = root, service, supervisor, unit_dir

    @property
    def source(self) -> str:
        """The host's half, whole."""
        return host_side.source() if self._source is None else self._source

    @source.setter
    def source(self, text: str) -> None:
        self._source = text
        self.__dict__.pop("_packed_source", None)

    @property
    def elevates(self) -> bool:
        return elevates(self.supervisor, self.transport.may_root)

    def bootstrap(self) -> None:
        """Installs or refreshes ``<root>/bin/ddtree-host``, its directories, and under systemd its user and unit."""
        self.call("bootstrap", source_b64=base64.b64encode(self.source.encode()).decode())

    def call(self, verb: str, *, as_root: bool = True, timeout: float = TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """The reply without its ``ok``. Raises by the host's error kind (`KINDS`), Failed when it is no reply."""
        request = {
            "verb": verb,
            "root": self.root,
            "service": self.service,
            "supervisor": self.supervisor,
            "unit_dir": self.unit_dir,
            **fields,
        }
        text = json.dumps(request)
        last = f"raise SystemExit(main_request({text!r}))\n"
        root = as_root and self.elevates
        if verb not in QUESTIONS:
            return self.reply(verb, self.transport.run(ARGV, stdin=self._whole(last), timeout=timeout, root=root))
        brief = BRIEF.format(path=f"{self.root}/bin/ddtree-host.", sha256=self._sha256, absent=ABSENT, request=text)
        result = self.transport.ask(ARGV, stdin=brief.encode(), timeout=timeout, root=root)
        self.kept = result.stdout.strip() != ABSENT.encode()
        if not self.kept:
            result = self.transport.ask(ARGV, stdin=self._whole(last), timeout=timeout, root=root)
        return self.reply(verb, result)

    def _whole(self, last: str) -> bytes:
        """A script that brings the host's half with it."""
        return (
            f"import base64, zlib\n"
            f"exec(compile(zlib.decompress(base64.b64decode('{self._packed_source}')), 'ddtree-host', 'exec'))\n{last}"
        ).encode()

    @property
    def _sha256(self) -> str:
        if self._source is None:
            return host_side.sha256()
        return hashlib.sha256(self.source.encode()).hexdigest()

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
