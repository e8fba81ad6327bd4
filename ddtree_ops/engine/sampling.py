"""Which token follows a row of logits: penalties, temperature, filters, and a draw that a seed and a position fix.

Order and meaning are those of SGLang 0.5.17's plain path (sampling_batch_info.apply_logits_bias, then sampler.py with
the pytorch backend, the one that has positional seeds):

1. Penalties on the raw logits, over the tokens of the output so far and never the prompt: first the additive ones
   (frequency x count, presence once), then repetition (a negative logit times it, another divided by it). Greedy rows
   are penalised too.
2. Division by the temperature, softmax. A temperature below 1e-6 or top_k 1 is greedy.
3. top_k and top_p jointly, both on this one distribution: a token stays while its rank is below top_k and the mass
   before it is not above top_p; then min_p against the largest probability. Equal probabilities: lower id first.
4. Gumbel's maximum over what stayed. The noise is a hash of (seed, position, token id), position that of the row's
   own token in the sequence, prompt included. SGLang hashes otherwise (murmur, by rank where there are filters), so
   the two draw different tokens from the same law.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .request import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COINS = 1 << 62
"""Where coins begin in the stream of a (seed, position): far behind every token id."""


def penalised(logits: Tensor, history: Sequence[Sequence[int]], sampling: Sampling) -> Tensor:
    """float32 logits [n, vocab] after the penalties; history[i] is the output before row i, ancestors included."""
    scores = logits.float()
    counts = torch.zeros_like(scores)
    for row, tokens in enumerate(history):
        if tokens:
            counts[row] = torch.bincount(torch.tensor(tokens), minlength=scores.shape[1])
    present = counts > 0
    scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * present
    scaled = torch.where(scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty)
    return torch.where(present, scaled, scores)


def tempered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [n, vocab] over the temperature, float32; greedy requests' as they are. Replies report their logprobs."""
    return logits if sampling.greedy else logits.float() / sampling.temperature


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities float64 [n, vocab] of tempered logits under the filters, 0 outside; they do not add up to 1."""
    ranked, ids = torch.softmax(logits.float(), dim=-1).sort(dim=-1, descending=True, stable=True)
    keep = ranked.cumsum(dim=-1) - ranked <= sampling.top_p
    keep &= ranked >= ranked[:, :1] * sampling.min_p
    if sampling.top_k > 0:
        keep[:, sampling.top_k :] = False
    # The first token's rank is below any top_k and the mass before it is 0, so something always stays.
    return torch.zeros_like(ranked).scatter_(1, ids, ranked * keep).double()


def draw(probabilities: Tensor, seed: int, positions: Sequence[int]) -> list[int]:
    """One token for each row of (unnormalised) probabilities [n, vocab], with the noise of its position."""
    vocabulary = np.arange(probabilities.shape[1], dtype=np.uint64)
    noise = torch.from_numpy(np.stack([-np.log(-np.log(_uniform(seed, p, vocabulary))) for p in positions]))
    drawn: list[int] = (probabilities.log() + noise).argmax(dim=-1).tolist()
    return drawn


def coins(seed: int, position: int, count: int) -> list[float]:
    """`count` uniform numbers inside (0, 1) of a (seed, position), independent of its noise."""
    thrown: list[float] = _uniform(seed, position, np.arange(_COINS, _COINS + count, dtype=np.uint64)).tolist()
    return thrown


def _uniform(seed: int, position: int, index: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers inside (0, 1), one an index: SplitMix64 (Steele, Lea, Flood 2014) keyed by seed and position."""
    key = _mix(_mix(np.array([seed % (1 << 64)], dtype=np.uint64)) + np.uint64(position) * np.ones(1, np.uint64))
    bits = _mix(key + (index + np.uint64(1)) * _GOLDEN) >> np.uint64(12)
    # 52 bits and a half: neither 0 nor, by rounding, 1.
    return (bits.astype(np.float64) + 0.5) / 2.0**52


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
