"""The checks, a file a group. Importing this registers them all, in the order in which they are shown."""

from ddtree_ops.doctor.checks import base, driver, cards, topology, models, service  # noqa: I001  the order is the table's
from ddtree_ops.doctor.checks import archs

__all__ = ["archs", "base", "cards", "driver", "models", "service", "topology"]
