"""The local transport: the semantics that every transport has."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.errors import Failed, Unreachable, UsageError
from ddtree_ops.remote.process import host_argv
from ddtree_ops.remote.transport import Transport, connect, printable

from .endpoint import Entry

ECHO_ARGV = "import json, sys; print(json.dumps(sys.argv[1:]))"
MEGABYTES = 20


@pytest.fixture
def here() -> Iterator[Transport]:
    with connect(Entry()) as transport:
        yield transport


def test_status_stdout_and_stderr_are_apart(here: Transport) -> None:
    result = here.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert result == (7, b"out\n", b"err\n")


def test_killed_by_a_signal_is_128_and_more(here: Transport) -> None:
    assert here.run(["sh", "-c", "kill -9 $$"]).code == 137


def test_a_command_that_is_not_there_is_127(here: Transport) -> None:
    result = here.run(["/no/such command"])
    assert result.code == 127
    assert b"/no/such command: No such file" in result.stderr


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4))
def test_arguments_arrive_as_they_are(words: list[str]) -> None:
    result = connect(Entry()).run([sys.executable, "-c", ECHO_ARGV, *words])
    assert json.loads(result.stdout) == words


@pytest.mark.parametrize("argv", [[], ["echo", "a\0b"]])
def test_impossible_arguments_are_refused(here: Transport, argv: list[str]) -> None:
    with pytest.raises(ValueError, match="argument vector"):
        here.run(argv)


def test_large_input_and_output_at_once_do_not_deadlock(here: Transport) -> None:
    block = os.urandom(1 << 20)
    result = here.run(["sh", "-c", "cat; echo done >&2"], stdin=(block for _ in range(MEGABYTES)))
    assert result.stdout == block * MEGABYTES
    assert result.stderr == b"done\n"


def test_a_command_that_reads_only_the_start_of_its_input_is_no_error(here: Transport) -> None:
    result = here.run(["head", "-c", "3"], stdin=(b"x" * 65536 for _ in range(1000)))
    assert result == (0, b"xxx", b"")


def test_an_error_of_the_source_of_the_input_is_raised_and_ends_the_command(here: Transport, tmp_path: Path) -> None:
    def source() -> Iterator[bytes]:
        yield b"start"
        raise RuntimeError("the file went away")

    with pytest.raises(RuntimeError, match="went away"):
        here.run(["sh", "-c", f"cat >/dev/null; touch {tmp_path}/complete"], stdin=source())
    assert not (tmp_path / "complete").exists()


@pytest.mark.alone
def test_a_timeout_kills_the_whole_group_and_says_what_was_said(here: Transport, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(Failed, match=r"did not end within 0\.5 s") as caught:
        here.run(["sh", "-c", f"echo working >&2; (sleep 2; touch {tmp_path}/late) & wait"], timeout=0.5)
    assert time.monotonic() - start < 2
    assert "working" in caught.value.hint
    time.sleep(2)
    assert not (tmp_path / "late").exists()


def test_output_beyond_the_limit_ends_the_command(here: Transport) -> None:
    with pytest.raises(Failed, match="more than 100000 bytes to stdout"):
        here.run(["yes"], limit=100_000)


def test_root_without_rights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    transport = connect(Entry())
    assert not transport.may_root
    with pytest.raises(Unreachable, match="needs root"):
        transport.run(["true"], root=True)


def test_popen_talks_line_by_line(here: Transport) -> None:
    process = here.popen(["sh", "-c", 'while read -r word; do echo "got $word"; done; echo end >&2; exit 3'])
    lines = process.lines()
    process.write(b"one\n")
    assert next(lines) == b"got one"
    process.write(b"two\n")
    assert next(lines) == b"got two"
    process.close_stdin()
    assert list(lines) == []
    assert process.wait(5) == 3
    assert process.stderr() == b"end\n"


def test_popen_drains_stderr_and_keeps_its_end(here: Transport) -> None:
    process = here.popen(["sh", "-c", "head -c 3000000 /dev/zero >&2; echo tail >&2; echo out"])
    assert list(process.lines()) == [b"out"]
    assert process.wait(5) == 0
    assert process.stderr().endswith(b"tail\n")
    assert len(process.stderr()) == 65536


def test_popen_wait_times_out_and_kill_ends_a_reader(here: Transport) -> None:
    process = here.popen(["sleep", "60"])
    with pytest.raises(TimeoutError):
        process.wait(0.1)
    threading.Timer(0.2, process.kill).start()
    assert list(process.lines()) == []
    assert process.wait(5) == 137
    process.kill()


def test_a_last_line_without_a_newline_is_a_line(here: Transport) -> None:
    assert list(here.popen(["printf", "a\\nb"]).lines()) == [b"a", b"b"]


def test_forward_is_the_port_itself(here: Transport) -> None:
    with here.forward(30000) as url:
        assert url == "http://127.0.0.1:30000"


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(UsageError, match=r"telnet.*ssh and local"):
        connect(Entry(transport="telnet"))


def test_host_argv_puts_the_time_limit_inside_sudo() -> None:
    assert host_argv(["a", "b"], sudo=True, timeout=60) == [
        "sudo",
        "-n",
        "--",
        "timeout",
        "--kill-after=2",
        "62",
        "a",
        "b",
    ]
    assert host_argv(["a"], sudo=False, timeout=None) == ["a"]


@given(st.binary(max_size=300))
def test_printable_never_lets_a_control_character_through(said: bytes) -> None:
    assert all(c == "\n" or c.isprintable() for c in printable(said))
