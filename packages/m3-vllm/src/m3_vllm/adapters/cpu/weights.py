"""From the published tensor names to the parameters of the CPU model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from m3_core.errors import ConfigurationError
from m3_vllm.adapters.cpu.experts import Experts, Projection

if TYPE_CHECKING:
    from m3_vllm.adapters.cpu.model import MiniMaxM3ForCPU

WRAPPER = "language_model."
"""Prefix of the text model inside the vision-language checkpoint."""
SKIPPED = re.compile(r"^(vision_tower|multi_modal_projector|patch_merge_mlp)\.|(^|\.)mtp\.")
"""Parts that this model does not have: vision, and the draft layer."""
EXPERT = re.compile(
    r"^(?P<experts>model\.layers\.\d+\.block_sparse_moe)\.(?:experts\.(?P<id>\d+)|shared_experts)\.(?P<matrix>\w+)\.weight$"
)
FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "index_q_proj": ("qkv_proj", "index_q"),
    "index_k_proj": ("qkv_proj", "index_k"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint module -> (vLLM's fused module, its name for the slice)."""


def load_weights(model: MiniMaxM3ForCPU, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Fill every parameter of ``model``.

    Returns:
        Names of the parameters filled, for vLLM's own check.

    Raises:
        ConfigurationError: with every unknown tensor, or every expert matrix that did not come.
    """
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    loaded: set[str] = set()
    unknown: list[str] = []
    for published, tensor in weights:
        if SKIPPED.search(published):
            continue
        name = published.removeprefix(WRAPPER)
        target = _expert(modules, name, tensor) or _linear(parameters, name, tensor)
        if target is None:
            unknown.append(published)
        else:
            loaded.add(target)
    if unknown:
        raise ConfigurationError(f"tensors that MiniMax-M3 on a CPU has no place for: {_list(unknown)}; use a BF16 checkpoint")
    missing = [f"{name}.{matrix}" for name, module in modules.items() if isinstance(module, Experts) for matrix in module.missing()]
    if missing:
        raise ConfigurationError(f"the checkpoint lacks expert matrices: {_list(missing)}")
    return loaded


def _expert(modules: dict[str, nn.Module], name: str, tensor: torch.Tensor) -> str | None:
    match = EXPERT.match(name)
    if match is None:
        return None
    owner = f"{match['experts']}.experts"
    experts, projection = modules.get(owner), Projection.named(match["matrix"])
    if not isinstance(experts, Experts) or projection is None:
        return None
    expert = experts.routed if match["id"] is None else int(match["id"])
    return f"{owner}.{experts.load(expert, projection, tensor)}"


def _linear(parameters: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> str | None:
    parent, _, leaf = name.rpartition(".")
    owner, _, module = parent.rpartition(".")
    fused, piece = FUSED.get(module, (module, None))
    target = name if piece is None else f"{owner}.{fused}.{leaf}"
    parameter = parameters.get(target)
    if parameter is None:
        return None
    loader: Callable[..., None] = getattr(parameter, "weight_loader", default_weight_loader)
    if piece is None:
        loader(parameter, tensor)
    else:
        loader(parameter, tensor, piece)
    return target


def _list(names: list[str], shown: int = 5) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
