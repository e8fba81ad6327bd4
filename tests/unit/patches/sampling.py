"""Inside a tree's Python: SGLang's own sampler and batch parameters, and a text drawn token by token without drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .bases import here
from .toy import VOCABULARY, Toy


class Absent(SimpleNamespace):
    """A scheduler's batch or request: what is not set is not wanted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def requests(given: list[dict[str, Any]]) -> list[Any]:
    """As a scheduler has them, with these sampling parameters."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = [Absent(sampling_params=SamplingParams(**one), finished=lambda: False, output_ids=[]) for one in given]
    for one in made:
        one.sampling_params.verify(VOCABULARY)
    return made


def batch_info(given: list[dict[str, Any]]) -> Any:
    """What the worker gets of these requests: SGLang's own tensors, as its scheduler makes and copies them."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    batch = Absent(reqs=requests(given), device="cpu", spec_algorithm=SpeculativeAlgorithm.DFLASH)
    return SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY).copy_for_forward()


def sampler() -> Any:
    """SGLang's, of one rank without a process group."""
    from sglang.srt.layers.sampler import Sampler

    torch.compiler.set_stance("force_eager")
    here().draw_as_a_gpu()
    made = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(made)
    made.tp_sync_group = made.rl_on_policy_target = None
    made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    return made


def ar_text(toy: Toy, prompt: list[int], count: int, given: dict[str, Any]) -> list[int]:
    """The prompt and ``count`` tokens drawn after it, one forward pass and one draw a token, alone in its batch."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    info, draw, text = batch_info([given]), sampler(), list(prompt)
    for _ in range(count):
        output = LogitsProcessorOutput(next_token_logits=toy.dense(text).logits[-1:].clone())
        info.apply_logits_bias(output.next_token_logits)
        text.append(int(draw(output, info, False, [], [], torch.tensor([len(text) - 1]))))
    return text
