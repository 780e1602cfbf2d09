"""m3's figures on vLLM's own /metrics: a stat logger that copies the ranks' status boards into Prometheus metrics.

Found by vLLM through the entry point group ``vllm.stat_logger_plugins``; runs in the API server.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from m3_vllm.status import RankStatus, read_boards

COUNTERS = {
    "fused_steps": "Steps that ran the fused launches",
    "stock_steps": "Steps that ran the stock layers",
    "launches": "Fused launches made by the host, all layers together",
    "outputs": "Sampled steps",
    "resets": "Collective epoch resets",
}
GAUGES = {
    "epoch": "Launches since the last reset, as the device counts them",
    "fault": "1 if the fault word is set",
    "fault_site": "Number of the site at which the fault arose",
}

_counters: dict[str, Counter] = {}
_gauges: dict[str, Gauge] = {}


def _register() -> None:
    if _counters:
        return
    for name, text in COUNTERS.items():
        _counters[name] = Counter(f"m3_{name}", text, ["engine", "rank"])
    for name, text in GAUGES.items():
        _gauges[name] = Gauge(f"m3_{name}", text, ["engine", "rank"], multiprocess_mode="mostrecent")


class M3StatLogger(StatLoggerBase):
    """Copies status boards to Prometheus whenever vLLM records an iteration."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._instance = vllm_config.instance_id
        self._engine = str(engine_index)
        self._seen: dict[int, RankStatus] = {}
        _register()

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Refresh from the boards; the arguments are vLLM's own statistics, which vLLM shows itself."""
        self.refresh()

    def log_engine_initialized(self) -> None:
        """Show the ranks as soon as the engine is up."""
        self.refresh()

    def refresh(self) -> None:
        """Read every rank's board once."""
        for status in read_boards(self._instance):
            labels = (self._engine, str(status.rank))
            before = self._seen.get(status.rank, RankStatus(status.rank, status.world_size))
            for name, counter in _counters.items():
                counter.labels(*labels).inc(max(0, getattr(status, name) - getattr(before, name)))
            for name, gauge in _gauges.items():
                gauge.labels(*labels).set(getattr(status, name))
            self._seen[status.rank] = status
