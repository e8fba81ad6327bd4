"""Inside a tree's Python with Triton's interpreter: SGLang's sampler, its batches of parameters and their seeds."""

from __future__ import annotations

from typing import Any

import torch

from .configured import configured
from .sampling import Absent, batch_info, requests, sampler
from .toy import VOCABULARY

LARGEST_HASH = 0xFFFFFFFF


def drawn(given: list[dict[str, Any]], logits: list[list[float]], positions: list[int]) -> list[int]:
    """A row's token each, of rows next to each other in one batch."""
    with configured(sampling_backend="pytorch"):
        return _draw(batch_info(given), logits, positions)


def drawn_after(given: list[dict[str, Any]], more: list[dict[str, Any]], keep: list[int]) -> dict[str, Any]:
    """Two batches of parameters joined, then only ``keep`` of them: the seeds, None for none."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    with configured(sampling_backend="pytorch"):
        one, other = (
            SamplingBatchInfo.from_schedule_batch(
                Absent(reqs=requests(rows), device="cpu", spec_algorithm=SpeculativeAlgorithm.NONE), VOCABULARY
            )
            for rows in (given, more)
        )
        one.merge_batch(other)
        joined = one.sampling_seed
        one.filter_batch(keep, torch.tensor(keep))
        kept = one.sampling_seed
    return {name: None if seeds is None else seeds.tolist() for name, seeds in (("joined", joined), ("kept", kept))}


def seeds_under(algorithm: str, given: list[dict[str, Any]]) -> list[int] | None:
    """What of the seeds a batch of this algorithm keeps."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    with configured(sampling_backend="pytorch"):
        batch = Absent(reqs=requests(given), device="cpu", spec_algorithm=SpeculativeAlgorithm[algorithm])
        info = SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
    return None if info.sampling_seed is None else list(info.sampling_seed.tolist())


def refusal(parameters: dict[str, Any]) -> str | None:
    """What is said to a request with these sampling parameters."""
    try:
        requests([parameters])
    except ValueError as error:
        return str(error)
    return None


def unluckiest(probabilities: list[float]) -> int:
    """The token drawn with a seed when the hash of the last one is the largest that there is."""
    from sglang.srt.layers import sampler as module

    torch.compiler.set_stance("force_eager")
    before = module.murmur_hash32

    def hashed(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        made = torch.full((len(seed), len(columns)), LARGEST_HASH // 2, dtype=torch.int64)
        made[:, -1] = LARGEST_HASH
        return made

    module.murmur_hash32 = hashed
    try:
        law = torch.tensor([probabilities])
        return int(module.sampling_from_probs_torch(law, torch.tensor([1]), torch.tensor([0])))
    finally:
        module.murmur_hash32 = before


def _draw(info: Any, logits: list[list[float]], positions: list[int]) -> list[int]:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    output = LogitsProcessorOutput(next_token_logits=torch.tensor(logits))
    drawn: list[int] = sampler()(output, info, False, [], [], torch.tensor(positions)).tolist()
    return drawn
