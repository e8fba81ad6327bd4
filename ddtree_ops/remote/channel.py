"""What paramiko's channels need to be safe on a connection that many commands share."""

from __future__ import annotations

import paramiko


def end_input(channel: paramiko.Channel) -> None:
    """Tell the other side that no more input comes; nothing where the channel is closed or was told already.

    paramiko's own ``shutdown_write`` makes the message under the channel's lock and sends it after. When the command
    ends in between, its thread answers with a CLOSE first, and sshd ends the whole connection, other commands with it:
    "ieof packet referred to nonexistent channel". Here the message is out before that answer can be made.

    Raises OSError, EOFError, paramiko.SSHException where the link is gone.
    """
    with channel.lock:
        message = channel._send_eof()  # type: ignore[attr-defined]
        transport = channel.transport
        if message is not None and transport is not None:
            transport._send_user_message(message)  # type: ignore[attr-defined]
