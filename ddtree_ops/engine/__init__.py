"""The reference engine: Qwen3 target + DFlash drafter + DDTree on a CPU, behind SGLang's HTTP shapes.

It is the oracle of the tests and the engine of the demo. It imports nothing else of ddtree_ops: this
directory is shipped alone to hosts and run as `python -m ddtree_ops.engine`.

Words: W is the number of rows that one verify runs for a request (tree nodes, root included), B the drafter's
block_size, L the number of tokens of a request that have target KV (the bonus token, sampled last, has none yet).
"""

VERSION = "0.1.0"
