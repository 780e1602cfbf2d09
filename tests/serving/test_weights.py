"""Published tensor names to parameters; the loaders themselves are vLLM's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from m3_core.errors import ConfigurationError
from m3_vllm.adapters.cpu.experts import Experts
from m3_vllm.adapters.cpu.weights import load_weights

pytestmark = pytest.mark.serving

HIDDEN, INTERMEDIATE, EXPERTS = 64, 64, 2
PREFIX = "language_model.model.layers.0."


class Recorded(nn.Parameter):
    """A parameter whose loader notes which slice it was given."""

    pieces: list[object]


def recorded() -> Recorded:
    parameter = Recorded(torch.zeros(1), requires_grad=False)
    parameter.pieces = []
    parameter.weight_loader = lambda _parameter, _tensor, piece=None: parameter.pieces.append(piece)  # type: ignore[attr-defined]
    return parameter


@pytest.fixture
def model() -> nn.Module:
    """The module names of a model with one sparse layer."""
    layer = nn.Module()
    layer.self_attn = nn.Module()
    layer.self_attn.qkv_proj = nn.Module()
    layer.self_attn.qkv_proj.weight = recorded()
    layer.self_attn.q_norm = nn.Module()
    layer.self_attn.q_norm.weight = nn.Parameter(torch.zeros(4))
    layer.block_sparse_moe = nn.Module()
    layer.block_sparse_moe.experts = Experts(EXPERTS, HIDDEN, INTERMEDIATE, rank=0, ranks=1)
    layer.block_sparse_moe.e_score_correction_bias = nn.Parameter(torch.zeros(EXPERTS))
    whole = nn.Module()
    whole.model = nn.Module()
    whole.model.layers = nn.ModuleList([layer])
    return whole


def experts() -> dict[str, torch.Tensor]:
    owners = {f"experts.{expert}": ("w1", "w3", "w2") for expert in range(EXPERTS)} | {
        "shared_experts": ("gate_proj", "up_proj", "down_proj")
    }
    return {
        f"{PREFIX}block_sparse_moe.{owner}.{name}.weight": torch.ones(HIDDEN, INTERMEDIATE)
        for owner, names in owners.items()
        for name in names
    }


def test_every_published_name_finds_its_place(model: nn.Module) -> None:
    tensors = experts() | {f"{PREFIX}self_attn.{name}_proj.weight": torch.ones(1) for name in ("q", "k", "v", "index_q", "index_k")}
    tensors[f"{PREFIX}self_attn.q_norm.weight"] = torch.full((4,), 3.0)
    tensors[f"{PREFIX}block_sparse_moe.e_score_correction_bias"] = torch.full((EXPERTS,), 4.0)
    tensors["vision_tower.patch_embedding.weight"] = torch.ones(1)
    tensors["language_model.model.mtp.layers.0.weight"] = torch.ones(1)
    loaded = load_weights(model, tensors.items())  # type: ignore[arg-type]
    assert loaded == {name for name, _ in model.named_parameters()}
    layer = model.model.layers[0]
    assert layer.self_attn.qkv_proj.weight.pieces == ["q", "k", "v", "index_q", "index_k"]
    assert layer.self_attn.q_norm.weight.tolist() == [3.0] * 4
    assert layer.block_sparse_moe.e_score_correction_bias.tolist() == [4.0] * EXPERTS


def test_unknown_and_missing_tensors_are_named(model: nn.Module) -> None:
    name = f"{PREFIX}block_sparse_moe.experts.0.w1.weight_scale"
    with pytest.raises(ConfigurationError, match="weight_scale"):
        load_weights(model, {**experts(), name: torch.ones(1)}.items())  # type: ignore[arg-type]
    incomplete = experts()
    del incomplete[f"{PREFIX}block_sparse_moe.shared_experts.up_proj.weight"]
    model.model.layers[0].block_sparse_moe.experts = Experts(EXPERTS, HIDDEN, INTERMEDIATE, rank=0, ranks=1)
    with pytest.raises(ConfigurationError, match=r"experts\.shared\.up"):
        load_weights(model, incomplete.items())  # type: ignore[arg-type]
