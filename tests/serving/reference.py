"""transformers' own MiniMax-M3 on a tiny checkpoint: an implementation that nobody here wrote.

It runs in two ways: as it is, and with the discrete choices (experts, blocks) of another run imposed, so that the rest can be
compared number by number; then it says by how much each imposed choice misses its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM, apply_rotary_pos_emb


@attrs.frozen(kw_only=True)
class Reference:
    """Result of one pass over a whole sequence.

    Attributes:
        logits: float32 [tokens, vocabulary].
        hidden_rms: root mean square of the final normed hidden state, over all tokens.
        router_miss: by layer, float32 [tokens]: largest biased score left out, less the smallest one taken; negative = no miss.
        block_miss: by layer, float32 [tokens, heads]: the same for block scores, in units of the query's and key's norms.
    """

    logits: torch.Tensor
    hidden_rms: float
    router_miss: Mapping[int, torch.Tensor]
    block_miss: Mapping[int, torch.Tensor]


def load(folder: Path, dtype: torch.dtype) -> MiniMaxM3VLForCausalLM:
    """The model with a checkpoint's weights in ``dtype``; router and bias stay float32, as the checkpoint stores them."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    for name in ("model_type", "architectures", "torch_dtype"):
        settings.pop(name)
    config = MiniMaxM3VLTextConfig(**settings)
    model = MiniMaxM3VLForCausalLM(config)
    weights = {name.removeprefix("language_model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights = {name: tensor if tensor.dtype == torch.float32 else tensor.to(dtype) for name, tensor in weights.items()}
    model.load_state_dict(_renamed(weights, config.num_local_experts), strict=True, assign=True)
    return model.eval()


def _renamed(weights: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Published names to transformers' own, with gate and up projections fused."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        target = name.replace(".block_sparse_moe.", ".mlp.").replace(".e_score_correction_bias", ".gate.e_score_correction_bias")
        target = target.replace("self_attn.index_", "self_attn.indexer.")
        if ".experts." in name:
            if not name.endswith(".experts.0.w1.weight"):
                continue
            prefix = name.removesuffix("0.w1.weight")
            gate_up = [torch.cat([weights[f"{prefix}{e}.w1.weight"], weights[f"{prefix}{e}.w3.weight"]]) for e in range(experts)]
            target = target.removesuffix("0.w1.weight")
            renamed[f"{target}gate_up_proj"] = torch.stack(gate_up)
            renamed[f"{target}down_proj"] = torch.stack([weights[f"{prefix}{e}.w2.weight"] for e in range(experts)])
        elif name.endswith("up_proj.weight"):
            continue
        elif name.endswith("gate_proj.weight"):
            up = weights[name.replace("gate_proj", "up_proj")]
            renamed[target.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        else:
            renamed[target] = tensor
    return renamed


def run(
    model: MiniMaxM3VLForCausalLM,
    tokens: torch.Tensor,
    picks: Mapping[int, torch.Tensor] | None = None,
    blocks: Mapping[int, torch.Tensor] | None = None,
) -> Reference:
    """One pass over int64 ``tokens`` [n].

    Args:
        model: from :func:`load`.
        tokens: token ids.
        picks: experts to impose, by layer, int64 [n, k]; a row of -1, or None, leaves the model its own.
        blocks: blocks to impose, by layer, int64 [n, heads, K] with -1 for none; None leaves the model its own.
    """
    router_miss: dict[int, torch.Tensor] = {}
    block_miss: dict[int, torch.Tensor] = {}
    hidden: list[torch.Tensor] = []
    restore: list[tuple[nn.Module, Any]] = []
    hook = model.model.norm.register_forward_hook(lambda _module, _given, out: hidden.append(out.float()))

    def impose(module: nn.Module, forward: Any) -> None:
        restore.append((module, module.forward))
        module.forward = forward  # type: ignore[method-assign]

    for number, layer in enumerate(model.model.layers):
        if picks is not None and number in picks:
            impose(layer.mlp.gate, _imposed_router(layer.mlp.gate, picks[number], router_miss, number))
        if blocks is not None and number in blocks:
            impose(layer.self_attn.indexer, _imposed_indexer(layer.self_attn.indexer, blocks[number], block_miss, number))
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    finally:
        hook.remove()
        for module, forward in restore:
            module.forward = forward  # type: ignore[method-assign]
    return Reference(
        logits=logits,
        hidden_rms=hidden[0].square().mean().sqrt().item(),
        router_miss=router_miss,
        block_miss=block_miss,
    )


def _imposed_router(router: nn.Module, picks: torch.Tensor, miss: dict[int, torch.Tensor], number: int) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]).to(router.weight.dtype), router.weight)
        scores = torch.sigmoid(logits.float())
        key = scores + router.e_score_correction_bias
        taken = torch.where(picks < 0, key.topk(picks.shape[1], dim=1).indices, picks)
        left_out = key.scatter(1, taken, float("-inf")).amax(dim=1)
        miss[number] = left_out - key.gather(1, taken).amin(dim=1)
        weights = scores.gather(1, taken)
        return logits, weights / weights.sum(dim=-1, keepdim=True), taken

    return forward


def _imposed_indexer(indexer: nn.Module, blocks: torch.Tensor, miss: dict[int, torch.Tensor], number: int) -> Any:
    def forward(hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], _cache: object, positions: torch.Tensor) -> torch.Tensor:
        count, size = hidden.shape[1], indexer.block_size
        query = indexer.q_norm(indexer.q_proj(hidden).view(1, count, -1, indexer.head_dim)).transpose(1, 2)
        key = indexer.k_norm(indexer.k_proj(hidden).view(1, count, 1, indexer.head_dim)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        scores = (query.float() @ key.float().transpose(-1, -2))[0].transpose(0, 1)
        total = -(-count // size)
        scores = scores.masked_fill(torch.arange(count) > positions[0, :, None, None], float("-inf"))
        scores = functional.pad(scores, (0, total * size - count), value=float("-inf")).unflatten(-1, (total, size)).amax(dim=-1)
        own = (positions[0] // size)[:, None, None]
        block = torch.arange(total)
        visible = block <= own
        taken = (blocks.unsqueeze(-1) == block).any(dim=2)
        # The own block is always taken, whatever its score.
        worst = scores.masked_fill(~taken | (block == own), float("inf")).amin(dim=-1)
        best = scores.masked_fill(taken | ~visible, float("-inf")).amax(dim=-1)
        norms = query.float().norm(dim=-1)[0].transpose(0, 1) * key.float().norm(dim=-1).mean()
        miss[number] = (best - worst) / norms
        return blocks.transpose(0, 1)[None]

    return forward
