"""How fast ``ddtree`` is beside its peers, as ratios in one run on one machine: ``python -m benchmarks.speed``."""
