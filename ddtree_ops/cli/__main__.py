"""``python -m ddtree_ops.cli``: the same as the installed ``ddtree``."""

from ddtree_ops.cli import main

main()
