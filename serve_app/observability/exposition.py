"""The Prometheus text of an application's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from actors.wire.metrics import METRICS, Snapshot

_OLDER_NAMES = {  # of vLLM's metrics, which some dashboards still read
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by the level of sleep


def exposition(model: str, snapshots: Mapping[str, Snapshot]) -> bytes:
    """Return the Prometheus text of the snapshots of all engines by their ids."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(model, snapshots))
    return generate_latest(registry)


class _Collector:
    """Snapshots as prometheus_client's metric families."""

    def __init__(self, model: str, snapshots: Mapping[str, Snapshot]) -> None:
        self._model, self._snapshots = model, snapshots

    def collect(self) -> Iterator[Metric]:
        for name in METRICS:
            yield from self._family(name, name)
        for older, name in _OLDER_NAMES.items():
            yield from self._family(older, name)
        caches = {engine: snapshot.cache_config for engine, snapshot in self._snapshots.items()}
        adapters = {engine: snapshot.lora for engine, snapshot in self._snapshots.items()}
        yield self._infos("vllm:cache_config_info", "The KV cache and the weights, in labels.", 1, caches)
        about = "Adapters of requests that run and that wait, in labels; the value is the time."
        yield self._infos("vllm:lora_requests_info", about, time.time(), adapters)
        swapped = self._gauge("vllm:num_requests_swapped", "Always 0: preempted requests are computed again.")
        sleep = self._gauge("vllm:engine_sleep_state", "1 for the state that an engine is in.", "sleep_state")
        for engine, snapshot in self._snapshots.items():
            swapped.add_metric([self._model, engine], 0)
            level = snapshot.figures.numbers["callboard:sleep_level"][""]
            for at, state in enumerate(_SLEEP_STATES):
                sleep.add_metric([self._model, engine, state], at == level)
        yield swapped
        yield sleep

    def _family(self, shown: str, name: str) -> Iterator[Metric]:
        """Yield the metric `name` of all engines under the name `shown`."""
        families: dict[str, Any] = {
            "gauge": GaugeMetricFamily,
            "counter": CounterMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        metric = METRICS[name]
        family = families[metric.kind](shown, metric.help, labels=["model_name", "engine", *metric.label.split()])
        for engine, snapshot in self._snapshots.items():
            at = [self._model, engine]
            if metric.kind == "histogram":
                histogram = snapshot.figures.histograms[name]
                family.add_metric(at, list(histogram.cumulative()), sum(histogram.sums))
                continue
            for label_value, value in snapshot.figures.numbers[name].items():
                family.add_metric([*at, *label_value.split(" ")] if metric.label else at, value)
        yield family

    def _gauge(self, name: str, about: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, about, labels=["model_name", "engine", *labels])

    def _infos(self, name: str, about: str, value: float, by_engine: Mapping[str, dict[str, str]]) -> Metric:
        """Return a gauge with facts about each engine as labels; it omits engines without facts."""
        labels: list[str] = next((list(facts) for facts in by_engine.values() if facts), [])
        family = self._gauge(name, about, *labels)
        for engine, facts in by_engine.items():
            if facts:
                family.add_metric([self._model, engine, *(facts.get(label, "") for label in labels)], value)
        return family
