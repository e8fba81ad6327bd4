"""Log-probabilities of tokens out of logits, in float32, for replies."""

from __future__ import annotations

import torch
from torch import Tensor

from .request import TokenLogprob, Top


@torch.inference_mode()
def of_tokens(logits: Tensor, ids: list[int], top: int) -> tuple[list[TokenLogprob], list[Top]]:
    """Row i of logits [n, vocab] predicted ids[i]: its log-probability, and the `top` best tokens of that row.

    The second list is empty when top is 0.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()
    alternatives: list[Top] = []
    if top:
        values, tokens = scores.topk(top)
        pairs = zip(values.tolist(), tokens.tolist(), strict=True)
        alternatives = [list(zip(row, names, strict=True)) for row, names in pairs]
    return list(zip(chosen, ids, strict=True)), alternatives


def of_prompt(logits: Tensor, prompt: list[int], start: int, top: int) -> tuple[list[TokenLogprob], list[Top]]:
    """Entries for prompt positions start..end as SGLang gives them: the first one is always null.

    logits [len(prompt) - start, vocab] are those at positions start..end; the last row predicts the first output.
    """
    first: tuple[list[TokenLogprob], list[Top]] = ([(None, prompt[start])], [None] if top else [])
    if start + 1 == len(prompt):
        return first
    tokens, alternatives = of_tokens(logits[:-1], prompt[start + 1 :], top)
    return first[0] + tokens, first[1] + alternatives
