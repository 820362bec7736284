"""A front's request figures, and how they reach GET /metrics, the request log, spans and Ray's metrics.

A front reads the clock when a request arrives, at its first token and at its end, never per token. Times that cross
processes are wall-clock seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actors.wire.engine_client import EngineClient, EngineRefusal
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.process_meter import CPU, MEMORY, of_this_process
from runtime.base.types import Request
from serve_app.observability.context import ChoiceStats, RequestContext, RequestSink
from serve_app.observability.request_line import RequestLines
from serve_app.protocol.errors import ApiError

if TYPE_CHECKING:
    from serve_app.observability.ray_metrics import RayMetrics

logger = logging.getLogger("ray.serve")

_REPORT_PERIOD_S = 1.0
_CLIENT_LEFT = 499


class RequestRecord:
    """A running API request and the engine requests of its choices."""

    def __init__(self, metrics: ServiceMetrics, context: RequestContext) -> None:
        self._metrics, self._context = metrics, context
        self._adapter = context.model if context.model not in ("", metrics.model) else ""
        self.choices: list[ChoiceStats] = []

    @contextmanager
    def choice(self, request: Request) -> Iterator[ChoiceStats]:
        """Measure one engine request within the block. Its reason of end stays "abort" unless the block sets it."""
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
    """One front's metrics by engine, and the exposition of the whole application."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self.model = client, model
        self._pending: defaultdict[str, MetricValues] = defaultdict(MetricValues)  # unreported figures by engine
        self.lines: RequestLines | None = RequestLines(model)  # None without a request log
        self._sinks: list[RequestSink] = []
        self._ray: RayMetrics | None = None
        self.counts_process = True  # one of a front's models reports its process's figures
        self._process, self._cpu_s = of_this_process("front"), 0.0  # reported CPU seconds

    def add_sink(self, sink: RequestSink) -> None:
        """Call `sink` too for every API request that ends."""
        self._sinks.append(sink)

    @contextmanager
    def request(self, request_id: str, context: RequestContext, num_choices: int) -> Iterator[RequestRecord]:
        """Measure an accepted API request within the block; it has `num_choices` choices of each prompt."""
        record, status = RequestRecord(self, context), 200
        try:
            yield record
        except ApiError as e:
            status, context.error = e.status, str(e)
            raise
        except Exception as e:
            status, context.error = 500, f"{type(e).__name__}: {e}"
            raise
        except BaseException:  # closed or cancelled: the client no longer reads
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
        longest: dict[int, ChoiceStats] = {}  # each prompt's longest choice
        for choice in choices:
            if not choice.refusal:
                prompt = int(choice.request.request_id.rpartition("-")[2]) // num_choices
                longest[prompt] = max(longest.get(prompt, choice), choice, key=lambda c: c.num_output)
        for choice in longest.values():
            figures = self._pending[choice.engine]
            figures.histogram("vllm:request_params_n").observe(num_choices)
            figures.histogram("vllm:request_max_num_generation_tokens").observe(choice.num_output)

    def observe(self, choice: ChoiceStats, arrived_at: float, submitted_at: float) -> None:
        """Count a choice that has ended. A refused choice has few figures."""
        request, figures = choice.request, self._pending[choice.engine]

        def observe(name: str, value: float) -> None:
            figures.histogram(name).observe(max(value, 0.0))  # two machines' clocks may differ

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
        """Measure the delay until the caller has taken the choice's last output; over HTTP, it is written then."""
        lag = self._pending[choice.engine].histogram("callboard:delivery_lag_seconds")
        lag.observe(max(time.time() - choice.last_at, 0.0))

    def waits_for_grammar(self) -> None:
        """Count a request that waits for its grammar."""
        self._pending[""].count("callboard:grammar_waits")

    def waited_for_grammar(self, seconds: float) -> None:
        """Measure the wait for a grammar."""
        self._pending[""].histogram("callboard:grammar_seconds").observe(seconds)

    # ---- to the engines, and from them ------------------------------------------------------------------------------

    async def report(self) -> dict[str, Snapshot]:
        """Send each engine its new figures, and return all engines' snapshots.

        Figures for an unreachable engine wait for the next report. Figures for an ended engine, or without one, go to
        another engine, so sums lose nothing."""
        memory: dict[str, float] = {}
        if self.counts_process:
            memory, cpu = self._process.read()
            self._pending[""].count(CPU, "front", cpu["front"] - self._cpu_s)
            self._cpu_s = cpu["front"]
        pending, self._pending = self._pending, defaultdict(MetricValues)
        if engines := self._client.engines():
            for engine in pending.keys() - set(engines):
                pending[engines[0]].add(pending.pop(engine))
            pending[engines[0]].numbers[MEMORY] = memory
        snapshots = await self._client.report(pending)
        for engine, figures in pending.items():
            figures.numbers.pop(MEMORY, None)
            if engine not in snapshots:
                self._pending[engine].add(figures)
            elif self._ray is not None:
                await self._ray.publish(engine, figures)
        return snapshots

    async def run(self, ray_metrics: RayMetrics, publishes_engines: Callable[[], bool]) -> None:
        """Report until the front ends, and publish its figures through Ray.

        While `publishes_engines()` is true, this front also publishes the engines' own figures."""
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
            except Exception as e:  # one second's counts may be lost; the next report continues
                if last != (last := f"{type(e).__name__}: {e}"):
                    logger.exception("metrics could not be reported")
