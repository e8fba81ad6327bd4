"""What runs on a host, kept in git: `collect`'s reply -> files -> a message that says what changed -> one commit.

>>> new = files(collected, "ct200", "sglang-k26-ddtree")
>>> old = stored(workspace, new)
>>> commit(workspace, new, message(old, new, "ct200", "sglang-k26-ddtree"))
"""

from ddtree_ops.snapshot.message import message
from ddtree_ops.snapshot.normalise import files
from ddtree_ops.snapshot.record import commit, stored

__all__ = ["commit", "files", "message", "stored"]
