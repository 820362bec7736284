"""The metrics that an engine counts, and their sum with the reports of its fronts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from actors.wire.adapter_entry import AdapterState
from actors.wire.metrics import ENGINE_METRICS, MetricValues, Snapshot, all_at_zero
from actors.wire.process_meter import CPU, MEMORY, of_this_process
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.core.engine import EngineCore
from runtime.core.request_state import RequestState
from runtime.core.scheduler import Scheduler


class EngineMetrics:
    """An engine's own figures, counted by its step thread, and the sum of its fronts' reports.

    Once a step, in this order: before_submit, submitted, before_collect, collected, emitted. A step gives one token to
    each row. All rows with a token in the step before share one latency, so the cost is per step, not per token."""

    def __init__(self, config: EngineConfig, info: ModelInfo, num_restarts: int) -> None:
        self._cache_config = {  # other projects' routers read the first two
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
        self.sampled_at = self.last_at = -1.0  # monotonic times of the step just collected and the one before
        self.sampled_at_wall = 0.0
        self._step_from = self._wait_from = 0.0
        self._runners_idle = self._is_busy = False
        self._num_tokens = 0
        self._num_moved_tokens = 0  # tokens in resumed prompts, which another engine has counted
        self.processes = of_this_process("engine")  # the actor adds the processes of its runners
        self._fronts = all_at_zero()
        self._reporting = threading.Lock()  # each front reports from its own thread

    def before_submit(self, num_in_flight: int, is_busy: bool) -> None:
        """Note whether runners are idle before a step. `is_busy`: a result was just collected."""
        self._runners_idle, self._is_busy = not num_in_flight, is_busy

    def submitted(self, admitted: list[RequestState]) -> None:
        if not self._runners_idle and not admitted:
            return
        now = time.monotonic()
        for state in admitted:
            if not state.owner.admitted_at:  # else it returns after a preemption
                state.owner.admitted_at = now
                if len(state.request.token_ids) > state.prompt_len and state.params.prompt_logprobs is None:
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
        """Count a step's tokens, all but `num_others` directly after a token of the same stream.

        `num_prompt` is the total length of prompts that got their first token."""
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
        is_paused: bool = False,
    ) -> Snapshot:
        """Add a front's figures, and return the total for all fronts and the engine, with the fronts' resident bytes.

        The step thread counts meanwhile, without a lock: each figure is correct, two may differ by a step. Counts of
        names that are not in `adapters` are dropped, so that old names do not accumulate."""
        adapters = adapters or {}
        total, stats = all_at_zero(), core.current_stats()
        total.add(self.figures)
        with self._reporting:
            self._fronts.add(figures)
            by_adapter = self._fronts.numbers["callboard:adapter_requests"]
            for name in by_adapter.keys() - adapters.keys():
                del by_adapter[name]
            total.add(self._fronts)
        for name, value in {
            "vllm:num_requests_running": stats.running,
            "vllm:num_requests_waiting": stats.waiting,
            "vllm:kv_cache_usage_perc": (stats.blocks_total - stats.blocks_available) / stats.blocks_total,
            "callboard:sleep_level": sleep_level,
            "callboard:paused": is_paused,
            "callboard:weight_serial": 0 if core.scheduler.info.weights is None else core.scheduler.info.weights.serial,
            "vllm:prefix_cache_queries": stats.prompt_tokens if self._counts_cache else 0,
            "callboard:state_snapshots": stats.snapshots,
            "callboard:state_snapshots_evicted": stats.snapshots_evicted,
            "vllm:prefix_cache_hits": stats.prompt_tokens_cached,
            "callboard:images_encoded": stats.images_encoded,
            "vllm:prompt_tokens": stats.prompt_tokens - self._num_moved_tokens,
            "vllm:generation_tokens": self._num_tokens,
            "vllm:num_preemptions": stats.preemptions,
            "vllm:spec_decode_num_drafts": stats.drafts,
            "vllm:spec_decode_num_draft_tokens": stats.draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": stats.accepted_draft_tokens,
        }.items():
            total.count(name, by=value)
        for figures_of in core.extras.stats:
            for name, value in figures_of().items():
                if (metric := f"callboard:kv_{name}") in ENGINE_METRICS:  # figures of the tier
                    total.count(metric, by=value)
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
        """Return the names of adapters in use, as labels for vllm:lora_requests_info."""
        names = {digest: name for name, state in list(adapters.items()) for digest in (state.held, state.digest)}
        running = {state.request.adapter for state in list(scheduler.running)}
        waiting = {state.request.adapter for state in list(scheduler.requests.values())} - running
        labels = (("running_lora_adapters", running), ("waiting_lora_adapters", waiting))
        named = {label: ",".join(sorted(names[d] for d in digests if d and d in names)) for label, digests in labels}
        return {"max_lora": str(self._max_loras), **named}
