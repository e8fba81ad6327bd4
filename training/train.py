"""Trains the pair on one GPU: the target on packed Python source, the drafter on text the target wrote greedily.

Usage: python training/train.py target  --corpus corpus.xz --out DIR --seconds 500
       python training/train.py drafter --corpus corpus.xz --out DIR --seconds 420     (reads DIR/target)

The schedule is in seconds of wall time, the compiler's included, so that a run ends when it should. `--tiny` walks
the same code on a CPU and learns nothing.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import unpack
from nets import Drafter, Shape, Target, configs, initialise, load, rope_tables, save
from optim import Optimiser
from torch import Tensor

SEED = 20261129
WRITTEN = 192  # tokens the target writes at the end of each self-written row
LOOP_WEIGHT = 0.2  # of drafter blocks inside repeated text
TEXT_SHARE = 0.05  # of drafter batches, on training text instead of self-written text


@dataclass(frozen=True)
class Plan:
    """Sizes of a run. `target_batches`: row length, rows, before and from `long_from` of the time on; `pools` of
    self-written text: row length, rows a batch, share of the batches, rows written."""

    target_batches: tuple[tuple[int, int], ...] = ((512, 64), (2048, 16))
    long_from: float = 0.72
    pools: tuple[tuple[int, int, float, int], ...] = ((256, 128, 0.85, 393216), (1024, 32, 0.15, 16384))
    write_rows: int = 16384
    anchors: int = 24
    report_every: int = 500
    compiled: bool = True


TINY = Plan(((32, 4), (64, 2)), 0.5, ((256, 4, 0.7, 16), (320, 2, 0.3, 8)), 8, 3, 3)


class Clock:
    """Progress of a run of `seconds`, and the learning-rate scale: short warm-up, then linearly to zero."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start, self.step = seconds, time.monotonic(), 0

    @property
    def progress(self) -> float:
        return min(1.0, (time.monotonic() - self.start) / self.seconds)

    def scale(self) -> float:
        self.step += 1
        return min(1.0, self.step / 300) * max(0.02, 1 - self.progress)


@dataclass
class Run:
    """What both trainings share."""

    plan: Plan
    device: str
    out: Path
    train: Tensor
    held_out: Tensor
    random: torch.Generator

    def windows(self, ids: Tensor, length: int, rows: int) -> Tensor:
        """Random stretches [rows, length] of a flat id tensor."""
        starts = torch.randint(0, len(ids) - length, (rows, 1), device=self.device, generator=self.random)
        return ids[starts + torch.arange(length, device=self.device)].long()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, cache_enabled=False)

    def capture(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`body`, which reads and writes tensors that stay in place, as one CUDA graph (the host is the bottleneck).

        Runs the body four times first: compilation and lazily made state must not fall into the capture.
        """
        if self.device == "cpu":
            return body
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = body()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay

    def compile(self, net: Target | Drafter) -> None:
        """Compiles each decoder layer in place; equal layers share one compilation per shape."""
        if self.plan.compiled:
            for layer in net.blocks():
                layer.compile(dynamic=False)


def token_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Cross entropy of `hidden` [..., H] through `head` [V, H], a mean or a weighted mean."""
    losses = F.cross_entropy(F.linear(hidden, head).float().flatten(0, -2), labels.flatten(), reduction="none")
    return losses.mean() if weights is None else (losses * weights.flatten()).sum() / weights.sum()


def loss_function(run: Run) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    return torch.compile(token_loss, dynamic=False) if run.plan.compiled else token_loss


@torch.no_grad()
def held_out_loss(run: Run, target: Target, length: int = 512) -> float:
    """Mean loss over fixed held-out windows, in nats a token."""
    length = min(length, len(run.held_out) // 8)
    starts = torch.linspace(0, len(run.held_out) - length - 2, 16 if run.device == "cpu" else 512).long()
    total = 0.0
    for chunk in torch.split(starts.to(run.device), 64):
        ids = run.held_out[chunk[:, None] + torch.arange(length + 1, device=run.device)].long()
        with torch.compiler.set_stance("force_eager"), run.autocast():
            hidden, _ = target(ids[:, :-1])
            total += float(token_loss(hidden, target.model.embed_tokens.weight, ids[:, 1:], None)) * len(chunk)
    return total / len(starts)


def train_target(run: Run, shape: Shape, seconds: float) -> None:
    """Writes DIR/target. Prints training and held-out loss."""
    target = Target(shape)
    initialise(target, shape.layers)
    target.to(run.device)
    run.compile(target)
    loss_of = loss_function(run)
    optimiser = Optimiser(target, muon_rate=0.02, adam_rate=3e-3, decay=0.02)
    clock, saved, tokens = Clock(seconds), time.monotonic(), 0
    steps: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def stepper(length: int, rows: int) -> tuple[Tensor, Callable[[], Tensor]]:
        ids = run.windows(run.train, length + 1, rows)

        def body() -> Tensor:
            with run.autocast():
                hidden, _ = target(ids[:, :-1])
                loss = loss_of(hidden, target.model.embed_tokens.weight, ids[:, 1:], None)
            torch.autograd.backward(loss)
            optimiser.step()
            return loss.detach()

        return ids, run.capture(body)

    while clock.progress < 1:
        length, rows = run.plan.target_batches[clock.progress >= run.plan.long_from]
        optimiser.set_scale(clock.scale())
        if length not in steps:
            steps[length] = stepper(length, rows)
        ids, step = steps[length]
        ids.copy_(run.windows(run.train, length + 1, rows))
        tokens += ids.numel()
        loss = step()
        if clock.step % 20 == 0:
            value = loss.item()  # also keeps the host from running ahead of the clock
            if not math.isfinite(value):
                raise FloatingPointError(f"loss {value} at step {clock.step}")
        if clock.step % run.plan.report_every == 0 or clock.step == 20:
            elapsed = time.monotonic() - clock.start
            print(f"target step {clock.step} {elapsed:.0f}s {tokens / 1e6:.0f}M loss {loss.item():.4f}", flush=True)
        if time.monotonic() - saved > 100:
            save(target, configs(shape)[0], run.out / "target")
            saved = time.monotonic()
            print(f"held-out loss {held_out_loss(run, target):.4f}", flush=True)
    save(target, configs(shape)[0], run.out / "target")
    load(target, run.out / "target")
    for length in (512, 2000):
        print(
            f"target done: {clock.step} steps, {tokens / 1e6:.0f} M tokens, held-out loss of the bf16 weights at "
            f"length {length}: {held_out_loss(run, target, length):.4f}",
            flush=True,
        )


@torch.no_grad()
def write(target: Target, prompts: Tensor, sampled: Tensor, count: int = WRITTEN) -> Tensor:
    """prompts [B, P] continued by `count` tokens: the first sampled[b] drawn at temperature 1, then greedily.

    `target` is in its serving dtype; the only place of the training that keeps a KV cache.
    """
    shape, rows = target.shape, prompts.shape[0]
    start, length = prompts.shape[1], prompts.shape[1] + count
    cos, sin = rope_tables(torch.arange(length, device=prompts.device)[None, None], shape)
    kind = target.model.norm.weight.dtype
    size = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
    cache = torch.empty(size, dtype=kind, device=prompts.device)
    ids = torch.cat([prompts, prompts.new_zeros(rows, count)], 1)
    begin = 0
    for end in range(start, length):
        x = target.model.embed_tokens(ids[:, begin:end])
        tables = cos[:, :, begin:end], sin[:, :, begin:end]
        for index, layer in enumerate(target.blocks()):
            attention, inner = layer.self_attn, layer.input_layernorm(x)
            q = attention.queries(inner, *tables)
            cache[index, 0, :, :, begin:end], cache[index, 1, :, :, begin:end] = attention.keys_values(inner, *tables)
            k, v = cache[index, 0, :, :, :end], cache[index, 1, :, :, :end]
            if begin == 0:
                attended = attention.attend(q, k, v, None)
            else:
                # One query a row: heads that share a KV head become that head's query rows, so nothing is repeated.
                grouped = q.reshape(rows, shape.kv_heads, -1, shape.head_dim)
                attended = attention.o_proj(F.scaled_dot_product_attention(grouped, k, v).reshape(rows, 1, -1))
            x = layer.finish(x, attended)
        logits = target.logits(target.model.norm(x[:, -1])).float()
        noise = -torch.empty_like(logits).exponential_().log()
        ids[:, end] = torch.where(end - start < sampled, (logits + noise).argmax(-1), logits.argmax(-1))
        begin = end
    return ids


def repeated(ids: Tensor, longest: int = 64, least: int = 24) -> Tensor:
    """Which ids [B, S] lie at the end of a stretch that repeats itself (see evaluate.loop_period)."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, longest + 1):
        same = F.pad(ids[:, period:] == ids[:, :-period], (period, 0))
        count = same.cumsum(1)
        run = count - torch.where(same, 0, count).cummax(1).values
        found |= run >= max(period, least)
    return found


@dataclass
class Pool:
    """Self-written rows: ids [R, S], where greedy text starts [R], loss weight of a block at each id [R, S]."""

    ids: Tensor
    starts: Tensor
    weights: Tensor


def write_pool(run: Run, target: Target, length: int, count: int) -> Pool:
    """`count` rows of `length`: training text, then, in half of the rows, sampled tokens, then greedy ones."""
    ids, starts, weights = [], [], []
    size = max(1, min(run.plan.write_rows * 256 // length, count))
    for _ in range(math.ceil(count / size)):
        prompts = run.windows(run.train, length - WRITTEN, size)
        sampled = torch.randint(-48, 49, (size,), device=run.device, generator=run.random).clamp(min=0)
        rows = write(target, prompts, sampled)
        ids.append(rows.to(torch.int32))
        starts.append(length - WRITTEN + sampled)
        weights.append(torch.where(repeated(rows), LOOP_WEIGHT, 1.0).to(torch.bfloat16))
    return Pool(torch.cat(ids), torch.cat(starts), torch.cat(weights))


@dataclass
class Blocks:
    """A drafter batch: rows [B, S], prefix length of A blocks a row [B, A], their tokens and weights [B, A, 7]."""

    ids: Tensor
    anchors: Tensor
    labels: Tensor
    weights: Tensor


def draw_blocks(run: Run, pool: Pool, rows: int, size: int, *, text: bool, fade: Tensor) -> Blocks:
    """Random rows of a pool, or of training text, with random blocks inside their greedy part (text: anywhere)."""
    length = pool.ids.shape[1]
    if text:
        ids = run.windows(run.train, length, rows)
        first, weight = ids.new_full((rows,), size), torch.ones_like(ids, dtype=torch.bfloat16)
    else:
        chosen = torch.randint(0, len(pool.ids), (rows,), device=run.device, generator=run.random)
        ids, first, weight = pool.ids[chosen].long(), pool.starts[chosen], pool.weights[chosen]
    spread = torch.rand(rows, run.plan.anchors, device=run.device, generator=run.random)
    anchors = (first[:, None] + spread * (length - size + 1 - first[:, None])).long().clamp(max=length - size)
    offsets = torch.arange(1, size, device=run.device)
    labels = ids.gather(1, (anchors[..., None] + offsets).flatten(1)).view(*anchors.shape, -1)
    return Blocks(ids, anchors, labels, weight.gather(1, anchors)[..., None].float() * fade)


def train_drafter(run: Run, shape: Shape, seconds: float) -> None:
    """Reads DIR/target, writes DIR/draft. Prints losses and the share of blocks whose n-th token is right."""
    clock = Clock(seconds)
    target, drafter = Target(shape), Drafter(shape)
    load(target, run.out / "target")
    initialise(drafter, shape.draft_layers)
    writer = Target(shape)
    writer.load_state_dict(target.state_dict())
    writer.to(run.device, torch.bfloat16)
    pools: list[tuple[int, Pool]] = []
    for length, rows, _, count in run.plan.pools:
        pool = write_pool(run, writer, length, count)
        pools.append((rows, pool))
        loops = (pool.weights < 1).float().mean().item()
        print(
            f"wrote {count} rows of {length}, {loops:.3f} of ids in loops, {time.monotonic() - clock.start:.0f}s",
            flush=True,
        )
    target.to(run.device).requires_grad_(False)
    drafter.to(run.device)
    run.compile(target)
    run.compile(drafter)
    loss_of = loss_function(run)
    optimiser = Optimiser(drafter, muon_rate=0.02, adam_rate=3e-3, decay=0.02)
    fade = torch.exp(-torch.arange(shape.block - 1, device=run.device) / 4.0)
    steps: dict[int, tuple[Blocks, Callable[[], Tensor]]] = {}

    def stepper(blocks: Blocks) -> Callable[[], Tensor]:
        def body() -> Tensor:
            with run.autocast():
                with torch.no_grad():
                    _, taps = target(blocks.ids)
                hidden = drafter(target, taps, blocks.ids.gather(1, blocks.anchors), blocks.anchors)[:, :, 1:]
                loss = loss_of(hidden, target.model.embed_tokens.weight, blocks.labels, blocks.weights)
            torch.autograd.backward(loss)
            optimiser.step()
            return loss.detach()

        return run.capture(body)

    chooser = np.random.default_rng(SEED)
    saved = time.monotonic()
    while clock.progress < 1:
        rows, pool = pools[chooser.choice(len(pools), p=[p[2] for p in run.plan.pools])]
        drawn = draw_blocks(run, pool, rows, shape.block, text=chooser.random() < TEXT_SHARE, fade=fade)
        optimiser.set_scale(clock.scale())
        length = drawn.ids.shape[1]
        if length not in steps:
            steps[length] = drawn, stepper(drawn)
        blocks, step = steps[length]
        if blocks is not drawn:
            blocks.ids.copy_(drawn.ids)
            blocks.anchors.copy_(drawn.anchors)
            blocks.labels.copy_(drawn.labels)
            blocks.weights.copy_(drawn.weights)
        loss = step()
        if clock.step % 20 == 0 and not math.isfinite(loss.item()):
            raise FloatingPointError(f"loss at step {clock.step}")
        if clock.step % run.plan.report_every == 0 or clock.step == 20:
            elapsed = time.monotonic() - clock.start
            print(f"drafter step {clock.step} {elapsed:.0f}s length {length} loss {loss.item():.4f}", flush=True)
        if time.monotonic() - saved > 100:
            save(drafter, configs(shape)[1], run.out / "draft")
            saved = time.monotonic()
    save(drafter, configs(shape)[1], run.out / "draft")
    print(f"drafter done: {clock.step} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["target", "drafter"])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch._dynamo.config.recompile_limit = 64
    # cuDNN plans attention anew for every length, which costs more than it saves while writing.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, held_out = (torch.from_numpy(ids.astype(np.int32)).to(device) for ids in unpack(args.corpus))
    args.out.mkdir(parents=True, exist_ok=True)
    seed = torch.Generator(device).manual_seed(SEED + len(args.what))
    run = Run(TINY if args.tiny else Plan(), device, args.out, train, held_out, seed)
    if args.what == "target":
        train_target(run, Shape(), args.seconds)
    else:
        train_drafter(run, Shape(), args.seconds)


if __name__ == "__main__":
    main()
