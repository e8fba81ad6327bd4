"""remote/ssh: a command's pipes over an ssh channel, where the link goes."""

from __future__ import annotations

from typing import Any
from unittest import mock

from ddtree_ops.errors import Unreachable
from ddtree_ops.remote.ssh import _ChannelPipes


def test_a_link_that_goes_while_a_read_asks_for_more_is_the_outputs_end() -> None:
    """paramiko raises EOFError there, which in a thread of its own was a traceback on the operator's screen."""
    channel: Any = mock.Mock()
    channel.recv.side_effect = [b"some", EOFError()]
    channel.recv_stderr.side_effect = EOFError()
    pipes = _ChannelPipes(channel, mock.Mock(), Unreachable("gone"))
    assert [pipes.read(9), pipes.read(9), pipes.read_stderr(9)] == [b"some", b"", b""]
