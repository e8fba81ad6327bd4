"""The reference engine: Qwen3 target + DFlash drafter + DDTree on a CPU, behind SGLang's HTTP shapes.

It is the oracle of the tests and the engine of the demo. It imports nothing else of ddtree_ops: this
directory is shipped alone to hosts and run as `python -m ddtree_ops.engine`.

One service may be several processes, on as many hosts (--nnodes N --node-rank R --dist-init-addr HOST:PORT --tp-size N,
SGLang's names, over torch.distributed with gloo). Each holds its share of the target's heads and MLP columns; rank 0
does all else and tells the others what to compute. The tokens are one rank's: see layers.Share. gloo neither encrypts
nor asks who is there: the address is for a network of these hosts only. A rank that is gone ends all of them, with 1.

Words: W is the number of rows that one verify runs for a request (tree nodes, root included), B the drafter's
block_size, L the number of tokens of a request that have target KV (the bonus token, sampled last, has none yet).
"""

VERSION = "0.1.0"
