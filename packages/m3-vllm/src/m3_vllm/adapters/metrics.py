"""m3's figures on vLLM's own /metrics, from the ranks' status boards.

vLLM finds ``M3StatLogger`` through the entry point group ``vllm.stat_logger_plugins`` and runs it in the API server. Usually the boards
are read when /metrics is scraped, so that a scrape after a response shows all of it. With several API servers vLLM merges files that only
ordinary metric objects write; there the boards are copied to such objects whenever vLLM records an iteration.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from m3_comm.reaper import reap
from m3_vllm.status import RankStatus, board_instance, read_boards

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
    "fault_rank": "The rank that failed, if the fault word is set",
    "fault_site": "Number of the site at which the fault arose, if the fault word is set",
}
LABELS = ("engine", "rank")


class BoardCollector(Collector):
    """Reads the boards of every engine of this process at each scrape."""

    def __init__(self) -> None:
        self._instances: dict[str, str] = {}

    def watch(self, engine: str, instance: str) -> None:
        """Show an engine's ranks; a later engine of the same index replaces the earlier one."""
        self._instances[engine] = instance

    def collect(self) -> Iterator[Metric]:
        """One family a field, one sample a rank."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, text in COUNTERS.items():
            families[name] = CounterMetricFamily(f"m3_{name}", text, labels=LABELS)
        for name, text in GAUGES.items():
            families[name] = GaugeMetricFamily(f"m3_{name}", text, labels=LABELS)
        for engine, instance in self._instances.items():
            for status in read_boards(instance):
                for name, family in families.items():
                    family.add_metric([engine, str(status.rank)], getattr(status, name))
        yield from families.values()


class BoardCopier:
    """Copies the boards into ordinary metric objects, for vLLM's multi-process mode."""

    def __init__(self) -> None:
        self._counters = {name: Counter(f"m3_{name}", text, LABELS) for name, text in COUNTERS.items()}
        self._gauges = {name: Gauge(f"m3_{name}", text, LABELS, multiprocess_mode="mostrecent") for name, text in GAUGES.items()}
        self._seen: dict[tuple[str, int], RankStatus] = {}

    def copy(self, engine: str, instance: str) -> None:
        """Bring the objects up to what the boards say now."""
        for status in read_boards(instance):
            key = (engine, status.rank)
            before = self._seen.get(key, RankStatus(status.rank, status.world_size))
            for name, counter in self._counters.items():
                counter.labels(engine, str(status.rank)).inc(max(0, getattr(status, name) - getattr(before, name)))
            for name, gauge in self._gauges.items():
                gauge.labels(engine, str(status.rank)).set(getattr(status, name))
            self._seen[key] = status


# Prometheus has one registry a process, and refuses a name that is registered twice.
_collector: BoardCollector | None = None
_copier: BoardCopier | None = None


class M3StatLogger(StatLoggerBase):
    """One a vLLM engine; shows that engine's ranks."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        global _collector, _copier
        self._engine = str(engine_index)
        self._instance = board_instance(vllm_config.instance_id, engine_index)
        # A worker that was killed could not take its board away. This process ends after the workers; once is enough for all engines.
        atexit.unregister(reap)
        atexit.register(reap)
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            _copier = _copier or BoardCopier()
            return
        if _collector is None:
            _collector = BoardCollector()
            REGISTRY.register(_collector)
        _collector.watch(self._engine, self._instance)

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Copy the boards where a scrape cannot read them; the arguments are vLLM's own statistics, which vLLM shows itself."""
        if _copier is not None:
            _copier.copy(self._engine, self._instance)

    def log_engine_initialized(self) -> None:
        """Nothing to do: the ranks' boards say what there is."""
