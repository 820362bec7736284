"""The counts of a replica's requests; GET /metrics, the line and the spans of each; the same for Ray's metrics.

A request's times are read when it arrives, at its first token and at its end: nothing is counted per token. Times that
cross processes are the wall clock's, in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from starlette.types import Scope

from actors.wire.engine_client import EngineClient, EngineRefusal
from actors.wire.metrics import METRICS, MetricValues, Snapshot
from actors.wire.process_meter import CPU, MEMORY, of_this_process
from runtime.spec.types import Request, RequestOutput
from serve_app.http.auth import path_within
from serve_app.protocol.errors import ApiError
from serve_app.request_log.line import RequestLines

if TYPE_CHECKING:
    from serve_app.service.ray_metrics import RayMetrics

logger = logging.getLogger("ray.serve")

_REPORT_PERIOD_S = 1.0
_CLIENT_LEFT = 499


@dataclass(slots=True)
class RequestContext:
    """The circumstances of an API request, known before it is read."""

    arrived_at: float = field(default_factory=time.time)
    traceparent: str | None = None  # W3C Trace Context
    model: str = ""  # that answers it: the model's name or an adapter's; known when it has been read
    method: str = ""
    path: str = ""  # within the application; empty for a call by a Serve handle
    ignored_fields: list[str] = field(default_factory=list)  # of its body
    error: str = ""  # why it was refused or failed
    has_line: bool = False  # in the request log

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """Return the circumstances of the request with this scope; the first call is at its arrival."""
        known: Self | None = scope.get("context")
        if known is None:
            traceparent = next((value for name, value in scope["headers"] if name == b"traceparent"), None)
            known = scope["context"] = cls(
                traceparent=None if traceparent is None else traceparent.decode("latin-1"),
                method=scope["method"],
                path=path_within(scope),
            )
        return known


@dataclass(slots=True)
class ChoiceStats:
    """One engine request as this replica saw it."""

    request: Request
    adapter: str = ""  # its name; "": it asks for the model itself
    engine: str = ""  # the id of the one that serves it; "": none does yet
    num_output: int = 0
    num_cached: int = 0
    num_expected: int | None = None  # what a choice among engines had expected of it; None: there was none to make
    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_at: float = 0.0  # when the engine sampled its first token; 0: it has none
    last_at: float = 0.0
    reason: str = "abort"  # until it is known better
    refusal: str = ""  # why, if it was refused

    def moved_to(self, engine: str) -> None:
        self.engine = engine

    def note(self, output: RequestOutput) -> None:
        """An output of the engine."""
        if not output.sampled_at:  # an end without a token
            return
        if not self.first_at:
            self.first_at, self.num_cached = output.first_sampled_at or output.sampled_at, output.num_cached
            self.queued_s, self.prefill_s = output.queued_s, output.prefill_s
            self.num_expected = output.num_expected
        self.num_output += len(output.token_ids)
        self.last_at = output.sampled_at


# Is told of every API request when it has ended: its id, its circumstances, its choices and its status.
RequestLog = Callable[[str, RequestContext, list[ChoiceStats], int], None]


class RequestRecord:
    """An API request while it runs: its choices are observed as each ends, the whole is told of at its end."""

    def __init__(self, metrics: ServiceMetrics, context: RequestContext) -> None:
        self._metrics, self._context = metrics, context
        self._adapter = context.model if context.model not in ("", metrics.model) else ""
        self.choices: list[ChoiceStats] = []

    @contextmanager
    def choice(self, request: Request) -> Iterator[ChoiceStats]:
        """Around all that is done for one engine request. If it is not told otherwise, it was aborted."""
        choice = ChoiceStats(request, self._adapter)
        self.choices.append(choice)
        submitted_at = time.time()
        try:
            yield choice
        except ApiError as e:
            if e.status >= 500:
                choice.reason = "error"
            raise
        except EngineRefusal as e:
            choice.reason, choice.refusal = "refused", e.reason.value
            raise
        finally:
            self._metrics.observe(choice, self._context.arrived_at, submitted_at)


class ServiceMetrics:
    """The metrics of one replica, by engine, and what has to be done to show all of the application."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self.model = client, model
        self._pending: defaultdict[str, MetricValues] = defaultdict(MetricValues)  # by engine: not reported yet
        self.lines: RequestLines | None = RequestLines(model)  # None: requests have no lines
        self._sinks: list[RequestLog] = []
        self._ray: RayMetrics | None = None
        self._process, self._cpu_s = of_this_process("front"), 0.0  # CPU seconds that were reported

    def add_sink(self, sink: RequestLog) -> None:
        """Tell `sink` too of every API request that has ended."""
        self._sinks.append(sink)

    @contextmanager
    def request(self, request_id: str, context: RequestContext, num_choices: int) -> Iterator[RequestRecord]:
        """Around an API request that was accepted, with so many choices of each prompt."""
        record, status = RequestRecord(self, context), 200
        try:
            yield record
        except ApiError as e:
            status, context.error = e.status, str(e)
            raise
        except Exception as e:
            status, context.error = 500, f"{type(e).__name__}: {e}"
            raise
        except BaseException:  # closed or cancelled: nobody reads it any more
            if not all(choice.reason in ("stop", "length") for choice in record.choices):
                status = _CLIENT_LEFT
            raise
        finally:
            self._observe_prompts(record.choices, num_choices)
            for sink in self._sinks:
                sink(request_id, context, record.choices, status)
            if self.lines is not None:
                self.lines(request_id, context, record.choices, status)

    def answered(self, context: RequestContext, request_id: str, handler: str, status: int) -> None:
        """Count an HTTP request, and write its line unless it has one; `handler` is the path of its route."""
        self._pending[""].count("http_requests", f"{handler} {context.method} {status // 100}xx")
        if self.lines is not None and not context.has_line:
            self.lines.short(request_id, context, status)

    def _observe_prompts(self, choices: list[ChoiceStats], num_choices: int) -> None:
        longest: dict[int, ChoiceStats] = {}  # of each prompt
        for choice in choices:
            if not choice.refusal:
                prompt = int(choice.request.request_id.rpartition("-")[2]) // num_choices
                longest[prompt] = max(longest.get(prompt, choice), choice, key=lambda c: c.num_output)
        for choice in longest.values():
            figures = self._pending[choice.engine]
            figures.histogram("vllm:request_params_n").observe(num_choices)
            figures.histogram("vllm:request_max_num_generation_tokens").observe(choice.num_output)

    def observe(self, choice: ChoiceStats, arrived_at: float, submitted_at: float) -> None:
        """A choice has ended; of a refused one there is little to tell."""
        request, figures = choice.request, self._pending[choice.engine]

        def observe(name: str, value: float) -> None:
            figures.histogram(name).observe(max(value, 0.0))  # clocks of two machines may differ

        observe("callboard:ingress_seconds", submitted_at - arrived_at)
        if choice.refusal:
            figures.count("callboard:requests_refused", choice.refusal)
            return
        figures.count("vllm:request_success", choice.reason)
        if choice.adapter:
            figures.count("callboard:adapter_requests", choice.adapter)
        observe("vllm:request_prompt_tokens", request.prompt_len)
        observe("vllm:request_generation_tokens", choice.num_output)
        observe("vllm:request_params_max_tokens", request.params.max_tokens)
        observe("vllm:e2e_request_latency_seconds", (choice.last_at or time.time()) - arrived_at)
        if choice.num_expected is not None:
            figures.count("callboard:routed_cached_tokens", "expected", choice.num_expected)
            figures.count("callboard:routed_cached_tokens", "found", choice.num_cached)
        if choice.first_at:
            decode_s = choice.last_at - choice.first_at
            observe("vllm:time_to_first_token_seconds", choice.first_at - arrived_at)
            observe("vllm:request_queue_time_seconds", choice.queued_s)
            observe("vllm:request_prefill_time_seconds", choice.prefill_s)
            observe("vllm:request_decode_time_seconds", decode_s)
            observe("vllm:request_inference_time_seconds", choice.prefill_s + decode_s)
            if choice.num_output > 1:
                observe("vllm:request_time_per_output_token_seconds", decode_s / (choice.num_output - 1))

    def delivered(self, choice: ChoiceStats) -> None:
        """Whoever asked has taken the last of it: over HTTP, it has been written."""
        lag = self._pending[choice.engine].histogram("callboard:delivery_lag_seconds")
        lag.observe(max(time.time() - choice.last_at, 0.0))

    def waits_for_grammar(self) -> None:
        """A request does, from now on; no engine serves it yet."""
        self._pending[""].count("callboard:grammar_waits")

    def waited_for_grammar(self, seconds: float) -> None:
        """Before it was submitted."""
        self._pending[""].histogram("callboard:grammar_seconds").observe(seconds)

    # ---- to the engines, and from them ------------------------------------------------------------------------------

    async def report(self) -> dict[str, Snapshot]:
        """Give every engine what was counted; all figures by engine. What an engine away could not be given is kept,
        and what was counted for one that is gone, or for none, is given to another: nothing is lost to the sums."""
        used = self._process.read()
        self._pending[""].count(CPU, "front", used.cpu["front"] - self._cpu_s)
        self._cpu_s = used.cpu["front"]
        pending, self._pending = self._pending, defaultdict(MetricValues)
        if engines := self._client.engines():
            for engine in pending.keys() - set(engines):
                pending[engines[0]].add(pending.pop(engine))
            pending[engines[0]].numbers[MEMORY] = used.memory
        snapshots = await self._client.report(pending)
        for engine, figures in pending.items():
            figures.numbers.pop(MEMORY, None)
            if engine not in snapshots:
                self._pending[engine].add(figures)
            elif self._ray is not None:
                await self._ray.publish(engine, figures)
        return snapshots

    async def exposition(self) -> bytes:
        """The Prometheus text of the whole application: its engines, and all replicas as of their last reports."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self.model, await self.report()))
        return generate_latest(registry)

    async def run(self, ray_metrics: RayMetrics, publishes_engines: Callable[[], bool]) -> None:
        """Report for as long as the replica lives, and publish through Ray: its own figures, and, where
        `publishes_engines()`, those that only engines know."""
        self._ray, last = ray_metrics, ""
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            try:
                if publishes_engines():
                    for engine, snapshot in (await self.report()).items():
                        await ray_metrics.publish_engine(engine, snapshot)
                    ray_metrics.clear_gauges(self._client.engines())
                else:
                    await self.report()
            except Exception as e:  # counts of one second may be lost, those of the next ones are not
                if last != (last := f"{type(e).__name__}: {e}"):
                    logger.exception("metrics could not be reported")


_OLDER_NAMES = {  # of vLLM's metrics, which dashboards still read
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by the level of sleep


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
        """The metric `name` of all engines, under the name `shown`."""
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
        """A gauge whose labels are facts about each engine; an engine without facts has none."""
        labels: list[str] = next((list(facts) for facts in by_engine.values() if facts), [])
        family = self._gauge(name, about, *labels)
        for engine, facts in by_engine.items():
            if facts:
                family.add_metric([self._model, engine, *(facts.get(label, "") for label in labels)], value)
        return family
