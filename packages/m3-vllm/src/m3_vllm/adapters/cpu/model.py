"""MiniMax-M3 for vLLM on a CPU: the class that the plugin names to vLLM, and the layers under it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import structlog
import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from m3_vllm.adapters.cpu.arithmetic import clamped_swiglu
from m3_vllm.adapters.cpu.attention import DenseAttention, SparseAttention
from m3_vllm.adapters.cpu.experts import FfnArithmetic
from m3_vllm.adapters.cpu.ffn_half import SparseFfn, StockFfnHalf, sum_over_ranks
from m3_vllm.adapters.cpu.norm import GemmaNorm
from m3_vllm.adapters.cpu.requirements import check
from m3_vllm.adapters.cpu.weights import load_weights
from m3_vllm.settings import Settings

log = structlog.get_logger(__name__)

FfnHalf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""(part, residual, slots) -> (out, new residual): the stock half of a sparse layer, or its launch."""


class DenseMLP(nn.Module):
    """The network of a dense layer; its output is this rank's part, not reduced."""

    def __init__(self, config: Any, arithmetic: FfnArithmetic, prefix: str) -> None:
        """Sizes come from the text configuration; columns are split over the tensor-parallel ranks."""
        super().__init__()
        self.arithmetic = arithmetic
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.dense_intermediate_size] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.dense_intermediate_size, config.hidden_size, bias=False, reduce_results=False, prefix=f"{prefix}.down_proj"
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Part of the output of bf16 ``rows`` [S, H], bf16 [S, H]."""
        fused, _ = self.gate_up_proj(rows)
        gate, up = fused.chunk(2, dim=-1)
        middle = clamped_swiglu(
            gate,
            up,
            alpha=self.arithmetic.swiglu_alpha,
            beta=self.arithmetic.swiglu_beta,
            limit=self.arithmetic.swiglu_limit,
        )
        part, _ = self.down_proj(middle.to(rows.dtype))
        return part  # type: ignore[no-any-return]


class DenseLayer(nn.Module):
    """One of the leading layers: full attention and a dense network."""

    def __init__(self, config: Any, arithmetic: FfnArithmetic, cache_config: CacheConfig, prefix: str) -> None:
        """Sizes come from the text configuration."""
        super().__init__()
        self.self_attn = DenseAttention(config, cache_config, f"{prefix}.self_attn")
        self.mlp = DenseMLP(config, arithmetic, f"{prefix}.mlp")
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer; ``hidden`` and ``residual`` as at every layer boundary, see :class:`MiniMaxM3CPUModel`."""
        rows, residual = self.input_layernorm.add(hidden, residual)
        part = self.self_attn(positions, rows)
        rows, residual = self.post_attention_layernorm.add(sum_over_ranks(part), residual)
        return sum_over_ranks(self.mlp(rows)), residual


class SparseLayer(nn.Module):
    """A layer with block-sparse attention and experts.

    Attributes:
        stock_half: the second half in stock form.
    """

    def __init__(self, config: Any, arithmetic: FfnArithmetic, prefix: str) -> None:
        """Sizes come from the text configuration."""
        super().__init__()
        self.self_attn = SparseAttention(config, f"{prefix}.self_attn")
        self.block_sparse_moe = SparseFfn(
            config.hidden_size,
            config.num_local_experts,
            config.intermediate_size,
            rank=get_tensor_model_parallel_rank(),
            ranks=get_tensor_model_parallel_world_size(),
        )
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.stock_half = StockFfnHalf(
            self.post_attention_layernorm,
            self.block_sparse_moe.gate,
            self.block_sparse_moe.e_score_correction_bias,
            self.block_sparse_moe.experts,
            arithmetic,
        )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor, half: FfnHalf
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer whose second half is ``half``; ``hidden`` and ``residual`` as at every layer boundary."""
        rows, residual = self.input_layernorm.add(hidden, residual)
        return half(self.self_attn(positions, rows), residual, self.self_attn.slots())


class MiniMaxM3CPUModel(nn.Module):
    """Embedding, layers and final norm.

    A layer's input is the reduced output of the previous layer, not yet added to the residual, and the residual after the
    previous layer's attention; the next norm adds them (MiniMax-M3 facts: boundary contract). The first layer gets the embedding
    as its output and zeros as its residual, whose sum is the embedding itself.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Build the layers that the text configuration lists, dense or sparse."""
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        arithmetic = FfnArithmetic(
            rms_norm_eps=config.rms_norm_eps,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_beta=getattr(config, "swiglu_beta", 1.0),
            swiglu_limit=config.swiglu_limit,
            routed_scaling_factor=config.routed_scaling_factor,
            top_k=config.num_experts_per_tok,
        )
        self.arithmetic = arithmetic
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens")
        self.layers = nn.ModuleList(
            SparseLayer(config, arithmetic, f"{prefix}.layers.{layer}")
            if sparse
            else DenseLayer(config, arithmetic, vllm_config.cache_config, f"{prefix}.layers.{layer}")
            for layer, sparse in enumerate(config.moe_layer_freq)
        )
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def sparse_layers(self) -> dict[int, SparseLayer]:
        """The sparse layers by layer number, in order."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, SparseLayer)}

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, halves: dict[int, FfnHalf]) -> torch.Tensor:
        """Run every layer.

        Args:
            hidden: bf16 [S, H], embeddings.
            positions: int64 [S].
            halves: the second half of each sparse layer that this step does not run in stock form, by layer number.

        Returns:
            bf16 [S, H], normed.
        """
        residual = torch.zeros_like(hidden)
        for number, layer in enumerate(self.layers):
            if isinstance(layer, SparseLayer):
                hidden, residual = layer(positions, hidden, residual, halves.get(number, layer.stock_half))
            else:
                hidden, residual = layer(positions, hidden, residual)
        normed, _ = self.norm.add(hidden, residual)
        return normed


class MiniMaxM3ForCPU(nn.Module):
    """MiniMax-M3's text model as vLLM's model interface wants it.

    Attributes:
        settings: m3's settings, the same on every rank.
        model: embedding, layers, norm.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the model, its weights unset.

        Raises:
            RefusalError: with every reason, where the CPU model cannot run the checkpoint or the engine's configuration.
        """
        super().__init__()
        check(vllm_config)
        self.settings = Settings.from_additional_config(vllm_config.additional_config)
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = MiniMaxM3CPUModel(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of int ``input_ids`` [S], bf16 [S, H]."""
        return self.model.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """One step of the decoder; vLLM's forward context holds its metadata and slots.

        Returns:
            bf16 [S, H], normed hidden states.
        """
        hidden = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)  # type: ignore[arg-type]
        return self.model(hidden, positions, {})  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of the rows to sample from, [rows, vocabulary]; None on ranks that do not sample."""
        return self.logits_processor(self.lm_head, hidden_states)  # type: ignore[no-any-return]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint under its published names; returns the names of the parameters filled.

        Raises:
            ConfigurationError: a tensor is unknown, has another shape, or is missing.
        """
        return load_weights(self, weights)
