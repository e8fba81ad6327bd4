"""remote/ssh: a command's pipes over an ssh channel, where the link goes."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import paramiko
import pytest
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_EOF

from ddtree_ops.errors import Unreachable
from ddtree_ops.remote.channel import end_input
from ddtree_ops.remote.ssh import _ChannelPipes


def test_a_link_that_goes_while_a_read_asks_for_more_is_the_outputs_end() -> None:
    """paramiko raises EOFError there, which in a thread of its own was a traceback on the operator's screen."""
    channel: Any = mock.Mock()
    channel.recv.side_effect = [b"some", EOFError()]
    channel.recv_stderr.side_effect = EOFError()
    pipes = _ChannelPipes(channel, mock.Mock(), Unreachable("gone"))
    assert [pipes.read(9), pipes.read(9), pipes.read_stderr(9)] == [b"some", b"", b""]


class _Slow:
    """A transport whose EOF takes a while to leave; ``sent``: the kinds of messages as they left."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.leaving, self.gone = threading.Event(), threading.Event()

    def _send_user_message(self, message: paramiko.Message) -> None:
        (kind,) = message.asbytes()[:1]
        if kind == MSG_CHANNEL_EOF:
            self.leaving.set()
            self.gone.wait(0.5)
        self.sent.append(kind)
        if kind == MSG_CHANNEL_CLOSE:
            self.gone.set()

    def __getattr__(self, name: str) -> Any:
        return mock.Mock(return_value="paramiko" if name == "get_log_channel" else 1 << 15)


def _opened() -> tuple[Any, _Slow]:
    channel: Any = paramiko.Channel(1)
    transport = _Slow()
    channel._set_transport(transport)
    channel._set_remote_channel(7, 1 << 20, 1 << 15)
    return channel, transport


@pytest.mark.parametrize(
    ("end", "order"),
    [
        (end_input, [MSG_CHANNEL_EOF, MSG_CHANNEL_CLOSE]),
        # what sshd ends the whole connection for
        (paramiko.Channel.shutdown_write, [MSG_CHANNEL_CLOSE, MSG_CHANNEL_EOF]),
    ],
    ids=["ours", "paramiko's"],
)
def test_no_end_of_input_follows_the_close_of_a_command_that_ends_meanwhile(end: Any, order: list[int]) -> None:
    channel, transport = _opened()
    sender = threading.Thread(target=end, args=(channel,))
    sender.start()
    assert transport.leaving.wait(5)
    channel._handle_close(paramiko.Message())
    sender.join(5)
    assert transport.sent == order


def test_a_closed_channel_is_told_nothing_more() -> None:
    channel, transport = _opened()
    channel._handle_close(paramiko.Message())
    transport.sent.clear()
    end_input(channel)
    assert transport.sent == []
