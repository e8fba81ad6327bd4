"""Commit lengths of a pair on held-out prompts, by decoding without any cache (slow, and nothing to get stale).

Usage: python training/evaluate.py --pair DIR --prompts held_out.json [--rows N]
"""

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from nets import Drafter, Shape, Target, load
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

MODES = {"chain": (7, 1), "8/4": (8, 4), "16/4": (16, 4), "16/8": (16, 8), "24/6": (24, 6), "32/8": (32, 8)}
MODES["48/8"] = (48, 8)


def loop_period(ids: Sequence[int], longest: int = 64, least: int = 24) -> int:
    """Smallest period p <= longest at which a stretch of max(p, least) ids repeats the ids p before; 0 if none."""
    for period in range(1, longest + 1):
        run = 0
        for here, before in zip(ids[period:], ids, strict=False):
            run = run + 1 if here == before else 0
            if run >= max(period, least):
                return period
    return 0


def loops(ids: Sequence[int]) -> bool:
    """Whether a text repeats itself: it has a loop period, or fewer than half of its 8-grams are distinct."""
    grams = [tuple(ids[i : i + 8]) for i in range(len(ids) - 7)]
    return loop_period(ids) > 0 or 2 * len(set(grams)) < len(grams)


@dataclass
class Tree:
    """Drafted nodes in order of probability; `parents` index nodes, -1 is the root (the bonus token)."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


def best_first(scores: list[list[float]], tokens: list[list[int]], budget: int) -> Tree:
    """DDTree (arXiv 2604.12989): the `budget` most probable nodes, given per-depth log-probabilities, best first."""
    tree = Tree([], [], [])
    heap = [(-scores[0][0], -1, 0, 0)]
    while heap and len(tree.tokens) < budget:
        cost, parent, depth, rank = heapq.heappop(heap)
        node = len(tree.tokens)
        tree.tokens.append(tokens[depth][rank])
        tree.parents.append(parent)
        tree.depths.append(depth + 1)
        if rank + 1 < len(scores[depth]):
            heapq.heappush(heap, (cost + scores[depth][rank] - scores[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(scores):
            heapq.heappush(heap, (cost - scores[depth + 1][0], node, depth + 1, 0))
    return tree


def accept(tree: Tree, choice: list[int]) -> list[int]:
    """Tokens committed: the path the target's argmax (`choice`: root first, then nodes) follows, then its bonus."""
    children = {(p, t): n for n, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, committed = -1, [choice[0]]
    while (node, committed[-1]) in children:
        node = children[node, committed[-1]]
        committed.append(choice[node + 1])
    return committed


def verify_mask(trees: list[Tree], lengths: list[int], longest: int) -> tuple[Tensor, Tensor]:
    """Visibility [B, 1, S, S] and positions [B, S] of S = longest context + root + widest tree."""
    width = 1 + max(len(t.tokens) for t in trees)
    mask = np.zeros((len(trees), longest + width, longest + width), dtype=np.bool_)
    mask[:, :longest, :longest] = np.tri(longest, dtype=np.bool_)
    mask |= np.eye(longest + width, dtype=np.bool_)
    positions = np.tile(np.arange(longest + width), (len(trees), 1))
    for row, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        mask[row, longest:, :length] = True
        positions[row, longest:] = length
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            here, above = longest + 1 + node, longest + 1 + parent
            mask[row, here] |= mask[row, above]
            positions[row, here] = length + depth
    return torch.from_numpy(mask)[:, None], torch.from_numpy(positions)


@torch.no_grad()
def speculate(
    target: Target, drafter: Drafter, prompts: Tensor, count: int, budget: int, topk: int
) -> tuple[list[list[int]], list[int]]:
    """(continuation, verify steps) of every prompt [B, P], cut at `count` tokens or after end of text."""
    device, start = prompts.device, prompts.shape[1]
    rows = torch.cat([prompts, target.logits(target(prompts)[0][:, -1:]).argmax(-1)], 1).tolist()
    steps = [0] * len(rows)
    done = [row[-1] == target.shape.eos for row in rows]
    with sdpa_kernel(SDPBackend.MATH):
        while not all(done):
            live = [i for i, finished in enumerate(done) if not finished]
            lengths = [len(rows[i]) - 1 for i in live]
            longest = max(lengths)
            context = torch.tensor([rows[i][:-1] + [0] * (longest - len(rows[i]) + 1) for i in live], device=device)
            bonus = torch.tensor([[rows[i][-1]] for i in live], device=device)
            anchors = torch.tensor(lengths, device=device)[:, None]
            hidden = drafter(target, target(context)[1], bonus, anchors)[:, 0, 1:]
            best = target.logits(hidden).log_softmax(-1).topk(topk)
            scored = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            trees = [best_first(scores, tokens, budget) for scores, tokens in scored]
            mask, positions = verify_mask(trees, lengths, longest)
            width = mask.shape[-1] - longest - 1
            nodes = torch.tensor([t.tokens + [0] * (width - len(t.tokens)) for t in trees], device=device)
            hidden, _ = target(torch.cat([context, bonus, nodes], 1), positions.to(device), mask.to(device))
            choices = target.logits(hidden[:, longest:]).argmax(-1).tolist()
            for i, tree, choice in zip(live, trees, choices, strict=True):
                rows[i] += accept(tree, choice)
                steps[i] += 1
                new = rows[i][start:]
                done[i] = len(new) >= count or target.shape.eos in new
    outputs = [row[start : start + count] for row in rows]
    eos = target.shape.eos
    return [out[: out.index(eos) + 1] if eos in out else out for out in outputs], steps


def measure(
    target: Target, drafter: Drafter, rows: list[dict[str, object]], device: str
) -> dict[str, dict[str, float]]:
    """Per mode: tokens a step (completion tokens over verify steps, first token included, as SGLang counts
    spec_accept_length), over all rows and over rows that do not loop, and how many rows differ from AR."""
    prompts = torch.tensor([row["prompt_ids"] for row in rows], device=device)
    table: dict[str, dict[str, float]] = {}
    for mode, (budget, topk) in MODES.items():
        outputs, steps = speculate(target, drafter, prompts, 128, budget, topk)
        kept = [i for i, row in enumerate(rows) if not row["loops"]]

        def mean(which: Sequence[int], outputs: list[list[int]] = outputs, steps: list[int] = steps) -> float:
            return sum(len(outputs[i]) for i in which) / max(1, sum(steps[i] for i in which))

        differ = sum(out != row["ar_fp32"] for out, row in zip(outputs, rows, strict=True))
        table[mode] = {"all": mean(range(len(rows))), "no_loop": mean(kept), "differ": differ}
        print(
            f"{mode:6} all {table[mode]['all']:.3f}  no loop {table[mode]['no_loop']:.3f}  differ {differ}", flush=True
        )
    return table


def load_pair(directory: Path, device: str) -> tuple[Target, Drafter]:
    """Target and drafter of `directory`/{target,draft}, float32, sized by their config.json."""
    config = json.loads((directory / "target" / "config.json").read_text())
    draft = json.loads((directory / "draft" / "config.json").read_text())
    shape = Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        draft_layers=draft["num_hidden_layers"],
        block=draft["block_size"],
        taps=tuple(draft["dflash_config"]["target_layer_ids"]),
    )
    target, drafter = Target(shape), Drafter(shape)
    load(target, directory / "target")
    load(drafter, directory / "draft")
    return target.to(device), drafter.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=128)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, drafter = load_pair(args.pair, device)
    rows = json.loads(args.prompts.read_text())[: args.rows]
    measure(target, drafter, rows, device)


if __name__ == "__main__":
    main()
