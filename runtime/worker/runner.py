"""ModelRunner: one rank's weights and KV cache. Its state can be rebuilt from the engine's requests (C8).

This file starts a runner: numerics, memory plan, weights, KV cache, warm-up. A group's ranks go through
it together, in phases. Steps are `CpuSteps` (torch kernels) or `GpuSteps` (Triton kernels).
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.shard import ALONE, Shard
from runtime.base.types import CallboardError
from runtime.base.weight_version import WeightVersion
from runtime.core.plan import StepPlan, StepResult
from runtime.kernels.cpu_support import obstacle
from runtime.kernels.linear.linear_torch import can_pack
from runtime.kernels.linear.tiles import multiplies_fp8
from runtime.kernels.numerics import Numerics
from runtime.kernels.triton_language import INTERPRETED
from runtime.models.kv_scales import scales_of_rank
from runtime.quant.at_load import quantized_at_load
from runtime.quant.model_formats import check_products, encodings_on_device, format_names
from runtime.quant.report import weight_report
from runtime.worker.cpu.cores import available_cores
from runtime.worker.cpu.cpu_steps import CpuSteps
from runtime.worker.extras import (
    NO_EXTRAS,
    BlockCopier,
    KernelParts,
    KernelsAhead,
    ReadsWeights,
    RunnerExtras,
    RunnerParts,
    SleepMemory,
    StepExtra,
    Take,
    UpdateParts,
    WeightUpdates,
)
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.kv_cache import KVCache
from runtime.worker.memory import MemoryPlan, available_memory, plan_memory, planned_cache, resize_kv
from runtime.worker.sources import ModelSource, image_info
from runtime.worker.state_cache import StateCache
from runtime.worker.warmup import WarmUp

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class ModelRunner:
    """Computes steps. Not thread-safe; plans are executed in the order of calls."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        shard: Shard | None = None,
        is_draft: bool = False,  # it drafts tokens for another model (runtime/assembly/draft.py)
        extras: RunnerExtras = NO_EXTRAS,
    ) -> None:
        """Without a shard, the runner has all of a model and is ready for steps. With a shard, it is a rank that has
        joined its group: send `handle` to the other ranks, then call `load` and `open`.

        Raises CallboardError if the model is damaged. Before any weight is read, it raises CallboardError if the model
        does not fit into memory or its weights cannot have the requested encoding."""
        self.numerics = numerics = choose_numerics(config)
        if config.pinned_acceptance is not None and numerics.deterministic:
            raise CallboardError("pinned_acceptance changes tokens; leave it out when deterministic is on.")
        self.config = config = config.sized_for(numerics.device.type)
        self.shard, self.is_draft, self._source, self._plugged = shard or ALONE, is_draft, source, extras
        self.eos_token_ids = source.eos_token_ids
        if numerics.device.type == "cpu":
            torch.set_num_threads(config.num_threads or max(1, available_cores() // self.shard.size))
        self._large_step_us = math.inf  # a decode step with many rows, if it was measured
        spec = quantized_at_load(source.spec, config, numerics.device.type, is_draft)
        own = spec.of_rank(self.shard)
        self.head = None if extras.head is None or is_draft else extras.head(config, source, own, numerics)
        if config.pinned_acceptance is not None and not is_draft:
            if self.head is None:
                raise CallboardError("pinned_acceptance needs a draft head; leave it out, or name a head as draft.")
            logger.warning("pinned_acceptance is set: tokens are not the model's. It is for benchmarks.")
        if self.head is not None:
            spec = replace(spec, draft_layers=self.head.whole.layers)
        self.spec = spec.of_rank(self.shard)
        check_products(self.spec, numerics, config, is_draft)
        if is_draft and self.spec.states is not None:
            raise CallboardError(
                f"The draft model {config.model} has recurrent states, which cannot take back tokens; choose a draft "
                "with attention in all layers, or draft=ngram."
            )
        self._states: StateCache | None = None
        self.tier: BlockCopier | None = None
        self.updates: WeightUpdates | None = None  # None without weight_updates
        self._sleep_memory: SleepMemory | None = None
        if config.sleep_mode and numerics.device.type == "cuda" and extras.sleep_memory is not None:
            self._sleep_memory = extras.sleep_memory(numerics.device)
        self._kernels: KernelsAhead | None = None
        if numerics.backend == "triton" and numerics.device.type == "cuda" and extras.kernels is not None:
            head = None if self.head is None else self.head.stored
            self._kernels = extras.kernels(KernelParts(config, source, numerics, self.shard, is_draft, head))
        self._group = extras.group(config, self.spec, numerics)
        self.handle = self._group.handle
        if shard is None:
            try:
                self.open(self.load([self.handle]).num_kv_blocks)
            except BaseException:
                if self.tier is not None:
                    self.tier.close()  # its threads would keep its memory
                raise

    def load(self, handles: Sequence[bytes]) -> ModelInfo:
        """Reach the other ranks by their handles, plan the memory, and read the weights. Returns what this rank can
        serve. The ranks of a group may differ only in `num_kv_blocks`."""
        config, spec, numerics, group = self.config, self.spec, self.numerics, self._group
        self._handles = handles
        group.connect(handles)
        available = available_memory(numerics.device, config.gpu_memory_utilization)
        if numerics.device.type == "cpu":
            available //= self.shard.size  # the ranks on CPUs share one machine
        source = self._source
        tower = None if self._plugged.images is None or image_info(source, config) is None else source.tower
        head = None if self.head is None else self.head.spec
        memory = plan_memory(config, spec, numerics, available, tower, head)  # raises on a rank with too little
        self.memory: MemoryPlan = replace(
            memory,
            max_model_len=group.least(memory.max_model_len),
            block_size=group.least(memory.block_size),
            max_num_seqs=group.least(memory.max_num_seqs),
            num_states=group.least(memory.num_states),
        )
        if encodings_on_device(spec, numerics):
            logger.info("quantization: %s", "; ".join(weight_report(spec, numerics)))
        if config.weight_updates and self._plugged.updates is not None:
            self.updates = self._plugged.updates(UpdateParts(config, source, spec, numerics, group.least, self.head))
            source = self.updates.source
        with nullcontext() if self._sleep_memory is None else self._sleep_memory.weights.use():
            self.decoder = source.load(spec, numerics, self.memory.max_model_len, group.communicator)
            parts = RunnerParts(config, source, self.decoder, self.memory.max_num_seqs, self.is_draft)
            self.images = None if self._plugged.images is None else self._plugged.images(parts)
            if self.head is not None:
                tensors = None if self.updates is None else self.updates.head_tensors
                self.head.load(self.decoder, self.memory.max_model_len, tensors)
        if self._plugged.tier is not None:
            self.tier = self._plugged.tier(parts)
        self._make_extras(parts)
        self.kv_scales = None
        if spec.kv_cache_form(config.kv_cache_dtype) == "fp8" and (scales := self._source.kv_scales()) is not None:
            self.kv_scales = scales_of_rank(scales, spec)
        if self.updates is not None:
            sizes, hooks = (self.memory.max_model_len, self.memory.updates), (self._drop_tapes, self._weights_changed)
            self.updates.open(self.decoder, *sizes, *hooks)
        group.barrier()  # all ranks have read their weights
        if numerics.backend == "triton" and numerics.device.type == "cuda":
            if self._kernels is not None:
                self._kernels.wait()
            self._measure_memory()
        return self._describe()

    def open(self, num_kv_blocks: int) -> ModelInfo:
        """Allocate a KV cache of `num_kv_blocks`, for which all ranks have room, and warm up. Then plans may arrive."""
        self.memory = self.memory.with_blocks(num_kv_blocks)
        logger.info("%s", self.memory)
        if self.images is not None:
            with self._cache_memory():
                self.images.open()
        self.steps = self._make_steps(num_kv_blocks, self._cache_memory())
        if self.tier is not None:
            with self._cache_memory():
                self.tier.open(self.steps.cache, self.memory.staging, self._handles, self._group.barrier)
            self.steps.copier = self.tier
        self.asynchronous = self.steps.asynchronous
        self.info = self._describe()
        self._group.barrier()  # all ranks have their cache
        self._warm_up()
        if self.masks is not None:
            self.masks.open(self.info, self.asynchronous, self._large_step_us)
        self._group.open()
        if self.tier is not None:
            self.tier.ready()
        return self.info

    def _cache_memory(self) -> AbstractContextManager[None]:
        """The context in which tensors are allocated that lose their content in sleep."""
        return nullcontext() if self._sleep_memory is None else self._sleep_memory.cache.use()

    def _make_extras(self, parts: RunnerParts) -> None:
        plugged = self._plugged
        self.extras: list[StepExtra] = [make(parts) for make in plugged.outputs]
        self.masks = None if plugged.masks is None else plugged.masks(parts)
        self.adapters = None if plugged.adapters is None else plugged.adapters(parts)

    def _describe(self) -> ModelInfo:
        numerics, memory, spec = self.numerics, self.memory, self.spec
        forms = encodings_on_device(spec, numerics)
        is_fp8 = any(form.startswith("fp8") for form in forms.values())
        has_fp8 = is_fp8 and multiplies_fp8(numerics.device)  # activations are rounded to fp8, too
        numeric_parts = numerics.dtype_name, numerics.backend, numerics.deterministic, has_fp8, numerics.activation_bits
        head = self.head if self.head is not None and self.head.spec.has_cache else None
        own_layers = spec.whole if head is not None else replace(spec.whole, draft_layers=())
        whole_cache = planned_cache(self.config, own_layers, numerics)
        num_sums = "leaves" if numerics.rank_invariant else self.shard.size
        version, weights = None if self.updates is None else self.updates.version, self._source.fingerprint
        if version is not None:
            weights = version.fingerprint(weights)
        identity = (weights, *numeric_parts, forms, whole_cache, num_sums)
        text = repr(identity if head is None else (*identity, head.fingerprint))  # blocks have its keys, too
        info = ModelInfo(
            fingerprint=hashlib.sha256(text.encode()).hexdigest()[:32],
            vocab_size=spec.whole.vocab_size,
            max_model_len=memory.max_model_len,
            eos_token_ids=self.eos_token_ids,
            num_kv_blocks=memory.num_kv_blocks,
            block_size=memory.block_size,
            dtype=numerics.dtype_name,
            device=numerics.device.type,
            max_num_seqs=memory.max_num_seqs,
            max_num_batched_tokens=memory.max_num_batched_tokens,
            kv_cache=memory.kv_cache if memory.kv_cache.states is not None or len(memory.kv_cache.groups) > 1 else None,
            num_states=memory.num_states,
            weight_formats=format_names(spec, numerics),
            makes_text=spec.makes_text,
            can_sleep=self.config.sleep_mode,
            weights=version,
        )
        for extra in self.extras:
            info = extra.describe(info)
        for part in (self.images, self.tier, self.head):
            info = info if part is None else part.describe(info)
        return info

    def _make_steps(self, num_blocks: int, room: AbstractContextManager[None] | None = None) -> CpuSteps | GpuSteps:
        memory, numerics = self.memory, self.numerics
        num_slots, max_len = memory.max_num_seqs, memory.max_model_len
        if memory.kv_cache.states is not None and self._states is None:
            with self._cache_memory():
                self._states = StateCache(memory.kv_cache.states, memory.num_states, num_slots, numerics.device)
        cache = KVCache(
            memory.kv_cache, num_blocks, memory.block_size, numerics.device, self.kv_scales, room, self._states
        )
        kind = GpuSteps if numerics.backend == "triton" else CpuSteps
        steps = kind(self.decoder, cache, num_slots, max_len, self.eos_token_ids, self.extras, self.masks, self.images)
        if self.head is not None:
            with nullcontext() if room is None else self._cache_memory():
                steps.head = self.head.for_steps(steps)
            steps.sampler.pinned_acceptance = self.config.pinned_acceptance
        return steps

    def _measure_memory(self) -> None:
        """Give the KV cache the memory that is free after the largest step. That step runs on a cache of one block."""
        numerics, config = self.numerics, self.config
        start = time.perf_counter()
        WarmUp(self._make_steps(1), self.memory).run_largest_steps()
        logger.info("memory: the largest steps ran in %.1f s", time.perf_counter() - start)
        room = available_memory(numerics.device, config.gpu_memory_utilization)
        self.memory = resize_kv(self.memory, config, room)

    def _warm_up(self) -> None:
        """Build all kernels, capture graphs, which need the addresses of the cache, and time steps."""
        warm_up = WarmUp(self.steps, self.memory, self.info.pooling is not None)
        on_gpu = self.numerics.device.type == "cuda"
        warm_up.build_kernels(on_gpu)
        if isinstance(self.steps, GpuSteps) and self.config.cuda_graphs and on_gpu:
            self._capture_graphs(self.steps)
            self._group.barrier()  # all ranks have captured their graphs
        self.reset()  # the timed steps must be plain
        if on_gpu and not self.is_draft and self.masks is not None:
            self._large_step_us = warm_up.large_step_us()
        if self.config.draft is not None or self.is_draft:
            self._time_steps(warm_up)
        self.steps.cache.clear(0)
        self.reset()

    def _capture_graphs(self, steps: GpuSteps) -> None:
        torch.cuda.empty_cache()  # a capture does this, too
        start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        most_tokens = min(self.config.prefill_graph_tokens, self.memory.max_num_batched_tokens)
        pool = None if self._sleep_memory is None else self._sleep_memory.graphs.for_graphs()
        steps.capture_graphs(self._plugged.row_lens, most_tokens, pool)
        size = (free - torch.cuda.mem_get_info()[0]) / (1 << 30)
        seconds = time.perf_counter() - start
        logger.info("CUDA graphs: %d captured in %.1f s, %.2f GiB", steps.num_graphs, seconds, size)

    def _time_steps(self, warm_up: WarmUp) -> None:
        step_us, latency_us = warm_up.time_steps(self.is_draft)
        self.info = replace(self.info, step_us=step_us, latency_us=latency_us)
        if self.info.head is not None:
            times = warm_up.time_drafts(self.info.head.most_drafts)
            self.info = replace(self.info, head=replace(self.info.head, step_us=times))

    def reset(self) -> None:
        """Forget all requests, for example after an engine's restart. The blocks of the cache are free."""
        self.steps.reset()

    def sleep(self) -> None:
        """Give memory back until `wake`, if `sleep_mode` and the device allow it. Plans must not arrive meanwhile."""
        if self._sleep_memory is not None:
            start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
            if self.tier is not None:
                self.tier.reset()  # no copy may be in flight
            self._sleep_memory.give_back()
            size, seconds = torch.cuda.mem_get_info()[0] - free, time.perf_counter() - start
            logger.info("asleep: %.2f GiB given back in %.2f s", size / (1 << 30), seconds)

    def wake(self) -> None:
        """Take the memory again, with the same weights and without requests. Raises CallboardError, and stays asleep,
        if other processes have the memory."""
        if self._sleep_memory is not None:
            start = time.perf_counter()
            try:
                self._sleep_memory.take_again()
            except OSError as e:
                free = torch.cuda.mem_get_info()[0] / (1 << 30)
                text = f"The GPU has {free:.2f} GiB free, too little to wake up ({e.strerror})"
                raise CallboardError(
                    f"{text}; end the process that has taken its memory and send the request again."
                ) from None
            self.steps.cache.clear(slice(None))
            torch.cuda.synchronize()
            logger.info("awake after %.2f s", time.perf_counter() - start)
        self.reset()

    def load_adapter(self, index: int, path: str, digest: str = "") -> None:
        """Load an adapter from a folder at an index while steps run; no row has this index. Raises CallboardError if it
        cannot be served, or if its files have another digest."""
        if self.adapters is None:
            raise CallboardError("This model runner serves no adapters.")
        self.adapters.load(index, path, digest)

    def _drop_tapes(self) -> None:
        """The decoder is about to take new weights."""
        self.steps.drop_tapes()

    def _weights_changed(self, source: ModelSource | None, take: Take) -> None:
        """The decoder has the weights of an update; with a source, other parts have new weights, too."""
        if self._sleep_memory is not None:
            self._sleep_memory.weights_changed()
        for extra in (*self.extras, self.images):
            if source is not None and isinstance(extra, ReadsWeights):
                extra.read_weights(source, take)

    def update_weights(self, version: WeightVersion) -> str:
        """Take the staged weights between two steps. Returns the model's new fingerprint."""
        if self.updates is None:
            raise CallboardError("This model runner keeps its weights; start it with weight_updates.")
        self.updates.apply(version)
        self.info = replace(self.info, fingerprint=self._describe().fingerprint, weights=version)
        return self.info.fingerprint

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a step. The returned function waits for its result; on a CPU it computes the step."""
        wait, check = self.steps.launch(plan), self._group.communicator.check
        if self.shard.size == 1:
            return wait

        def result() -> StepResult:
            found = wait()
            check()  # raises if a rank is missing, since the result is then meaningless
            return found

        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for its result."""
        return self.launch(plan)()


def choose_numerics(config: EngineConfig) -> Numerics:
    """The numerics of a configuration, with `auto` resolved for this machine.

    Raises CallboardError if the machine does not have the device or the backend."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise CallboardError("device is cuda, but torch sees no GPU; use device=cpu, or install a CUDA build of torch.")
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu and config.device != "cpu" else _CPU
    on_gpu = device.type == "cuda"
    if config.kernel_backend == "triton" and not (on_gpu or INTERPRETED):
        raise CallboardError("kernel_backend is triton, which needs a GPU; use kernel_backend=llvm on a CPU.")
    lack = "it computes on a CPU" if on_gpu else obstacle()
    if config.kernel_backend == "llvm" and lack:
        raise CallboardError(f"kernel_backend is llvm, but {lack}; leave it at auto.")
    backend = config.kernel_backend
    if backend == "auto":
        backend = "triton" if on_gpu else "torch" if lack else "llvm"
    dtype = getattr(torch, ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype)
    deterministic = config.deterministic or config.rank_invariant
    return Numerics(
        dtype=dtype,
        device=device,
        backend=backend,
        # Deterministic products choose their packing themselves (C6). This flag is for the memory plan.
        packed=(config.packed_weights or deterministic) and can_pack(dtype, device),
        deterministic=deterministic,
        rank_invariant=config.rank_invariant,
        activation_bits=16 if config.cpu_activations == "int16" else 8,
    )
