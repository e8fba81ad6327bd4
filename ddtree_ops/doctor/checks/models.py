"""Disks; the target and the drafter: there, whole, readable, and made for one another."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.doctor.check import Case, Seen, check, gib, listed
from ddtree_ops.doctor.facts import Dflash, Model, ModelConfig
from ddtree_ops.units import cache_directory, uses_gpus

GROUP = "disk and models"
DFLASH = "ddtree_ops/engine/config.py: what SGLang 0.5.17 reads of a DFlash drafter"
#: Bytes that a release with its venv takes, and room for the one that runs beside it.
RELEASE_BYTES = {"sglang": 16 << 30, "reference": 2 << 30, "router": 1 << 29}
#: What a rank needs beside weights and KV cache: CUDA context, graphs, activations.
RESERVE_GIB = 4.0


@check(
    "disk-space",
    GROUP,
    "error",
    "room for a release beside the one that runs",
    needs=("disks",),
    reference="releases are installed beside one another",
)
def disk_space(case: Case) -> Iterator[Seen]:
    disk, least = case.facts.disks.get(case.deployment.host.root), RELEASE_BYTES[case.profile.engine]
    if disk is not None and disk.free_bytes is not None and disk.free_bytes < least:
        yield Seen(
            f"{gib(disk.free_bytes)} free at {case.deployment.host.root}",
            f"at least {gib(least)}",
            f"ddtree prune --host {case.deployment.host.name}; {case.ssh}: du -xhd1 {disk.mount or '/'} | sort -h",
        )


@check("disk-inodes", GROUP, "error", "inodes for a release's files", needs=("disks",), reference="df -i")
def disk_inodes(case: Case) -> Iterator[Seen]:
    disk = case.facts.disks.get(case.deployment.host.root)
    if disk is not None and disk.free_inodes is not None and disk.free_inodes < 120_000:
        yield Seen(
            f"{disk.free_inodes} free inodes at {case.deployment.host.root}",
            "at least 120000",
            f"ddtree prune --host {case.deployment.host.name}; {case.ssh}: df -i",
        )


@check(
    "disk-mount",
    GROUP,
    "error",
    "a root that can be written and executed from",
    needs=("disks",),
    reference="mount(8): ro, noexec",
)
def disk_mount(case: Case) -> Iterator[Seen]:
    disk = case.facts.disks.get(case.deployment.host.root)
    if disk is None:
        return
    wrong = [name for name, is_so in (("read-only", disk.read_only), ("noexec", disk.noexec)) if is_so]
    if wrong:
        yield Seen(
            f"{disk.mount} is mounted {' and '.join(wrong)}",
            "rw, exec",
            f"{case.ssh}: dmesg | tail (a disk that fails goes read-only); mount -o remount,rw,exec {disk.mount}",
        )


def _models(case: Case) -> Iterator[tuple[str, str, Model]]:
    """(what it is, path, facts) of the models that the profile names on the host."""
    for what, path in (("target", case.profile.model), ("drafter", case.profile.drafter)):
        if path is not None and path in case.facts.models:
            yield what, path, case.facts.models[path]


def _whole(case: Case) -> tuple[ModelConfig, ModelConfig] | None:
    """The configurations of target and drafter, when both are there."""
    found = {what: model.config for what, _, model in _models(case)}
    target, drafter = found.get("target"), found.get("drafter")
    return (target, drafter) if target and drafter else None


@check(
    "model-missing",
    GROUP,
    "error",
    "the directories of target and drafter are there",
    needs=("models",),
    reference="a deploy never downloads weights",
)
def model_missing(case: Case) -> Iterator[Seen]:
    for what, path, model in _models(case):
        if not model.present:
            yield Seen(
                f"no {what} at {path}",
                "a directory with its config.json and safetensors",
                f"copy it there (rsync -a), or correct `{'model' if what == 'target' else what}:` in the profile",
            )


@check(
    "model-whole",
    GROUP,
    "error",
    "every shard is there and as long as its header says",
    needs=("models",),
    reference="model.safetensors.index.json; safetensors format",
)
def model_whole(case: Case) -> Iterator[Seen]:
    for what, path, model in _models(case):
        if not model.present:
            continue
        wrong = list(model.problems)
        if model.missing:
            wrong.append(f"{model.missing_count} shards of the index are missing: {listed(model.missing, 3)}")
        if model.fetching and model.missing:
            wrong.append(f"a download is not done: {listed(model.fetching, 3)}")
        if not model.shards and not model.other_weights:
            wrong.append("no weights at all")
        if wrong:
            yield Seen(
                f"{what} {path}: {listed(wrong, 4)}",
                "whole safetensors",
                f"fetch it again, then compare: {case.ssh}: ls -l {path}; rsync -ac from where it is whole",
            )


@check(
    "model-config",
    GROUP,
    "error",
    "each model has a config.json that can be read",
    needs=("models",),
    reference="transformers, config.json",
)
def model_config(case: Case) -> Iterator[Seen]:
    for what, path, model in _models(case):
        if model.present and model.config is None:
            yield Seen(
                f"{what} {path}: no config.json, or not JSON",
                "the model's own configuration",
                f"{case.ssh}: python3 -m json.tool {path}/config.json",
            )


@check(
    "model-readable",
    GROUP,
    "error",
    "the service's user may read the weights",
    needs=("models",),
    reference="the unit's User=; it is not root",
)
def model_readable(case: Case) -> Iterator[Seen]:
    if case.deployment.host.supervisor != "systemd":
        return
    for what, path, model in _models(case):
        if model.unreadable:
            yield Seen(
                f"{what} {path}: not readable for others: {listed(model.unreadable, 3)}",
                "mode o+r",
                f"{case.ssh}: chmod -R o+rX {path}",
            )


@check(
    "model-vocabulary",
    GROUP,
    "error",
    "the profile's vocab_size is the target's",
    needs=("models",),
    reference="ids beyond the vocabulary take the server down",
)
def model_vocabulary(case: Case) -> Iterator[Seen]:
    for what, path, model in _models(case):
        there, said = (model.config or ModelConfig()).vocab_size, case.profile.vocab_size
        if what == "target" and there is not None and said is not None and there != said:
            yield Seen(
                f"{path} has a vocabulary of {there}",
                f"{said} (vocab_size of the profile)",
                "correct vocab_size, or look whether it is the right model",
            )


@check(
    "drafter-vocabulary", GROUP, "error", "target and drafter have one vocabulary", needs=("models",), reference=DFLASH
)
def drafter_vocabulary(case: Case) -> Iterator[Seen]:
    both = _whole(case)
    if both and both[0].vocab_size != both[1].vocab_size:
        yield Seen(
            f"target {both[0].vocab_size}, drafter {both[1].vocab_size}",
            "one vocabulary",
            "this drafter was made for another model: take the one that belongs to the target",
        )


@check(
    "drafter-layers",
    GROUP,
    "error",
    "the drafter reads layers that the target has",
    needs=("models",),
    reference=f"{DFLASH}: target_layer_ids ascend and lie below the last layer",
)
def drafter_layers(case: Case) -> Iterator[Seen]:
    both = _whole(case)
    if not both:
        return
    layers = both[0].num_hidden_layers
    ids = (both[1].dflash or Dflash()).target_layer_ids
    if not ids:
        yield Seen(
            "no dflash_config.target_layer_ids",
            "the layers that the drafter was trained on",
            "is it a DFlash drafter? its config.json has the section dflash_config",
        )
    elif ids != sorted(set(ids)) or ids[0] < 0 or (layers is not None and ids[-1] >= layers - 1):
        yield Seen(
            f"target_layer_ids {ids}, the target has {layers} layers",
            f"ascending, each below {(layers or 0) - 1}",
            "a drafter of another target gives accept lengths near 1: take the one that belongs to it",
        )


@check(
    "drafter-depth",
    GROUP,
    "error",
    "the drafter was made for a target of this depth",
    needs=("models",),
    reference=DFLASH,
)
def drafter_depth(case: Case) -> Iterator[Seen]:
    both = _whole(case)
    if not both:
        return
    said = (both[1].dflash or Dflash()).num_target_layers or both[1].num_target_layers
    there = both[0].num_hidden_layers
    if said is not None and there is not None and said != there:
        yield Seen(
            f"num_target_layers {said}, the target has {there}",
            "one number",
            "this drafter was made for another model: take the one that belongs to the target",
        )


@check(
    "drafter-width",
    GROUP,
    "error",
    "the drafter takes hidden states of the target's width",
    needs=("models",),
    reference=DFLASH,
)
def drafter_width(case: Case) -> Iterator[Seen]:
    both = _whole(case)
    if both and both[0].hidden_size != both[1].hidden_size:
        yield Seen(
            f"target {both[0].hidden_size}, drafter {both[1].hidden_size}",
            "one hidden_size",
            "this drafter was made for another model: take the one that belongs to the target",
        )


@check(
    "drafter-context",
    GROUP,
    "warning",
    "the drafter's context is as long as what is served",
    needs=("models",),
    reference="beyond it accept length falls; the output stays right",
)
def drafter_context(case: Case) -> Iterator[Seen]:
    both = _whole(case)
    if not both:
        return
    served = case.profile.context_length or both[0].max_position_embeddings
    own = both[1].max_position_embeddings
    if served and own and own < served:
        yield Seen(
            f"the drafter knows {own} positions",
            f"{served}, which is served",
            f"context_length: {own} in the profile, or accept slow long contexts: silence this with the reason",
        )


@check(
    "drafter-block", GROUP, "error", "the profile's block_size is the drafter's", needs=("models",), reference=DFLASH
)
def drafter_block(case: Case) -> Iterator[Seen]:
    both = _whole(case)
    if not both:
        return
    own = (both[1].dflash or Dflash()).block_size or both[1].block_size
    if own is not None and own != case.profile.block_size:
        yield Seen(
            f"the drafter's block_size is {own}",
            f"{case.profile.block_size} (profile)",
            f"block_size: {own} in the profile",
        )


@check(
    "memory-fit",
    GROUP,
    "error",
    "weights and a KV cache fit the GPUs at this memory fraction",
    needs=("models",),
    gpus=True,
    reference="draft weights count since SGLang 0.5.x: the same fraction may no longer do after an upgrade",
)
def memory_fit(case: Case) -> Iterator[Seen]:
    profile, card = case.profile, case.deployment.host.gpus.memory_gib
    there = [gpu.memory_total_mib / 1024 for gpu in case.gpus if gpu.memory_total_mib]
    card_gib = min(there, default=float(card))
    weights = {what: model.bytes / (1 << 30) for what, _, model in _models(case) if model.present and not model.missing}
    if not uses_gpus(case.deployment) or "target" not in weights:
        return
    # The drafter is on every rank; the target is split.
    held = weights["target"] / (profile.tp * profile.pp) + weights.get("drafter", 0.0)
    fraction = profile.memory_fraction or 0.85
    left, outside = card_gib * fraction - held, card_gib * (1 - fraction)
    if left < 2.0:
        yield Seen(
            f"{held:.1f} GiB of weights a GPU of {card_gib:.0f} GiB, {fraction:g} of it for weights and KV cache",
            "at least 2 GiB for the KV cache",
            "more GPUs (tp), a smaller model, or a larger memory_fraction",
        )
    elif outside < RESERVE_GIB:
        yield Seen(
            f"memory_fraction {fraction:g} leaves {outside:.1f} GiB a GPU",
            f"at least {RESERVE_GIB:g} GiB for graphs and activations",
            f"memory_fraction: {1 - RESERVE_GIB / card_gib - 0.005:.2f} in the profile",
        )


@check(
    "cache-mount",
    "caches",
    "error",
    "a cache that compiled kernels can be written to and run from",
    needs=("disks",),
    reference="JIT compilers write shared objects into the service's cache",
)
def cache_mount(case: Case) -> Iterator[Seen]:
    path = cache_directory(case.deployment)
    disk = case.facts.disks.get(path)
    if disk is None or not uses_gpus(case.deployment):
        return
    root = case.facts.disks.get(case.deployment.host.root)
    wrong = [name for name, is_so in (("read-only", disk.read_only), ("noexec", disk.noexec)) if is_so]
    if wrong and not (root is not None and root.mount == disk.mount):
        yield Seen(
            f"{path} is on {disk.mount}, mounted {' and '.join(wrong)}",
            "rw, exec",
            f"{case.ssh}: mount -o remount,rw,exec {disk.mount}",
        )


@check(
    "cache-space",
    "caches",
    "warning",
    "room for compiled kernels",
    needs=("disks",),
    reference="a full cache is compiled anew at every start, for minutes",
)
def cache_space(case: Case) -> Iterator[Seen]:
    path = cache_directory(case.deployment)
    disk, root = case.facts.disks.get(path), case.facts.disks.get(case.deployment.host.root)
    if disk is None or disk.free_bytes is None or not uses_gpus(case.deployment):
        return
    if disk.free_bytes < 8 << 30 and not (root is not None and root.mount == disk.mount):
        yield Seen(
            f"{gib(disk.free_bytes)} free at {path}", "at least 8 GiB", f"{case.ssh}: du -xhd1 {disk.mount} | sort -h"
        )


@check(
    "cache-tmp", "caches", "warning", "/tmp that compilers can use", needs=("disks",), reference="tempfile(3): TMPDIR"
)
def cache_tmp(case: Case) -> Iterator[Seen]:
    disk = case.facts.disks.get("/tmp")
    root = case.facts.disks.get(case.deployment.host.root)
    if disk is None or disk.free_bytes is None or (root is not None and root.mount == disk.mount):
        return
    if disk.free_bytes < 1 << 30:
        yield Seen(f"{gib(disk.free_bytes)} free at /tmp", "at least 1 GiB", f"{case.ssh}: du -xhd1 /tmp | sort -h")
