"""Engine and front metrics: names, types and buckets, and values that can be added up.

    front     counts per request, in one MetricValues for each engine
        | FrontFigures, about once a second and when a client requests /metrics: the increase since the last one
        v
    engine    counts per step; adds the reports of its fronts        -> Snapshot: all figures of this engine

Only an engine's process holds its totals. So every front can return them, and the counts that a front has reported
survive its end. A new engine begins at zero, like any exporter after a restart. Names, types and buckets are
vLLM's where vLLM has the metric."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from actors.wire.process_meter import CPU, MEMORY, ROLES
from runtime.base.types import MAX_MATCHED_TOKENS

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip # noqa: E501
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHORT_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (*(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5)), 1_000_000)


class Metric(NamedTuple):
    """One metric: its kind, its help text, and its buckets or its own label."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    bounds: tuple[float, ...] = ()
    label: str = ""  # added to model_name and engine; several labels and their values are separated by spaces
    label_values: tuple[str, ...] = ("",)  # values that are present from the start, at zero


def _gauge(help: str) -> Metric:
    return Metric("gauge", help)


def _counter(help: str, label: str = "", *values: str) -> Metric:
    return Metric("counter", help, (), label, values if label else ("",))


def _histogram(help: str, bounds: tuple[float, ...]) -> Metric:
    return Metric("histogram", help, bounds)


_POSITIONS = tuple(map(str, range(MAX_MATCHED_TOKENS)))

ENGINE_METRICS = {  # counted by the engine
    "vllm:num_requests_running": _gauge("Requests that hold a slot."),
    "vllm:num_requests_waiting": _gauge("Requests in the queue, preempted ones included."),
    "vllm:kv_cache_usage_perc": _gauge("KV blocks in use by requests; 1 is all."),
    "callboard:state_snapshots": _gauge("Recurrent states of prompts' prefixes that requests can continue."),
    "callboard:state_snapshots_evicted": _counter("Snapshots of states that made room for others."),
    "callboard:sleep_level": _gauge("How deep an engine sleeps; 0: it is awake."),
    "callboard:paused": _gauge("1 while an engine is paused."),
    "callboard:stalls": _counter(
        "Times that a live request had no step for 5 s without a cause; the log has the stacks."
    ),
    "vllm:prefix_cache_queries": _counter("Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": _counter("Prompt tokens found in the prefix cache."),
    "callboard:images_encoded": _counter("Images that the encoder computed; others were in the pool or a cache."),
    "callboard:kv_tier_used_bytes": _gauge("Bytes of KV blocks and states in the machine's tier, which engines share."),
    "callboard:kv_tier_size_bytes": _gauge("Bytes that the tier may take; 0: the engine has none."),
    "callboard:kv_tier_hit_tokens": _counter("Prompt tokens that were loaded from the tier."),
    "callboard:kv_tier_loaded_bytes": _counter("Bytes that were loaded from the tier."),
    "callboard:kv_tier_disk_tokens": _counter("Prompt tokens that were read from the tier's disk."),
    "callboard:kv_tier_disk_bytes": _counter("Bytes that were read from the tier's disk."),
    "callboard:kv_tier_stored_bytes": _counter("Bytes that were stored in the tier."),
    "callboard:kv_tier_damaged": _counter("Entries of the tier that were lost, or whose checksum was wrong."),
    "callboard:kv_tier_loads_in_flight": _gauge("Copies of blocks and states from the tier that have not ended."),
    "callboard:kv_tier_saved_seconds": _counter("Time to compute the loaded tokens, less the time to load them."),
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
    "callboard:weight_serial": _gauge("Updates of the weights before those in use; 0: the checkpoint's."),
    "callboard:weight_updates": _counter("Ended updates of the weights.", "outcome", "applied", "failed"),
    "callboard:weight_update_seconds": _counter(
        "Time of updates of the weights: from their start until they are applied, the pause of steps, and the store.",
        "phase",
        "receive",
        "apply",
        "store",
    ),
    "callboard:restarts": _counter("Starts after the first.", "actor", "engine", "runners"),
    MEMORY: Metric("gauge", "Resident memory of processes; a GPU's is not in it.", (), "role", ROLES),
    CPU: _counter("CPU time of processes, also of those that have ended.", "role", *ROLES),
}
METRICS = ENGINE_METRICS | {  # and by fronts
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
    "callboard:engine_waits": _counter(
        "Requests that began to wait at a front for an engine or its weights; as many more than "
        "callboard:engine_wait_seconds_count wait now."
    ),
    "callboard:engine_wait_seconds": _histogram(
        "A request's wait at a front for an engine or its weights.", _REQUEST_S
    ),
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
    """The count and the sum of the observations in each bucket. The last bucket has an infinite bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    sums: list[float]

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1), [0.0] * (len(bounds) + 1))

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        at = bisect_left(self.bounds, value)
        self.counts[at] += count
        self.sums[at] += value * count

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield Prometheus' buckets: (upper bound, observations up to it)."""
        bounds = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        return zip(bounds, accumulate(self.counts), strict=True)

    def add(self, other: Histogram, sign: int = 1) -> None:
        """Add the observations of another histogram with the same bounds, or subtract them (sign -1)."""
        self.counts = [mine + sign * count for mine, count in zip(self.counts, other.counts, strict=True)]
        self.sums = [mine + sign * total for mine, total in zip(self.sums, other.sums, strict=True)]


class MetricValues(msgspec.Struct, array_like=True):
    """Values of metrics: numbers by name and label value ("" without a label), and histograms by name."""

    numbers: dict[str, dict[str, float]] = {}
    histograms: dict[str, Histogram] = {}

    def __bool__(self) -> bool:
        return bool(self.numbers or self.histograms)

    def count(self, name: str, label_value: str = "", by: float = 1) -> None:
        values = self.numbers.setdefault(name, {})
        values[label_value] = values.get(label_value, 0) + by

    def histogram(self, name: str) -> Histogram:
        """Return the histogram of this name, created on first use."""
        if (found := self.histograms.get(name)) is None:
            found = self.histograms[name] = Histogram.of(METRICS[name].bounds)
        return found

    def add(self, other: MetricValues, sign: int = 1) -> None:
        """Add all values of `other`, or subtract them (sign -1)."""
        for name, values in other.numbers.items():
            for label_value, value in values.items():
                self.count(name, label_value, sign * value)
        for name, histogram in other.histograms.items():
            mine = self.histograms.setdefault(name, Histogram.of(histogram.bounds))
            mine.add(histogram, sign)


class Snapshot(msgspec.Struct, array_like=True, tag=9):
    """One engine's figures, and the labels of two metrics that carry their values in labels."""

    figures: MetricValues
    cache_config: dict[str, str]  # labels of vllm:cache_config_info: cache and weights
    lora: dict[str, str] = {}  # labels of vllm:lora_requests_info: adapter names; empty if max_loras is 0


def all_at_zero() -> MetricValues:
    """Return every metric at zero, so that each is present from the start."""
    figures = MetricValues()
    for name, metric in METRICS.items():
        if metric.kind == "histogram":
            figures.histogram(name)
        else:
            figures.numbers[name] = dict.fromkeys(metric.label_values, 0.0)
    return figures
