"""What binds m3 to vLLM; the only modules of m3 that import it."""

from __future__ import annotations

from m3_vllm.minimax_m3 import ARCHITECTURE

CPU_MODEL = "m3_vllm.adapters.cpu.model:MiniMaxM3ForCPU"


def register_adapters() -> None:
    """Register the model classes of this process's platform by name, so that nothing is imported before a MiniMax-M3 is loaded.

    Does nothing where m3 has no adapter for the platform. Silent: it runs in every process of every model.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    ModelRegistry.register_model(ARCHITECTURE, CPU_MODEL)
