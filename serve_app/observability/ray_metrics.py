"""Metrics through ray.util.metrics, for Ray's "Serve LLM" dashboard (docs/operations.md).

They have vLLM's names: vllm_..., which Ray exports as ray_vllm_.... The dashboard joins them with Serve's request
counter by worker, so fronts publish them. Each front publishes its own requests; one front publishes the engines' own
figures too."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from ray.util import metrics as ray_metrics

from actors.wire.metrics import ENGINE_METRICS, METRICS, Histogram, MetricValues, Snapshot

_AT_ONCE = 200  # observations
_MAX_GONE = 64  # ended engines with stored figures, since they may come back
_LABELS = ("model_name", "engine", "ReplicaId")


class RayMetrics:
    """The metrics of one replica's process."""

    def __init__(self, model: str, replica_id: str, published: dict[str, Any] | None = None) -> None:
        """`published` has Ray's metrics by name, which all models of a process share."""
        self._tags = {"model_name": model, "ReplicaId": replica_id}
        self._metrics = {} if published is None else published
        self._last: dict[str, MetricValues] = {}  # last published figures by engine
        self._gone: dict[str, None] = {}  # ended engines, the earliest first

    async def publish(self, engine: str, new: MetricValues) -> None:
        """Publish new counts."""
        tags = {**self._tags, "engine": engine}
        for name, values in new.numbers.items():
            if ":" not in name:
                continue  # process and HTTP figures, which Ray and Serve have themselves
            label = METRICS[name].label
            if label and not METRICS[name].label_values:
                continue  # labels with adapters' names, which Ray would store forever
            for label_value, value in values.items():
                labelled = {**tags, label: label_value} if label else tags
                if METRICS[name].kind == "gauge":
                    self._metric(name).set(value, labelled)
                elif value > 0:
                    self._metric(name).inc(value, labelled)
        for name, histogram in new.histograms.items():
            # Ray takes one observation at a time (2 us), so a busy second must not block streams. A bucket's
            # observations are sent as their mean, since Ray stores only buckets.
            for count, total in zip(histogram.counts, histogram.sums, strict=True):
                for i in range(count):
                    self._metric(name, histogram).observe(total / count, tags)
                    if i % _AT_ONCE == _AT_ONCE - 1:
                        await asyncio.sleep(0)

    async def publish_engine(self, engine: str, snapshot: Snapshot) -> None:
        """Publish an engine's own counts since its last publication.

        Counts before this process's first look belong to the front that published then."""
        own = MetricValues(
            {name: dict(v) for name, v in snapshot.figures.numbers.items() if name in ENGINE_METRICS},
            {name: h for name, h in snapshot.figures.histograms.items() if name in ENGINE_METRICS},
        )
        last, self._last[engine] = self._last.get(engine), own
        self._gone.pop(engine, None)
        new = MetricValues()
        if last is not None:
            new.add(own)
            if not _is_behind(own, last):
                new.add(last, -1)
        for name, metric in METRICS.items():
            if metric.kind == "gauge":
                new.numbers[name] = own.numbers[name]
        await self.publish(engine, new)
        tags = {**self._tags, "engine": engine, **snapshot.cache_config}
        self._metric("vllm:cache_config_info", labels=tuple(tags)).set(1, tags)

    def clear_gauges(self, engines: Collection[str]) -> None:
        """Set the gauges of all other engines to zero, since Ray shows last values until this process ends."""
        for engine in self._last.keys() - engines - self._gone.keys():
            for name, metric in METRICS.items():
                if metric.kind == "gauge" and ":" in name:
                    self._metric(name).set(0, {**self._tags, "engine": engine})
            self._gone[engine] = None
        while len(self._gone) > _MAX_GONE:
            del self._last[oldest := next(iter(self._gone))], self._gone[oldest]

    def _metric(self, name: str, histogram: Histogram | None = None, labels: tuple[str, ...] = ()) -> Any:
        if (found := self._metrics.get(name)) is None:
            metric = METRICS.get(name)
            label = (metric.label,) if metric is not None and metric.label else ()
            about = (name.replace(":", "_"), metric.help if metric else "The KV cache and the weights, in labels.")
            keys = labels or (*_LABELS, *label)
            if histogram is not None:
                found = ray_metrics.Histogram(*about, boundaries=list(histogram.bounds), tag_keys=keys)
            elif metric is None or metric.kind == "gauge":
                found = ray_metrics.Gauge(*about, tag_keys=keys)
            else:
                found = ray_metrics.Counter(*about, tag_keys=keys)
            self._metrics[name] = found
        return found


def _is_behind(now: MetricValues, last: MetricValues) -> bool:
    """Return whether the engine restarted: its number of steps fell."""
    step = "callboard:step_seconds"
    return sum(now.histograms[step].counts) < sum(last.histograms[step].counts)
