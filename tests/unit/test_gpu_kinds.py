"""tests/gpu/kit/kinds: the checkpoints are what they are said to be, and their drafters good for something."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from ddtree_ops.engine.config import DraftConfig, ModelConfig
from ddtree_ops.engine.drafter import Drafter
from ddtree_ops.engine.target import Target
from ddtree_ops.engine.tree import best_first
from tests.gpu.kit.kinds import (
    BLOCK,
    DRAFT_HEAD_DIM,
    DRAFT_HEADS,
    HIDDEN,
    KINDS,
    MASK,
    PAIR,
    POSITIONS,
    THETA,
    VOCABULARY,
    group_of,
    permutation,
)
from tests.unit.dense_models import DenseModel

BUDGET, TOPK = 16, 4
NEW = 32


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kinds")
    for kind in ("moe", "mla"):
        KINDS[kind](out / kind)
    return out


def model(folder: Path) -> DenseModel:
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    return DenseModel(json.loads((folder / "config.json").read_text()), weights)


def prompts(pair: Path) -> list[list[int]]:
    return [entry["prompt_ids"] for entry in json.loads((pair / "held_out.json").read_text())]


def test_the_pair_with_experts_says_what_the_pair_says(written: Path) -> None:
    held = json.loads((PAIR / "held_out.json").read_text())[0]
    text = model(written / "moe" / "target").greedy(held["prompt_ids"], 12)
    assert text[len(held["prompt_ids"]) :] == held["ar_fp32"][:12]


def test_the_next_group_is_known_and_the_member_of_it_is_not(written: Path) -> None:
    target = model(written / "mla" / "target")
    texts = [target.greedy(prompt, NEW) for prompt in prompts(written / "mla")[:3]]
    followers: dict[int, set[int]] = {}
    for text, prompt in zip(texts, prompts(written / "mla"), strict=False):
        pairs = torch.tensor([text[len(prompt) - 1 : -1], text[len(prompt) :]])
        assert torch.equal(permutation(group_of(pairs[0])), group_of(pairs[1]))
        # one token after another prefix
        for begun in range(1, 9):
            logits = target.run([*text[:begun], 60]).logits[-1]
            followers.setdefault(60, set()).add(int(logits.argmax()))
    assert len(followers[60]) > 1


def test_its_drafter_fills_trees_whose_branches_are_taken(written: Path) -> None:
    """A step's tree holds the text for more tokens than the likeliest draft at each place does."""
    target = model(written / "mla" / "target")
    size = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_layers=1,
        num_heads=DRAFT_HEADS,
        num_kv_heads=1,
        head_dim=DRAFT_HEAD_DIM,
        rms_norm_eps=1e-6,
        rope_theta=THETA,
        max_positions=POSITIONS,
        tied_embeddings=False,
        eos_token_ids=(),
    )
    embedding, head = (target.weights[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    of_target = SimpleNamespace(dtype=torch.float32, embed=lambda ids: embedding[ids], head=lambda x: x @ head.T)
    folder = written / "mla" / "draft"
    drafter = Drafter(folder, DraftConfig(size, BLOCK, MASK, (1,)), cast(Target, of_target), 200, POSITIONS)
    tree_tokens = chain_tokens = steps = 0
    for prompt in prompts(written / "mla")[:3]:
        text = target.greedy(prompt, NEW)
        places = torch.arange(len(text))
        drafter.append(target.run(text).after[1], places + 1, places)
        for length in range(len(prompt), len(text) - BLOCK):
            context = (torch.tensor([text[length]]), torch.tensor([length]), places[None, :length] + 1)
            logprobs, ids = drafter.logits(*context)[0].log_softmax(-1).topk(TOPK, -1)
            tree = best_first(logprobs.tolist(), BUDGET)
            children = {(p, int(ids[d - 1, r])): n for n, (p, d, r) in enumerate(zip(*shape(tree), strict=True)) if n}
            node = taken = 0
            while (node, text[length + taken + 1]) in children:
                node, taken = children[node, text[length + taken + 1]], taken + 1
            tree_tokens, steps = tree_tokens + taken + 1, steps + 1
            ahead = text[length + 1 : length + BLOCK]
            agrees = [int(ids[i, 0]) == token for i, token in enumerate(ahead)]
            chain_tokens += 1 + (agrees.index(False) if False in agrees else len(agrees))
    assert tree_tokens / steps > 2 and tree_tokens > 1.4 * chain_tokens


def shape(tree: object) -> tuple[list[int], list[int], list[int]]:
    return tree.parent, tree.depth, tree.rank  # type: ignore[attr-defined]
