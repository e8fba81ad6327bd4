"""Trees over SGLang's own DeepSeek-V3 (latent attention, experts) and Qwen3-MoE: whole steps beside a dense oracle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.longer import longer

from . import inside_ddtree_steps
from .test_ddtree_steps import CAPTURED, EAGER, FAULTS, setting
from .trees import Tree

pytestmark = pytest.mark.slow

KINDS = ("deepseek", "qwen")


def of(kind: str, graphs: int, budget: int = 6, topk: int = 3) -> dict[str, Any]:
    return {**setting(4, budget, topk, graphs), "real": kind}


@pytest.mark.parametrize("graphs", [longer(EAGER), CAPTURED])
@pytest.mark.parametrize("kind", KINDS)
def test_text_kv_features_and_logprobs_are_the_models(kind: str, graphs: int, interpreted: Tree) -> None:
    """And the classes load a checkpoint of few layers by its names, which is what tests/gpu/kit/kinds writes."""
    told = interpreted(inside_ddtree_steps.decoded, of(kind, graphs), [5, 11], 12)
    assert told["wrong"] is None
    assert max(told["commits"]) > 1


@pytest.mark.parametrize("fault", ["mask-rows-by-block-size", longer("rope-by-index"), longer("stale-kv")])
@pytest.mark.parametrize("kind", KINDS)
def test_their_random_weights_show_a_planted_fault(kind: str, fault: str, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_steps.decoded, of(kind, CAPTURED), [5, 11], 24, str(FAULTS / f"{fault}.patch"))
    assert told["wrong"] is not None


@pytest.mark.parametrize("kind", [KINDS[0], longer(KINDS[1])])
def test_the_canary_passes_and_stops_a_wrong_mask(kind: str, interpreted: Tree) -> None:
    assert interpreted(inside_ddtree_steps.started, of(kind, CAPTURED))["said"] is None
    fault = str(FAULTS / "mask-rows-by-block-size.patch")
    assert "start-up canary" in interpreted(inside_ddtree_steps.started, of(kind, CAPTURED), fault)["said"]
