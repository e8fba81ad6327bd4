"""Pairs to run: a tiny random one always, the trained one where it is in the tree."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ddtree_ops.engine import measure
from ddtree_ops.engine.arguments import Arguments
from ddtree_ops.engine.loading import build_decoder, resolve
from ddtree_ops.engine.request import GREEDY, Sampling
from ddtree_ops.engine.step import Decoder, Prompt, Sequence

from .pairs import VOCABULARY, Plain, write_pair

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random pair with tied embeddings."""
    return write_pair(tmp_path_factory.mktemp("pair") / "tied", seed=25)


@pytest.fixture(scope="session")
def plain(pair: Path) -> Plain:
    return Plain(pair)


@pytest.fixture(scope="session")
def trained() -> Path:
    """The pair that ships; tests of it are left out where it has not landed yet."""
    if not (measure.DEFAULT_PAIR / "held_out.json").exists():
        pytest.skip("no trained pair at ddtree_ops/engine/pair")
    return measure.DEFAULT_PAIR


def prompts(count: int, seed: int = 5, low: int = 1, high: int = 12) -> list[list[int]]:
    """Random prompts of various lengths."""
    source = random.Random(seed)
    return [[source.randrange(2, VOCABULARY) for _ in range(source.randint(low, high))] for _ in range(count)]


MODES = ["AR", "DFLASH", "2/2", "4/3", "8/4", "12/3", "60/12", "9/1", "12/3 3:8,5:2,7:0"]


def arguments(pair: Path, mode: str, **extra: object) -> Arguments:
    """Arguments of a mode: AR, DFLASH, budget/topk of a tree, or that with a ladder behind it."""
    given: dict[str, object] = {"model_path": pair / "target", **extra}
    if mode != "AR":
        given["speculative_draft_model_path"] = pair / "draft"
        given["speculative_algorithm"] = "DFLASH"
    if "/" in mode:
        tree, _, ladder = mode.partition(" ")
        budget, topk = map(int, tree.split("/"))
        given |= {
            "speculative_algorithm": "DDTREE",
            "speculative_ddtree_budget": budget,
            "speculative_ddtree_topk": topk,
            "speculative_ddtree_ladder": ladder or None,
        }
    return Arguments(**given)  # type: ignore[arg-type]


@dataclass
class Bench:
    """A decoder stepped by hand."""

    decoder: Decoder
    width: int

    @classmethod
    def of(cls, pair: Path, mode: str, **extra: object) -> Bench:
        a = arguments(pair, mode, **extra)
        resolved = resolve(a)
        return cls(build_decoder(a, resolved), resolved.width)

    def join(self, prompt: list[int], room: int, sampling: Sampling = GREEDY) -> tuple[Sequence, list[int]]:
        """A prefilled sequence and its output so far, one token."""
        (sequence,) = self.join_all(prompt, room, [sampling])
        return sequence, [sequence.bonus]

    def join_all(self, prompt: list[int], room: int, asked: list[Sampling]) -> list[Sequence]:
        """A sequence for each sampling, prefilled together."""
        joined = []
        for sampling in asked:
            row = self.decoder.table.allocate(len(prompt) + room + self.width)
            assert row is not None
            joined.append(Sequence(row, sampling=sampling))
        self.decoder.prefill([Prompt(sequence, prompt, len(prompt) - 1, True) for sequence in joined])
        return joined
