"""The attention halves of dense and sparse layers, up to the output projection of this rank's heads, not reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import MinimaxM3QKVParallelLinearWithIndexer, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from m3_vllm.adapters.cpu.block_sparse import attend, insert_index_keys, insert_pairs, select_blocks
from m3_vllm.adapters.cpu.heads import norm_and_rotate
from m3_vllm.adapters.cpu.norm import GemmaNorm
from m3_vllm.adapters.cpu.paging import BlockSparseBackend, BlockSparseImpl, BlockSparseMetadata, IndexCache, register_cache_layer


class _Heads(nn.Module):
    """What dense and sparse attention share: head counts of this rank, output projection, norms, rotation."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.head_dim: int = config.head_dim
        self.heads: int = config.num_attention_heads // ranks
        self.kv_heads: int = max(1, config.num_key_value_heads // ranks)
        self.scale: float = self.head_dim**-0.5
        # Not reduced here: the sum over ranks belongs to the layer's second half.
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=False, reduce_results=False, prefix=f"{prefix}.o_proj"
        )
        self.q_norm = GemmaNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaNorm(self.head_dim, config.rms_norm_eps)
        self.rotary = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters={"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor},
        )

    def _rotated(self, heads: torch.Tensor, norm: GemmaNorm, positions: torch.Tensor) -> torch.Tensor:
        return norm_and_rotate(
            heads.reshape(heads.shape[0], -1, self.head_dim), norm.weight, norm.eps, self.rotary.cos_sin_cache[positions]
        )


class DenseAttention(_Heads):
    """Full causal attention over vLLM's own CPU backend."""

    def __init__(self, config: Any, cache_config: CacheConfig, prefix: str) -> None:
        """Sizes come from the text configuration; the heads are split over the tensor-parallel ranks."""
        super().__init__(config, prefix)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
        )
        self.attn = Attention(
            self.heads, self.head_dim, self.scale, num_kv_heads=self.kv_heads, cache_config=cache_config, prefix=f"{prefix}.attn"
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Attention of bf16 ``hidden`` [S, H]; returns this rank's part of the output projection, bf16 [S, H]."""
        fused, _ = self.qkv_proj(hidden)
        query, key, value = fused.split([width * self.head_dim for width in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        query = self._rotated(query, self.q_norm, positions).flatten(1)
        key = self._rotated(key, self.k_norm, positions).flatten(1)
        part, _ = self.o_proj(self.attn(query, key, value))
        return part  # type: ignore[no-any-return]


class SparseAttention(_Heads, AttentionLayerBase):
    """Attention over the blocks that the lightning indexer chooses; one index head per key-value head.

    Attributes:
        layer_name: key of this layer's metadata and slots in vLLM's forward context.
        kv_cache: bf16 [pages, kv heads, 128, 256] once vLLM has bound it: a token's key, then its value.
    """

    def __init__(self, config: Any, prefix: str) -> None:
        """Sizes come from the text configuration; the caches register themselves in vLLM's current configuration."""
        super().__init__(config, prefix)
        sparse = config.sparse_attention_config
        self.top_k: int = sparse["sparse_topk_blocks"]
        self.init_blocks: int = sparse.get("sparse_init_block", 0)
        self.local_blocks: int = sparse.get("sparse_local_block", 0)
        self.qkv_proj = MinimaxM3QKVParallelLinearWithIndexer(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            sparse["sparse_num_index_heads"],
            sparse["sparse_index_dim"],
            bias=False,
            prefix=f"{prefix}.qkv_proj",
        )
        self.index_q_norm = GemmaNorm(self.head_dim, config.rms_norm_eps)
        self.index_k_norm = GemmaNorm(self.head_dim, config.rms_norm_eps)
        self.layer_name = f"{prefix}.attn"
        # vLLM types the attribute for layers that delegate to a backend; this one attends itself.
        self.impl = BlockSparseImpl()  # type: ignore[assignment,no-untyped-call]
        self.index_cache = IndexCache(f"{self.layer_name}.index_cache")
        self.kv_cache = torch.tensor([])
        register_cache_layer(self.layer_name, self)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Backend of the keys and values."""
        return BlockSparseBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Keys and values of this rank's heads in bf16, paged like those of the dense layers."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_dim,
            head_size_v=self.head_dim,
            dtype=torch.bfloat16,
        )

    def metadata(self) -> BlockSparseMetadata | None:
        """This step's metadata of the main cache; None in a profiling run, which has none."""
        step = get_forward_context().attn_metadata
        return step.get(self.layer_name) if isinstance(step, dict) else None  # type: ignore[return-value]

    def slots(self) -> torch.Tensor | None:
        """This step's slot of each row, int64 [S], negative for padding; None in a profiling run."""
        step = get_forward_context().slot_mapping
        return step.get(self.layer_name) if isinstance(step, dict) else None

    def choose(self, index_query: torch.Tensor, positions: torch.Tensor, index: BlockSparseMetadata) -> torch.Tensor:
        """Blocks that each row attends to, by the index keys in the cache; as :func:`select_blocks`."""
        return select_blocks(
            index_query,
            self.index_cache.kv_cache,
            index.block_table,
            positions,
            index.request_bounds,
            top_k=self.top_k,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Attention of bf16 ``hidden`` [S, H]; returns this rank's part of the output projection, bf16 [S, H]."""
        fused, _ = self.qkv_proj(hidden)
        main, slots = self.metadata(), self.slots()
        if main is None or slots is None:
            return hidden.new_zeros(hidden.shape)
        context = get_forward_context()
        index: BlockSparseMetadata = context.attn_metadata[self.index_cache.prefix]  # type: ignore[assignment,call-overload]
        index_slots: torch.Tensor = context.slot_mapping[self.index_cache.prefix]  # type: ignore[call-overload]

        widths = (self.heads, self.kv_heads, self.kv_heads, self.kv_heads, 1)
        query, key, value, index_query, index_key = fused.split([width * self.head_dim for width in widths], dim=-1)
        rows = main.rows
        insert_pairs(self.kv_cache, slots, self._rotated(key, self.k_norm, positions), value.reshape(-1, self.kv_heads, self.head_dim))
        insert_index_keys(self.index_cache.kv_cache, index_slots, self._rotated(index_key, self.index_k_norm, positions).squeeze(1))
        chosen = self.choose(self._rotated(index_query, self.index_q_norm, positions)[:rows], positions[:rows], index)
        attended = query.new_zeros(query.shape[0], self.heads, self.head_dim)
        attended[:rows] = attend(
            self._rotated(query, self.q_norm, positions)[:rows],
            self.kv_cache,
            main.block_table,
            main.row_request,
            positions[:rows],
            chosen,
            self.scale,
        )
        part, _ = self.o_proj(attended.flatten(1))
        return part  # type: ignore[no-any-return]
