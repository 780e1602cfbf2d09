"""What binds m3 to vLLM; the only modules of m3 that import it."""

from __future__ import annotations

import structlog

from m3_vllm.minimax_m3 import ARCHITECTURE

log = structlog.get_logger(__name__)

CPU_MODEL = "m3_vllm.adapters.cpu.model:MiniMaxM3ForCPU"


def register_adapters() -> None:
    """Register the model classes of this process's platform by name, so that nothing is imported before a MiniMax-M3 is loaded.

    Registering twice sets the same entry twice.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        log.debug("plugin_idle", reason="no adapter for this platform", platform=current_platform.device_name)
        return
    ModelRegistry.register_model(ARCHITECTURE, CPU_MODEL)
    log.debug("architecture_registered", architecture=ARCHITECTURE, model=CPU_MODEL)
