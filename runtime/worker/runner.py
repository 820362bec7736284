"""ModelRunner: computes steps. One per rank; everything that it holds can be rebuilt from the engine's requests (C8).

This file is hot: it sequences the state objects in the order that runtime/core/plan.py promises, and nothing else.

    free slots -> open slots -> write block tables -> run rows -> sample -> keep the tokens in their slots
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.plan import StepPlan, StepResult
from runtime.core.types import CallboardError
from runtime.kernels.attention import AttentionShape
from runtime.kernels.linear import can_pack
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import describe
from runtime.models.decoder import Decoder, Numerics
from runtime.models.spec import DecoderSpec
from runtime.worker.inputs import StepInput, build_input
from runtime.worker.memory import MemoryPlan, available_memory, plan_memory
from runtime.worker.sampler import Logprobs, Sampler
from runtime.worker.slots import Slots

logger = logging.getLogger(__name__)


class ModelRunner:
    """One rank's weights, KV cache and request slots. Not thread-safe; plans are executed in the order of calls."""

    def __init__(self, config: EngineConfig, path: Path, rank: int = 0, world_size: int = 1) -> None:
        """Load the model at `path` (what runtime.loading.resolve returned), allocate the KV cache, warm up.

        Raises CallboardError if the model is not supported, damaged, or does not fit into memory; the last before
        any weight is read."""
        checkpoint = open_checkpoint(path)
        spec, names = describe(checkpoint.config)
        self._prepare(config, spec, rank, world_size)
        decoder = Decoder.load(checkpoint, spec, names, self.numerics, self.memory.max_model_len)
        self._open(decoder, checkpoint.fingerprint, checkpoint.eos_token_ids)

    @classmethod
    def dummy(
        cls, config: EngineConfig, spec: DecoderSpec, seed: int = 0, eos_token_ids: tuple[int, ...] = ()
    ) -> ModelRunner:
        """A runner of seeded random weights; for tests and benchmarks."""
        runner = cls.__new__(cls)
        runner._prepare(config, spec, 0, 1)
        decoder = Decoder.dummy(spec, runner.numerics, runner.memory.max_model_len, seed)
        runner._open(decoder, f"dummy-{seed}-{spec}", eos_token_ids)
        return runner

    def _prepare(self, config: EngineConfig, spec: DecoderSpec, rank: int, world_size: int) -> None:
        """What is decided before weights are read: numerics and the memory plan."""
        if world_size != 1:
            raise CallboardError(f"tensor_parallel_size is {world_size}; only 1 is supported.")
        self.numerics = choose_numerics(config)
        self.config = config = config.sized_for(self.numerics.device.type)
        self.rank, self.world_size = rank, world_size
        if self.numerics.device.type == "cpu":
            torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        numerics = self.numerics
        available = available_memory(numerics.device, config.gpu_memory_utilization)
        fill = numerics.device.type == "cuda"
        self.memory: MemoryPlan = plan_memory(config, spec, numerics.dtype, numerics.packed, available, fill)
        logger.info("%s", self.memory)

    def _open(self, decoder: Decoder, weights_fingerprint: str, eos_token_ids: tuple[int, ...]) -> None:
        """The KV cache and the state objects around a decoder."""
        spec, memory, numerics = decoder.spec, self.memory, self.numerics
        self.decoder = decoder
        shape = (2, spec.num_kv_heads, memory.num_kv_blocks, memory.block_size, spec.head_dim)
        self.cache = torch.zeros((spec.num_layers, *shape), dtype=numerics.dtype, device=numerics.device)
        self.layer_caches = list(self.cache.unbind(0))
        self.attention_shape = AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            num_blocks=memory.num_kv_blocks,
            block_size=memory.block_size,
            dtype=numerics.dtype,
            device=numerics.device,
            exact=numerics.deterministic,
        )
        self.eos_token_ids = eos_token_ids
        self.steps_done = 0
        dtype_name = str(numerics.dtype).removeprefix("torch.")
        identity = (weights_fingerprint, dtype_name, numerics.backend, numerics.deterministic)
        self.info = ModelInfo(
            fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:32],
            vocab_size=spec.vocab_size,
            max_model_len=memory.max_model_len,
            eos_token_ids=eos_token_ids,
            num_kv_blocks=memory.num_kv_blocks,
            block_size=memory.block_size,
            dtype=dtype_name,
            device=numerics.device.type,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        self.reset()
        self._warm_up()

    def reset(self) -> None:
        """Forget all requests, as after an engine's restart; the cache's contents are nobody's."""
        memory, device = self.memory, self.numerics.device
        max_blocks = -(-memory.max_model_len // memory.block_size)
        self.slots = Slots(self.config.max_num_seqs, memory.max_model_len, max_blocks, device)
        self.sampler = Sampler(self.config.max_num_seqs, self.decoder.spec.vocab_size, self.eos_token_ids, device)
        self.poisoned = False  # some step had a non-finite value, so that free blocks may hold one

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a step; the returned call waits for its result, and on a CPU computes it."""
        return partial(self.execute, plan)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply `plan` and compute its rows; the order is that of runtime/core/plan.py."""
        for slot in plan.freed.tolist():
            self.sampler.remove(slot)
        for new in plan.new:
            self.slots.add(new)
            self.sampler.add(new)
        self.slots.write_tables(plan.tables)
        if self.poisoned:
            self._clear_fresh_blocks(plan)
        step = build_input(plan, self.slots, self.attention_shape)
        hidden = self.decoder.forward(step.token_ids, step.positions, step.kv_index, step.attention, self.layer_caches)
        if not hidden.sum(dtype=torch.float32).isfinite():
            self.poisoned = True
        result = self._sample(plan.step_id, hidden, step)
        self.steps_done += 1
        return result

    def _sample(self, step_id: int, hidden: torch.Tensor, step: StepInput) -> StepResult:
        if not len(step.sampled):
            return StepResult(step_id, np.zeros(0, np.int32))
        device = self.numerics.device
        logits = self.decoder.logits(hidden.index_select(0, torch.from_numpy(step.sampled).to(device)))
        token_ids, logprobs = self.sampler.sample(logits, step.sampled_slots, step.sampled_positions, self.slots)
        at = step.sampled_slots.astype(np.int64) * self.slots.max_model_len + step.sampled_positions
        self.slots.write_sampled(torch.from_numpy(at).to(device), token_ids)
        result = StepResult(step_id, token_ids.cpu().numpy().astype(np.int32))
        if logprobs is not None:
            _attach(result, logprobs)
        return result

    def _clear_fresh_blocks(self, plan: StepPlan) -> None:
        """Zero the blocks that rows of this step begin to fill: masked positions must be finite, and their last owner
        may have left something that is not (C9: a fault stays with its request)."""
        starts = np.full(self.config.max_num_seqs, np.iinfo(np.int32).max, np.int32)
        starts[plan.slots] = plan.starts
        slots, index, blocks = plan.tables
        fresh = blocks[index >= -(-starts[slots] // self.memory.block_size)]
        self.cache[:, :, :, torch.from_numpy(fresh.astype(np.int64)).to(self.cache.device)] = 0

    def _warm_up(self) -> None:
        """A row of one token and a row of several, on the null block: libraries load and build their kernels."""
        for count in (1, min(32, self.config.max_num_batched_tokens, self.memory.max_model_len - 1)):
            slot, start, counts = np.zeros((3, 1), np.int32) + np.array([[0], [0], [count]], np.int32)
            self.execute(StepPlan(0, slots=slot, starts=start, counts=counts, samples=np.ones(1, np.int32)))
        self.cache[:, :, :, 0] = 0
        self.steps_done = 0
        self.reset()


def choose_numerics(config: EngineConfig) -> Numerics:
    """What `auto` stands for on this machine. Raises CallboardError for a device or backend that it does not have."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise CallboardError("device is cuda, but torch sees no GPU; use device=cpu, or install a CUDA build of torch.")
    device = torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")
    on_gpu = device.type == "cuda"
    if config.kernel_backend == "triton" and not on_gpu:
        raise CallboardError("kernel_backend is triton, which needs a GPU; use kernel_backend=torch on a CPU.")
    backend = "triton" if on_gpu and config.kernel_backend == "auto" else config.kernel_backend
    dtype = getattr(torch, ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype)
    return Numerics(
        dtype=dtype,
        device=device,
        backend="torch" if backend == "auto" else backend,
        # Packed products have other bits than plain ones; deterministic steps keep to one kind, toggle or not (C6).
        packed=(config.packed_weights or config.deterministic) and can_pack(dtype, device),
        deterministic=config.deterministic,
    )


def _attach(result: StepResult, logprobs: Logprobs) -> None:
    result.logprob_rows = logprobs.rows
    result.ranks = logprobs.ranks.cpu().numpy().astype(np.int32)
    result.logprobs = logprobs.logprobs.cpu().numpy()
    result.top_ids = logprobs.top_ids.cpu().numpy().astype(np.int32)
    result.top_logprobs = logprobs.top_logprobs.cpu().numpy()
