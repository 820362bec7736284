"""The metrics of engines and replicas: the names, types and buckets of all, and values that can be added up.

    replica   counts per request, in MetricValues of its own for each engine
        | Report, about once a second and when somebody asks: what is new since the last one
        v
    engine    counts per step; adds what its replicas report        -> Snapshot: all of this engine

An engine's process is thus the only holder of its totals: whichever replica is asked can tell them, and what a replica
that died had reported stays counted. A new engine begins at zero, as a restarted process of any exporter does.
Names, types and buckets are vLLM's where vLLM has the metric.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from actors.wire.adapter_entry import AdapterState
from actors.wire.process_meter import CPU, MEMORY, ROLES, of_this_process
from runtime.core.engine import EngineCore
from runtime.core.plan import MAX_DRAFT_TOKENS
from runtime.core.request_state import RequestState
from runtime.core.scheduler import Scheduler
from runtime.spec.config import EngineConfig, ModelInfo

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip # noqa: E501
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHORT_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (*(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5)), 1_000_000)


class Metric(NamedTuple):
    """One metric: what it is, and, by kind, its buckets, or its label beside model_name and engine."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    bounds: tuple[float, ...] = ()
    label: str = ""  # several are separated by spaces, as are their values
    label_values: tuple[str, ...] = ("",)  # those that are there from the start, at zero


def _gauge(help: str) -> Metric:
    return Metric("gauge", help)


def _counter(help: str, label: str = "", *values: str) -> Metric:
    return Metric("counter", help, (), label, values if label else ("",))


def _histogram(help: str, bounds: tuple[float, ...]) -> Metric:
    return Metric("histogram", help, bounds)


_POSITIONS = tuple(map(str, range(MAX_DRAFT_TOKENS)))

ENGINE_METRICS = {  # what an engine counts itself
    "vllm:num_requests_running": _gauge("Requests that hold a slot."),
    "vllm:num_requests_waiting": _gauge("Requests in the queue, preempted ones included."),
    "vllm:kv_cache_usage_perc": _gauge("KV blocks in use by requests; 1 is all."),
    "callboard:sleep_level": _gauge("How deep an engine sleeps; 0: it is awake."),
    "vllm:prefix_cache_queries": _counter("Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": _counter("Prompt tokens found in the prefix cache."),
    "vllm:prompt_tokens": _counter("Prompt tokens of admitted requests."),
    "vllm:generation_tokens": _counter("Tokens sampled for requests."),
    "vllm:num_preemptions": _counter("Times that a request lost its slot to another."),
    "vllm:spec_decode_num_drafts": _counter("Drafts that were verified."),
    "vllm:spec_decode_num_draft_tokens": _counter("Tokens of these drafts."),
    "vllm:spec_decode_num_accepted_tokens": _counter("Tokens of these drafts that were accepted."),
    "vllm:spec_decode_num_accepted_tokens_per_pos": _counter(
        "Accepted tokens by their position in the draft.", "position", *_POSITIONS
    ),
    "vllm:inter_token_latency_seconds": _histogram(
        "Between two tokens of a request, as sampled; once a token.", _TOKEN_S
    ),
    "vllm:iteration_tokens_total": _histogram(
        "Of a step: tokens sampled, and prompts whose first token is among them.", _STEP_TOKENS
    ),
    "callboard:structured_outputs": _counter(
        "Outputs bound to a grammar, by what makes their masks; after a preemption once more.",
        "served_by",
        "lazy",
        "eager",
    ),
    "callboard:step_seconds": _histogram("A step: from its submission, or the result before, to its result.", _SHORT_S),
    "callboard:engine_wait_seconds": _histogram("The engine's wait for a step's result.", _SHORT_S),
    "callboard:runner_wait_seconds": _histogram(
        "Between a result and the next plan while the runners had none.", _SHORT_S
    ),
    "callboard:restarts": _counter("Starts after the first.", "actor", "engine", "runners"),
    MEMORY: Metric("gauge", "Resident memory of processes; a GPU's is not in it.", (), "role", ROLES),
    CPU: _counter("CPU time of processes, also of those that have ended.", "role", *ROLES),
}
METRICS = ENGINE_METRICS | {  # and what replicas count
    "vllm:request_success": _counter("Finished requests.", "finished_reason", "stop", "length", "abort", "error"),
    "vllm:time_to_first_token_seconds": _histogram("From a request's arrival to its first token.", _TTFT_S),
    "vllm:request_time_per_output_token_seconds": _histogram("Mean time between a request's tokens.", _TOKEN_S),
    "vllm:e2e_request_latency_seconds": _histogram("From arrival to the last token.", _REQUEST_S),
    "vllm:request_queue_time_seconds": _histogram("From the queue to a slot.", _REQUEST_S),
    "vllm:request_prefill_time_seconds": _histogram("From a slot to the first token.", _REQUEST_S),
    "vllm:request_decode_time_seconds": _histogram("From first to last token.", _REQUEST_S),
    "vllm:request_inference_time_seconds": _histogram("From a slot to the last token.", _REQUEST_S),
    "vllm:request_prompt_tokens": _histogram("Tokens of a prompt.", _LENGTHS),
    "vllm:request_generation_tokens": _histogram("Tokens of an answer.", _LENGTHS),
    "vllm:request_params_max_tokens": _histogram("Tokens that an answer may have.", _LENGTHS),
    "vllm:request_params_n": _histogram("Choices of a prompt.", (1, 2, 5, 10, 20)),
    "vllm:request_max_num_generation_tokens": _histogram("Tokens of the longest choice of a prompt.", _LENGTHS),
    "callboard:grammar_waits": _counter(
        "Requests that began to wait for a grammar; as many more than callboard:grammar_seconds_count wait now."
    ),
    "callboard:grammar_seconds": _histogram("A request's wait for its grammar.", _SHORT_S),
    "callboard:ingress_seconds": _histogram("From a request's arrival to its submission to an engine.", _SHORT_S),
    "callboard:delivery_lag_seconds": _histogram(
        "From the sampling of a request's last token until it was written.", _SHORT_S
    ),
    "callboard:routed_cached_tokens": _counter(
        "Cached prompt tokens of requests for which an engine was chosen: expected by the choice, found by the engine.",
        "kind",
        "expected",
        "found",
    ),
    "callboard:adapter_requests": _counter("Finished requests by adapter, until its name is forgotten.", "adapter"),
    "http_requests": _counter(
        "Requests by the path of their route, but not probes and files of the page.", "handler method status"
    ),
    "callboard:requests_refused": _counter(
        "Requests that were not served, by the reason.", "reason", "never", "busy", "draining", "late"
    ),
}


class Histogram(msgspec.Struct, array_like=True):
    """Observations by bucket: how many, and what they add up to. The last bucket has no bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    sums: list[float]

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1), [0.0] * (len(bounds) + 1))

    def observe(self, value: float, count: int = 1) -> None:
        """`value`, `count` times."""
        at = bisect_left(self.bounds, value)
        self.counts[at] += count
        self.sums[at] += value * count

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Prometheus' buckets: (upper bound, observations at most that)."""
        bounds = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        return zip(bounds, accumulate(self.counts), strict=True)

    def add(self, other: Histogram, sign: int = 1) -> None:
        """Add (or, with sign -1, take away) what the other, of the same bounds, has observed."""
        self.counts = [mine + sign * count for mine, count in zip(self.counts, other.counts, strict=True)]
        self.sums = [mine + sign * total for mine, total in zip(self.sums, other.sums, strict=True)]


class MetricValues(msgspec.Struct, array_like=True):
    """Values of metrics: numbers by name and label value ("" where there is no label), and histograms by name."""

    numbers: dict[str, dict[str, float]] = {}
    histograms: dict[str, Histogram] = {}

    def __bool__(self) -> bool:
        return bool(self.numbers or self.histograms)

    def count(self, name: str, label_value: str = "", by: float = 1) -> None:
        values = self.numbers.setdefault(name, {})
        values[label_value] = values.get(label_value, 0) + by

    def histogram(self, name: str) -> Histogram:
        """The one of this name, to observe with; made on first use."""
        if (found := self.histograms.get(name)) is None:
            found = self.histograms[name] = Histogram.of(METRICS[name].bounds)
        return found

    def add(self, other: MetricValues, sign: int = 1) -> None:
        """Add (or, with sign -1, take away) all that `other` has."""
        for name, values in other.numbers.items():
            for label_value, value in values.items():
                self.count(name, label_value, sign * value)
        for name, histogram in other.histograms.items():
            mine = self.histograms.setdefault(name, Histogram.of(histogram.bounds))
            mine.add(histogram, sign)


class Snapshot(msgspec.Struct, array_like=True, tag=9):
    """All figures of one engine, and the labels of two metrics whose values are in these."""

    figures: MetricValues
    cache_config: dict[str, str]  # of vllm:cache_config_info: its cache and its weights
    lora: dict[str, str] = {}  # of vllm:lora_requests_info: names of adapters; empty if there is no room for any


class EngineMetrics:
    """An engine's own figures, counted by its step thread, and the sum of its replicas'.

    Once a step, in this order: before_submit, submitted, before_collect, collected, emitted. A step gives one token to
    each row, so all rows that also had one in the step before share one latency: the cost is per step, not per token.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, num_restarts: int) -> None:
        self._cache_config = {  # tools that pick an engine for a request read the first two
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_kv_blocks - 1),
            "cache_dtype": info.dtype,
            "weights": info.weight_formats,
            "enable_prefix_caching": str(config.prefix_cache),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
        }
        self._counts_cache, self._max_loras = config.prefix_cache, config.max_loras
        self.figures = all_at_zero()
        self.figures.count("callboard:restarts", "engine", num_restarts)
        histograms = self.figures.histograms
        self.token_latency = histograms["vllm:inter_token_latency_seconds"]
        self._step = histograms["callboard:step_seconds"]
        self._step_tokens = histograms["vllm:iteration_tokens_total"]
        self._engine_wait = histograms["callboard:engine_wait_seconds"]
        self._runner_wait = histograms["callboard:runner_wait_seconds"]
        self.sampled_at = self.last_at = -1.0  # of the step just collected and the one before, on the monotonic clock
        self.sampled_at_wall = 0.0
        self._step_from = self._wait_from = 0.0
        self._runners_idle = self._is_busy = False
        self._num_tokens = 0
        self._num_moved_tokens = 0  # of prompts that were computed elsewhere before, and counted there
        self.processes = of_this_process("engine")  # and others, where an actor has them
        self._replicas = all_at_zero()
        self._reporting = threading.Lock()  # replicas report from threads of their own

    def before_submit(self, num_in_flight: int, is_busy: bool) -> None:
        """`is_busy`: this step follows another at once."""
        self._runners_idle, self._is_busy = not num_in_flight, is_busy

    def submitted(self, admitted: list[RequestState]) -> None:
        if not self._runners_idle and not admitted:
            return
        now = time.monotonic()
        for state in admitted:
            if not state.owner.admitted_at:  # else it comes back after a preemption
                state.owner.admitted_at = now
                if len(state.request.token_ids) > state.prompt_len:
                    self._num_moved_tokens += state.prompt_len
        if self._runners_idle:
            self._step_from = now
            if self._is_busy:
                self._runner_wait.observe(now - self.sampled_at)

    def before_collect(self) -> None:
        self._wait_from = time.monotonic()

    def collected(self) -> None:
        self.last_at, self.sampled_at, self.sampled_at_wall = self.sampled_at, time.monotonic(), time.time()
        self._engine_wait.observe(self.sampled_at - self._wait_from)
        self._step.observe(self.sampled_at - self._step_from)
        self._step_from = self.sampled_at

    def emitted(self, num_tokens: int, num_others: int, num_prompt: int) -> None:
        """All but `num_others` of these tokens follow one of the step before; some are the first of prompts of
        `num_prompt` tokens in all."""
        self._num_tokens += num_tokens
        self._step_tokens.observe(num_tokens + num_prompt)
        if num_tokens > num_others:
            self.token_latency.observe(self.sampled_at - self.last_at, num_tokens - num_others)

    def report(
        self,
        figures: MetricValues,
        core: EngineCore,
        num_rebuilds: int,
        sleep_level: int = 0,
        adapters: Mapping[str, AdapterState] | None = None,
        fronts_memory: float = 0.0,
    ) -> Snapshot:
        """Add a replica's figures; all of them and the engine's own, with the resident bytes of its fronts.

        Read without a lock while the step thread counts: each figure is right, together they may be a step apart.
        Counts of names that are not in `adapters` are dropped, or each name that ever was would stay for ever."""
        adapters = adapters or {}
        total, stats = all_at_zero(), core.current_stats()
        total.add(self.figures)
        with self._reporting:
            self._replicas.add(figures)
            by_adapter = self._replicas.numbers["callboard:adapter_requests"]
            for name in by_adapter.keys() - adapters.keys():
                del by_adapter[name]
            total.add(self._replicas)
        for name, value in {
            "vllm:num_requests_running": stats.running,
            "vllm:num_requests_waiting": stats.waiting,
            "vllm:kv_cache_usage_perc": (stats.blocks_total - stats.blocks_available) / stats.blocks_total,
            "callboard:sleep_level": sleep_level,
            "vllm:prefix_cache_queries": stats.prompt_tokens if self._counts_cache else 0,
            "vllm:prefix_cache_hits": stats.prompt_tokens_cached,
            "vllm:prompt_tokens": stats.prompt_tokens - self._num_moved_tokens,
            "vllm:generation_tokens": self._num_tokens,
            "vllm:num_preemptions": stats.preemptions,
            "vllm:spec_decode_num_drafts": stats.drafts,
            "vllm:spec_decode_num_draft_tokens": stats.draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": stats.accepted_draft_tokens,
        }.items():
            total.count(name, by=value)
        for position, value in enumerate(stats.accepted_by_position):
            total.count("vllm:spec_decode_num_accepted_tokens_per_pos", str(position), by=value)
        for served_by, value in (("lazy", stats.structured_lazy), ("eager", stats.structured_eager)):
            total.count("callboard:structured_outputs", served_by, by=value)
        total.count("callboard:restarts", "runners", num_rebuilds)
        used = self.processes.read()
        for name, by_role in ((MEMORY, used.memory | {"front": fronts_memory}), (CPU, used.cpu)):
            for role, value in by_role.items():
                total.count(name, role, by=value)
        return Snapshot(total, self._cache_config, self._lora(core.scheduler, adapters) if self._max_loras else {})

    def _lora(self, scheduler: Scheduler, adapters: Mapping[str, AdapterState]) -> dict[str, str]:
        """Names of adapters that requests have, as the labels of vllm:lora_requests_info."""
        names = {digest: name for name, state in list(adapters.items()) for digest in (state.held, state.digest)}
        running = {state.request.adapter for state in list(scheduler.running)}
        waiting = {state.request.adapter for state in list(scheduler.requests.values())} - running
        labels = (("running_lora_adapters", running), ("waiting_lora_adapters", waiting))
        named = {label: ",".join(sorted(names[d] for d in digests if d and d in names)) for label, digests in labels}
        return {"max_lora": str(self._max_loras), **named}


def all_at_zero() -> MetricValues:
    """Every metric, so that each is there from the start."""
    figures = MetricValues()
    for name, metric in METRICS.items():
        if metric.kind == "histogram":
            figures.histogram(name)
        else:
            figures.numbers[name] = dict.fromkeys(metric.label_values, 0.0)
    return figures
