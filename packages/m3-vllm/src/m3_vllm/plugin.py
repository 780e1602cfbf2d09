"""The entry point that vLLM calls in every process it starts (group ``vllm.general_plugins``)."""

from __future__ import annotations

import importlib.util

import structlog

log = structlog.get_logger(__name__)


def register() -> None:
    """Make vLLM use m3's classes where it runs MiniMax-M3; idempotent.

    Called in the API server, the engine and every worker, for every model, so it stays cheap: it imports no model and touches
    no device. A process whose platform m3 has no adapter for is left as it was. Never raises: vLLM logs and drops a plugin
    that does, and a user of another model must not pay for m3's troubles (``m3 doctor`` reports them).
    """
    try:
        if importlib.util.find_spec("vllm") is None:
            return
        from m3_vllm.adapters import register_adapters

        register_adapters()
    except Exception as error:
        log.error("plugin_failed", error=repr(error), remedy="run `m3 doctor`")
