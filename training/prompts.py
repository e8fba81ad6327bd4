"""Draws the held-out prompts that ship with the pair, with the target's float32 greedy continuation.

Prompts are random stretches of packages the training never saw. One is dropped where the best logit's lead falls below
CLEAR_GAP; of the rest, the first that do not loop and the first LOOPING that do are kept, in that order.

Usage: python training/prompts.py --corpus corpus.xz --pair DIR      (reads DIR/target, writes DIR/held_out.json)
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import EOS, unpack
from evaluate import load_pair, loops
from nets import Target
from tokenizers import Tokenizer
from torch import Tensor
from train import SEED, write

LENGTH, CONTINUATION, KEPT, LOOPING, DRAWN = 64, 128, 128, 32, 768
CLEAR_GAP = 5e-4  # a smaller lead could turn with the order of float32 sums, machine by machine


@torch.no_grad()
def continue_greedily(target: Target, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, lead of the best logit over the second), each [B, CONTINUATION], scored by a pass without a cache.

    Raises ValueError where that pass disagrees with the cached decoding by more than CLEAR_GAP.
    """
    ids = write(target, prompts, prompts.new_zeros(len(prompts)), CONTINUATION)
    best = target.logits(target(ids[:, :-1])[0][:, LENGTH - 1 :]).topk(2)
    gaps = best.values[..., 0] - best.values[..., 1]
    if bool(((best.indices[..., 0] != ids[:, LENGTH:]) & (gaps > CLEAR_GAP)).any()):
        raise ValueError("decoding with a cache and scoring without one disagree")
    return ids[:, LENGTH:], gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--pair", type=Path, required=True)
    args = parser.parse_args()
    target, _ = load_pair(args.pair, "cpu")
    tokenizer = Tokenizer.from_file(str(args.pair / "target" / "tokenizer.json"))
    _, held_out = unpack(args.corpus)
    starts = np.random.default_rng(SEED).integers(0, len(held_out) - LENGTH, DRAWN)
    drawn = torch.from_numpy(np.stack([held_out[s : s + LENGTH] for s in starts]).astype(np.int64))
    drawn = drawn[(drawn != EOS).all(1)]
    rows: list[dict[str, Any]] = []
    for part in torch.split(drawn, 128):
        for prompt, ids, gaps in zip(
            part.tolist(), *(x.tolist() for x in continue_greedily(target, part)), strict=True
        ):
            # A text ends with its first end-of-text token.
            end = ids.index(EOS) + 1 if EOS in ids else CONTINUATION
            ids, gaps = ids[:end], gaps[:end]
            lows = {f"min_gap{n}": min(gaps[:n]) for n in (32, 64, 128)}
            text = {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(ids)}
            rows.append({"prompt_ids": prompt, "ar_fp32": ids, **text, **lows, "loops": loops(ids)})
    clear = [row for row in rows if row["min_gap128"] >= CLEAR_GAP]
    looping = [row for row in clear if row["loops"]]
    kept = [row for row in clear if not row["loops"]][: KEPT - LOOPING] + looping[:LOOPING]
    print(f"{len(rows)} drawn, {len(clear)} clear, {len(looping)} of them loop; kept {len(kept)}")
    lines = ",\n".join(json.dumps({"i": i, **row}) for i, row in enumerate(kept))
    (args.pair / "held_out.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
