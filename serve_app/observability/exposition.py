"""The Prometheus text of an application's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from actors.wire.metrics import METRICS, Snapshot

_OLDER_NAMES = {  # vLLM metric names that some dashboards still read
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # states by sleep level


def exposition(models: Mapping[str, Mapping[str, Snapshot]]) -> bytes:
    """Return the Prometheus text of all engines' snapshots, by model and by the engine's id."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(models))
    return generate_latest(registry)


class _Collector:
    """Snapshots as prometheus_client's metric families."""

    def __init__(self, models: Mapping[str, Mapping[str, Snapshot]]) -> None:
        self._num_engines = {model: len(snapshots) for model, snapshots in models.items()}
        self._snapshots = {
            (model, engine): snapshot for model, snapshots in models.items() for engine, snapshot in snapshots.items()
        }

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
        for at, snapshot in self._snapshots.items():
            swapped.add_metric(at, 0)
            level = snapshot.figures.numbers["callboard:sleep_level"][""]
            for i, state in enumerate(_SLEEP_STATES):
                sleep.add_metric([*at, state], i == level)
        yield swapped
        yield sleep
        engines = GaugeMetricFamily(
            "callboard:engines", "Engines of a model; 0 while it sleeps.", labels=["model_name"]
        )
        for model, num_engines in self._num_engines.items():
            engines.add_metric([model], num_engines)
        yield engines

    def _family(self, shown: str, name: str) -> Iterator[Metric]:
        """Yield the metric `name` of all engines under the name `shown`."""
        families: dict[str, Any] = {
            "gauge": GaugeMetricFamily,
            "counter": CounterMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        metric = METRICS[name]
        family = families[metric.kind](shown, metric.help, labels=["model_name", "engine", *metric.label.split()])
        for at, snapshot in self._snapshots.items():
            if metric.kind == "histogram":
                histogram = snapshot.figures.histograms[name]
                family.add_metric(at, list(histogram.cumulative()), sum(histogram.sums))
                continue
            for label_value, value in snapshot.figures.numbers[name].items():
                family.add_metric([*at, *label_value.split(" ")] if metric.label else at, value)
        yield family

    def _gauge(self, name: str, about: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, about, labels=["model_name", "engine", *labels])

    def _infos(
        self, name: str, about: str, value: float, by_engine: Mapping[tuple[str, str], dict[str, str]]
    ) -> Metric:
        """Return a gauge with facts about each engine as labels; it omits engines without facts."""
        labels: list[str] = next((list(facts) for facts in by_engine.values() if facts), [])
        family = self._gauge(name, about, *labels)
        for at, facts in by_engine.items():
            if facts:
                family.add_metric([*at, *(facts.get(label, "") for label in labels)], value)
        return family
