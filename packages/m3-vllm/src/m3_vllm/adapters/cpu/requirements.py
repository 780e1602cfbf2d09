"""What the CPU model can run; everything else is refused before a weight is read, with all reasons at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig

from m3_core.errors import RefusalError
from m3_vllm.minimax_m3 import BLOCK_TOKENS, HEAD_DIM

FIXED: dict[str, Any] = {
    "hidden_act": "swigluoai",
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
    "head_dim": HEAD_DIM,
    "tie_word_embeddings": False,
}
"""Fields of the text configuration with the one value that the published checkpoints have."""


def check(vllm_config: VllmConfig) -> None:
    """Refuse what the CPU model does not run.

    Raises:
        RefusalError: with every reason.
    """
    reasons = [*_architecture(vllm_config.model_config.hf_text_config), *_engine(vllm_config)]
    if reasons:
        raise RefusalError(reasons, "to run this MiniMax-M3 on a CPU")


def _architecture(config: Any) -> Iterator[str]:
    for name, needed in FIXED.items():
        value = getattr(config, name, None)
        if value != needed:
            yield f"{name} is {value!r}, needed {needed!r}"
    # transformers folds the plain rotation into the same field, as type "default".
    scaling = getattr(config, "rope_scaling", None) or {}
    if scaling.get("rope_type", "default") != "default":
        yield f"rope_scaling is of type {scaling['rope_type']!r}; only the plain rotation is supported"
    shared = getattr(config, "shared_intermediate_size", config.intermediate_size)
    if shared != config.intermediate_size:
        yield f"shared_intermediate_size {shared} differs from intermediate_size {config.intermediate_size}: one tensor holds both"
    sparse = getattr(config, "sparse_attention_config", None) or {}
    for name, needed in {"sparse_index_dim": HEAD_DIM, "sparse_block_size": BLOCK_TOKENS, "sparse_score_type": "max"}.items():
        if sparse.get(name) != needed:
            yield f"sparse_attention_config.{name} is {sparse.get(name)!r}, needed {needed!r}"
    if sparse.get("sparse_num_index_heads") != config.num_key_value_heads:
        yield f"{sparse.get('sparse_num_index_heads')} index heads for {config.num_key_value_heads} key-value heads: they must be equal"
    attention, experts = list(sparse.get("sparse_attention_freq") or ()), list(config.moe_layer_freq)
    if attention != experts or len(experts) != config.num_hidden_layers:
        yield (
            f"sparse attention on layers {attention} and experts on {experts} of {config.num_hidden_layers}: both must mark the same layers"
        )
    if list(sparse.get("sparse_disable_index_value") or ()) != attention:
        yield "an index branch with values of its own (sparse_disable_index_value) is not supported"


def _engine(vllm_config: VllmConfig) -> Iterator[str]:
    config = vllm_config.model_config.hf_text_config
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    ranks = parallel.tensor_parallel_size
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            yield f"{name} is {getattr(parallel, name)}, needed 1"
    if parallel.enable_expert_parallel:
        yield "expert parallelism is on; the experts are split by columns over the tensor-parallel ranks"
    for name, width in {
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "dense_intermediate_size": config.dense_intermediate_size,
    }.items():
        if width % ranks:
            yield f"{name} {width} is no multiple of tensor parallelism {ranks}"
    if config.num_key_value_heads % ranks and ranks % config.num_key_value_heads:
        yield f"{config.num_key_value_heads} key-value heads and tensor parallelism {ranks}: one must divide the other"
    if vllm_config.model_config.dtype != torch.bfloat16:
        yield f"dtype is {vllm_config.model_config.dtype}, needed torch.bfloat16 (--dtype bfloat16)"
    if cache.cache_dtype not in ("auto", "bfloat16"):
        yield f"kv_cache_dtype is {cache.cache_dtype!r}, needed 'auto' or 'bfloat16'"
    if cache.block_size != BLOCK_TOKENS:
        yield f"block_size is {cache.block_size}, needed {BLOCK_TOKENS}: a page is one block of the sparse attention"
    index_dtype = vllm_config.attention_config.resolve_indexer_kv_dtype("bf16")
    if index_dtype != "bf16":
        yield f"indexer_kv_dtype is {index_dtype!r}, needed 'bf16'"
    if vllm_config.quant_config is not None:
        yield f"quantisation {vllm_config.quant_config.get_name()!r} of the checkpoint; give a BF16 one (experts can be quantised at load)"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding is on"
    if vllm_config.lora_config is not None:
        yield "LoRA is on"
