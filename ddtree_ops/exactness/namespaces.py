"""Cache namespaces, on which every other method relies: what is scored under a new one must not meet cached KV."""

from __future__ import annotations

from ddtree_ops.exactness.client import Server, fresh_key
from ddtree_ops.exactness.evidence import Evidence
from ddtree_ops.exactness.work import Facts

CODE = "namespaces"
VOCABULARY = 128


async def judge(server: Server, evidence: Evidence, facts: Facts) -> None:
    """The same prompt, longer than a cache page, under new namespaces: not one of its tokens may be cached.

    Cached tokens under two new namespaces after the first are proof (one might be a request that was retracted and
    found its own prefix). Raises Trouble.
    """
    vocabulary = min(VOCABULARY, facts.vocab_size or VOCABULARY)
    length = 2 * facts.page + 1
    if facts.context is not None and length + 2 > facts.context:
        evidence.note_once(CODE, f"cache namespaces are unchecked: the context has no room for {length} tokens")
        return
    prompt = tuple(i % vocabulary for i in range(length))
    cached = []
    for _ in range(3):
        got = await server.generate(prompt, max_new_tokens=1, extra_key=fresh_key())
        cached.append(got.cached_tokens or 0)
    if min(cached[1:]) > 0:
        message = f"cache namespaces are one: {cached[1]} tokens came from the cache under an extra_key never used"
        evidence.reason("fail", CODE, message)
