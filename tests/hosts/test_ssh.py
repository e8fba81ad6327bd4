"""The ssh transport against a real sshd."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ddtree_ops.errors import Failed, Unreachable
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.transport import Transport, connect

from ..unit.remote.endpoint import Entry
from ..unit.remote.test_agent import SCRIPT
from ..unit.remote.test_hostkeys import ONE
from .harness import TestHost

MEGABYTES = 50
ECHO_ARGV = "import json, sys; print(json.dumps(sys.argv[1:]))"
SERVER = """
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        time.sleep(0.2)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8123), Handler).serve_forever()
"""


def entry(host: TestHost, **changes: object) -> Entry:
    given = {
        "name": host.name,
        "transport": "ssh",
        "address": host.address,
        "host_key": host.hostkey,
        "identity_file": str(host.identity_file),
        **changes,
    }
    return Entry(**given)  # type: ignore[arg-type]


@pytest.fixture(params=["root", "deploy"])
def ssh(request: pytest.FixtureRequest, testhost: TestHost) -> Iterator[Transport]:
    with connect(entry(testhost, user=request.param, sudo=request.param == "deploy")) as transport:
        yield transport


def test_root_and_the_user_itself(ssh: Transport, testhost: TestHost) -> None:
    user = ssh.run(["id", "-un"]).stdout.decode().strip()
    assert user in ("root", "deploy")
    assert ssh.run(["id", "-u"], root=True) == (0, b"0\n", b"")
    assert ssh.run(["sh", "-c", "echo out; echo err >&2; exit 7"], root=True) == (7, b"out\n", b"err\n")


def test_arguments_arrive_as_they_are(ssh: Transport) -> None:
    words = [
        "",
        " ",
        "a b",
        "'",
        '"',
        "\\",
        "$HOME",
        "`id`",
        "*",
        ";",
        "\n",
        "-n",
        "ü🌳",
        "!x",
        "#",
        "~",
        "%s",
        "\x01\x7f",
    ]
    assert json.loads(ssh.run(["python3", "-c", ECHO_ARGV, *words], root=True).stdout) == words


def test_statuses_of_what_does_not_run(ssh: Transport) -> None:
    assert ssh.run(["/no/such"], root=True).code in (1, 127)  # sudo says 1, and so it says what
    assert ssh.run(["/no/such"]).code == 127
    assert ssh.run(["sh", "-c", "kill -9 $$"]).code == 255
    assert ssh.popen(["sh", "-c", "kill -9 $$"]).wait(5) == 255


def test_streams_of_50_mb_both_ways_at_once(ssh: Transport) -> None:
    block = os.urandom(1 << 20)
    result = ssh.run(["sh", "-c", "cat; echo done >&2"], stdin=(block for _ in range(MEGABYTES)), timeout=120)
    assert result.stderr == b"done\n"
    assert result.stdout == block * MEGABYTES


def test_a_command_that_reads_only_the_start_of_its_input_is_no_error(ssh: Transport) -> None:
    assert ssh.run(["head", "-c", "3"], stdin=(b"x" * 65536 for _ in range(200))) == (0, b"xxx", b"")


def test_a_timeout_ends_the_command_on_the_host(ssh: Transport, testhost: TestHost) -> None:
    with pytest.raises(Failed, match="did not end within 1 s"):
        ssh.run(["sleep", "4711"], timeout=1, root=True)
    assert ssh.run(["true"]).code == 0
    for _ in range(80):
        if testhost.run(["pgrep", "-f", "^sleep 4711"]).returncode:
            return
        time.sleep(0.1)
    pytest.fail("sleep still runs on the host")


def test_output_beyond_the_limit_ends_the_command(ssh: Transport) -> None:
    with pytest.raises(Failed, match="more than 100000 bytes"):
        ssh.run(["yes"], limit=100_000)
    assert ssh.run(["true"]).code == 0


def test_popen_talks_line_by_line(ssh: Transport) -> None:
    process = ssh.popen(["sh", "-c", 'while read -r word; do echo "got $word"; done; echo end >&2; exit 3'], root=True)
    lines = process.lines()
    process.write(b"one\n")
    assert next(lines) == b"got one"
    process.write(b"two\n")
    assert next(lines) == b"got two"
    process.close_stdin()
    assert list(lines) == []
    assert process.wait(5) == 3
    assert process.stderr() == b"end\n"


def test_many_commands_at_once_on_one_connection(ssh: Transport) -> None:
    with ThreadPoolExecutor(16) as pool:  # more than sshd's MaxSessions
        results = list(pool.map(lambda n: ssh.run(["echo", str(n)]).stdout, range(60)))
    assert results == [f"{n}\n".encode() for n in range(60)]


@pytest.mark.alone
def test_a_command_takes_milliseconds(testhost: TestHost) -> None:
    with connect(entry(testhost)) as transport:
        took = []
        for _ in range(15):
            start = time.monotonic()
            transport.run(["true"])
            took.append(time.monotonic() - start)
    assert sorted(took)[7] < 0.1, took  # Nagle and delayed ACK together cost 40 ms a round trip, and there are several


def test_the_agent_over_ssh(ssh: Transport) -> None:
    agent = Agent(ssh, "/opt/ddtree", "svc", "systemd", source=SCRIPT + "# filler\n" * 20_000)
    assert agent.call("echo", value="🌳")["request"]["value"] == "🌳"


def test_an_unknown_key_is_refused_with_the_line_to_add(testhost: TestHost, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="not known") as caught:
        connect(entry(testhost, host_key=None))
    line = caught.value.hint.splitlines()[-1].strip()
    assert line == f'host_key: "{testhost.hostkey}"'
    known = tmp_path / "known_hosts"
    known.write_text(f"another {ONE}\n")
    with pytest.raises(Unreachable, match="not known") as caught:
        connect(entry(testhost, host_key=None, known_hosts=str(known)))
    assert known.read_text() == f"another {ONE}\n"
    # The line it prints is all it takes.
    known.write_text(caught.value.hint.splitlines()[-1].strip() + "\n")
    connect(entry(testhost, host_key=None, known_hosts=str(known))).close()


def test_a_changed_key_is_refused_with_both_fingerprints(testhost: TestHost, tmp_path: Path) -> None:
    shown = testhost.sh("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    known = tmp_path / "known_hosts"
    known.write_text(f"{testhost.address} {ONE}\n")
    for wrong in (entry(testhost, host_key=ONE), entry(testhost, host_key=None, known_hosts=str(known))):
        with pytest.raises(Unreachable, match="HAS CHANGED") as caught:
            connect(wrong)
        assert shown in caught.value.message
        assert caught.value.message.count("SHA256:") == 2
        assert testhost.hostkey in caught.value.hint


def test_the_harness_known_hosts_passes(testhost: TestHost) -> None:
    connect(entry(testhost, host_key=None, known_hosts=str(testhost.known_hosts))).close()


def test_nothing_of_home_is_read(testhost: TestHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(
        "Host *\n  User nobody\n  Port 1\n  HostName 127.0.0.1\n  ProxyCommand false\n"
    )
    (tmp_path / ".ssh/known_hosts").write_text(f"{testhost.address} {testhost.hostkey}\n")
    (tmp_path / ".fabric.yaml").write_text("user: nobody\nport: 1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with connect(entry(testhost)) as transport:
        assert transport.run(["whoami"]).stdout == b"root\n"
    with pytest.raises(Unreachable, match="not known"):
        connect(entry(testhost, host_key=None))


@pytest.mark.parametrize("user", ["asks", "plain"])
def test_sudo_that_wants_a_password_is_refused_clearly(testhost: TestHost, user: str) -> None:
    with connect(entry(testhost, user=user, sudo=True)) as transport:
        assert transport.run(["id", "-un"]).stdout.decode().strip() == user
        with pytest.raises(Unreachable, match=f"sudo wants a password for {user}"):
            transport.run(["true"], root=True)
        with pytest.raises(Unreachable, match=f"sudo wants a password for {user}"):
            Agent(transport, "/opt/ddtree", "svc", "systemd", source=SCRIPT).call("echo")


def test_root_without_sudo_in_the_inventory_is_refused(testhost: TestHost) -> None:
    with (
        connect(entry(testhost, user="deploy")) as transport,
        pytest.raises(Unreachable, match="deploy is not root") as caught,
    ):
        transport.run(["true"], root=True)
    assert "sudo: true" in caught.value.hint


def test_refusals_before_a_connection(testhost: TestHost, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no connection to root@.*:1: Connection refused"):
        connect(entry(testhost, port=1))
    with pytest.raises(Unreachable, match="does not accept"):
        connect(entry(testhost, user="nobody-here"))
    with pytest.raises(Unreachable, match="cannot be read"):
        connect(entry(testhost, identity_file=str(tmp_path / "none")))
    with pytest.raises(Unreachable, match="no connection"):
        connect(entry(testhost, address="no-such-host.invalid"))


def test_a_server_that_never_speaks_is_given_up(tmp_path: Path, testhost: TestHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        with pytest.raises(Unreachable, match="no ssh with"):
            connect(entry(testhost, address="127.0.0.1", port=mute.getsockname()[1]))
        assert time.monotonic() - start < 15


@pytest.mark.parametrize("command", ["sleep 60", "cat", "while :; do echo tick; sleep 0.1; done"])
def test_a_cut_link_is_noticed_within_12_seconds(testhost: TestHost, command: str) -> None:
    with connect(entry(testhost)) as transport:
        threading.Timer(0.5, testhost.cut).start()
        stdin: bytes | Iterator[bytes] = (b"x" * 65536 for _ in iter(int, 1)) if command == "cat" else b""
        start = time.monotonic()
        try:
            with pytest.raises(Unreachable, match="is lost"):
                transport.run(["sh", "-c", command], stdin=stdin, timeout=None, limit=1 << 40)
            assert time.monotonic() - start < 13
            with pytest.raises(Unreachable, match="is lost"):
                transport.run(["true"])
        finally:
            testhost.uncut()
    connect(entry(testhost)).close()


def test_lines_of_a_process_end_with_unreachable_when_the_link_is_cut(testhost: TestHost) -> None:
    with connect(entry(testhost)) as transport:
        process = transport.popen(["sh", "-c", "echo one; sleep 60"])
        lines = process.lines()
        assert next(lines) == b"one"
        testhost.cut()
        try:
            with pytest.raises(Unreachable, match="is lost"):
                next(lines)
            with pytest.raises(Unreachable, match="is lost"):
                process.wait(5)
        finally:
            testhost.uncut()


@pytest.fixture
def server(testhost: TestHost) -> Iterator[TestHost]:
    testhost.put("/srv/server.py", SERVER.encode())
    testhost.sh("systemd-run --quiet --unit=echo-server --collect python3 /srv/server.py")
    testhost.sh("for _ in $(seq 100); do ss -ltn | grep -q :8123 && exit 0; sleep 0.05; done; exit 1")
    yield testhost
    testhost.sh("systemctl stop echo-server")


@pytest.mark.alone
def test_forward_carries_16_requests_at_once(ssh: Transport, server: TestHost) -> None:
    bodies = [os.urandom(200_000) for _ in range(16)]
    with ssh.forward(8123) as url, httpx.Client(base_url=url) as client, ThreadPoolExecutor(16) as pool:
        start = time.monotonic()
        answers = list(pool.map(lambda body: client.post("/", content=body).content, bodies))
        assert time.monotonic() - start < 3  # one after the other would be 3.2 s of sleep alone
        assert answers == bodies
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_forward_to_a_port_nobody_listens_on_closes_the_connection(ssh: Transport) -> None:
    with ssh.forward(9) as url, pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        httpx.get(url)


def test_forward_ends_with_requests_open_and_leaves_no_thread(ssh: Transport, server: TestHost) -> None:
    before = threading.active_count()
    with ssh.forward(8123) as url:
        open_connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        open_connection.sendall(b"POST / HTTP/1.1\r\n")
        time.sleep(0.2)
    open_connection.settimeout(5)
    assert open_connection.recv(1) == b""
    open_connection.close()
    for _ in range(50):
        if threading.active_count() <= before:
            return
        time.sleep(0.1)
    pytest.fail(f"threads left: {threading.enumerate()}")


def test_forward_over_a_cut_link_ends_the_request(testhost: TestHost, server: TestHost) -> None:
    with connect(entry(testhost)) as transport, transport.forward(8123) as url:
        assert httpx.post(url, content=b"x").content == b"x"
        testhost.cut()
        try:
            with pytest.raises(httpx.HTTPError):
                httpx.post(url, content=b"x", timeout=20)
        finally:
            testhost.uncut()


def test_the_interpreter_ends_without_a_close(testhost: TestHost) -> None:

    program = (
        "from ddtree_ops.remote.transport import connect\n"
        "from tests.unit.remote.endpoint import Entry\n"
        f"t = connect({entry(testhost)!r})\n"
        "print(t.run(['echo', 'hi']).stdout)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"b'hi\\n'\n", b"")
