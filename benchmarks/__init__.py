"""What is timed, and how: `python -m benchmarks.NAME`. Results are kept under results/."""
