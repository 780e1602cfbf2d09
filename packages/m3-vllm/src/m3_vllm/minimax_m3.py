"""Fixed facts of the MiniMax-M3 architecture that vLLM's classes and m3's both build on (MiniMax-M3 facts: text config)."""

from __future__ import annotations

ARCHITECTURE = "MiniMaxM3SparseForCausalLM"
"""The text model; the vision-language wrapper resolves it by this name."""
DENSE_LAYERS = 3
"""Layers before the first sparse one."""
HEAD_DIM = 128
"""Size of attention heads and of index heads."""
BLOCK_TOKENS = 128
"""Tokens of one block of the sparse attention, and of one page of the caches."""
ROTARY_DIM = 64
"""Leading dimensions of a head that rotate."""
