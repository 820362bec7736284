"""ModelRunner: one rank's weights and KV cache. What it holds can be rebuilt from the engine's requests (C8).

This file sequences what happens before the first step: numerics, memory plan, weights, KV cache, warm-up. Steps
themselves are `CpuSteps` (torch kernels) or `GpuSteps` (Triton kernels); both keep the order that
runtime/core/plan.py promises:

    free slots -> open slots -> write block tables -> run rows -> sample -> keep the tokens in their slots
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.decoder_spec import DecoderSpec
from runtime.core.draft import CATCH_UP
from runtime.core.plan import NewSlot, StepPlan, StepResult
from runtime.core.speculation import MAX_DRAFT_TOKENS
from runtime.core.types import CallboardError, Grammar, SamplingParams
from runtime.kernels._triton import INTERPRETED
from runtime.kernels.linear import can_pack
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.decoder import Decoder, Numerics
from runtime.structured.vocabulary import Vocabulary
from runtime.text.tokenizer import Tokenizer
from runtime.worker.cpu_steps import CpuSteps
from runtime.worker.gpu_steps import GpuSteps
from runtime.worker.grammar_state import GrammarState
from runtime.worker.memory import MemoryPlan, available_memory, plan_memory, resize_kv

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_MANY_ROWS = 64  # of a decode step; so many tell whether masks are hidden behind it
_LONG = 1100  # tokens; from 1,024 on prompts attend by another kernel
_FAILING = Grammar("", "", "")  # an output's, which it ends after a mask like any other
_EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    logprobs=1,
    logit_bias=((0, 1.0),),
    prompt_logprobs=1,
    grammar=_FAILING,
)


class ModelRunner:
    """Computes steps. Not thread-safe; plans are executed in the order of calls."""

    is_draft = False  # guesses for another model (draft_runner.py)

    def __init__(
        self, config: EngineConfig, path: Path, rank: int = 0, world_size: int = 1, is_draft: bool = False
    ) -> None:
        """Load the model at `path` (what runtime.loading.resolve returned), allocate the KV cache, warm up.

        Raises CallboardError if the model is not supported, damaged, or does not fit into memory; the last before
        any weight is read."""
        self.is_draft = is_draft
        checkpoint = open_checkpoint(path)
        spec, weight_map = load_spec(checkpoint.config)
        if (bad := next((i for i in checkpoint.eos_token_ids if not 0 <= i < spec.vocab_size), None)) is not None:
            raise CallboardError(
                f"{path} names the end-of-sequence id {bad}, which is not in its vocabulary of {spec.vocab_size}; "
                "correct eos_token_id in its config.json or generation_config.json."
            )
        self._prepare(config, spec, rank, world_size)
        decoder = Decoder.load(checkpoint, spec, weight_map, self.numerics, self.memory.max_model_len)
        self._open(decoder, checkpoint.fingerprint, checkpoint.eos_token_ids)
        if not is_draft or not self.asynchronous:  # a device's draft would wait for its host at every token
            self.grammar_state.serve(lambda: Vocabulary.of(Tokenizer.load(path), self.info))

    @classmethod
    def dummy(
        cls,
        config: EngineConfig,
        spec: DecoderSpec,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        vocabulary: Vocabulary | None = None,
        is_draft: bool = False,
    ) -> ModelRunner:
        """A runner of seeded random weights; for tests and benchmarks. Without a vocabulary it serves no grammars."""
        runner = cls.__new__(cls)
        runner.is_draft = is_draft
        runner._prepare(config, spec, 0, 1)
        decoder = Decoder.dummy(spec, runner.numerics, runner.memory.max_model_len, seed)
        runner._open(decoder, f"dummy-{seed}-{spec}", eos_token_ids)
        if vocabulary is not None:
            runner.grammar_state.serve(lambda: vocabulary)
        return runner

    def _prepare(self, config: EngineConfig, spec: DecoderSpec, rank: int, world_size: int) -> None:
        """What is decided before weights are read: numerics and the memory plan."""
        self.numerics = numerics = choose_numerics(config)
        self.config = config = config.sized_for(numerics.device.type)
        self.rank, self.world_size = rank, world_size
        if numerics.device.type == "cpu":
            torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        available = available_memory(numerics.device, config.gpu_memory_utilization)
        self.memory: MemoryPlan = plan_memory(config, spec, numerics, available)

    def _open(self, decoder: Decoder, weights_fingerprint: str, eos_token_ids: tuple[int, ...]) -> None:
        """The KV cache and the state objects around a decoder."""
        self.decoder, self.eos_token_ids = decoder, eos_token_ids
        self.steps_done = 0
        self.grammar_state = GrammarState(decoder.spec.vocab_size, self.is_draft)
        if self.numerics.backend == "triton" and self.numerics.device.type == "cuda":
            self._measure_memory()
        logger.info("%s", self.memory)
        self.steps = self._make_steps(self.memory.num_kv_blocks)
        self.asynchronous = self.steps.asynchronous
        numerics = self.numerics
        dtype_name = str(numerics.dtype).removeprefix("torch.")
        identity = (weights_fingerprint, dtype_name, numerics.backend, numerics.deterministic)
        self.info = ModelInfo(
            fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:32],
            vocab_size=decoder.spec.vocab_size,
            max_model_len=self.memory.max_model_len,
            eos_token_ids=eos_token_ids,
            num_kv_blocks=self.memory.num_kv_blocks,
            block_size=self.memory.block_size,
            dtype=dtype_name,
            device=numerics.device.type,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        self._warm_up()

    def _make_steps(self, num_blocks: int) -> CpuSteps | GpuSteps:
        spec, memory, numerics = self.decoder.spec, self.memory, self.numerics
        shape = (spec.num_layers, 2, spec.num_kv_heads, num_blocks, memory.block_size, spec.head_dim)
        cache = torch.zeros(shape, dtype=numerics.dtype, device=numerics.device)
        num_slots, max_len = self.config.max_num_seqs, memory.max_model_len
        kind = GpuSteps if numerics.backend == "triton" else CpuSteps
        return kind(self.decoder, cache, num_slots, max_len, self.eos_token_ids, self.grammar_state)

    def _measure_memory(self) -> None:
        """Give the KV cache what is free after the largest step: as many rows and tokens as a step may have, all on
        the null block, the only one of a cache made for this."""
        numerics, config = self.numerics, self.config
        self.steps = self._make_steps(1)
        longest = min(config.max_num_batched_tokens, self.memory.max_model_len - 1)
        rows = self._most_rows()
        self._run_rows([min(config.max_num_batched_tokens // rows, longest)] * rows)
        self._run_rows([longest])
        del self.steps
        room = available_memory(numerics.device, config.gpu_memory_utilization)
        self.memory = resize_kv(self.memory, config, self.decoder.spec, numerics, room)

    def _run_rows(self, counts: list[int], params: SamplingParams = _EVERYTHING) -> None:
        """A step of new requests on the null block, all but the first of which are sampled plainly."""
        slots, zeros = np.arange(len(counts), dtype=np.int32), np.zeros(len(counts), np.int32)
        new = [NewSlot(0, np.zeros(1, np.int32), counts[0], 0, params)]
        counts_array = np.array(counts, np.int32)
        self.execute(
            StepPlan(0, new=new, slots=slots, num_computed=zeros, num_tokens=counts_array, num_samples=zeros + 1)
        )

    def _warm_up(self) -> None:
        """A row of one token, of a few and of many: libraries load and build every kernel that a step may need, so that
        no request waits for a compiler. Then the graphs, which need the place of the cache."""
        longest = min(self.config.max_num_batched_tokens, self.memory.max_model_len - 1)
        for count in (1, 8, 32, _LONG) if self.numerics.device.type == "cuda" else (1, 32):
            self._run_rows([min(count, longest)])
        self._run_rows([1], SamplingParams(temperature=1.0, grammar=_FAILING))
        logger.info("kernels: built and run once")
        if isinstance(self.steps, GpuSteps) and self.config.cuda_graphs and self.numerics.device.type == "cuda":
            self.steps.capture_graphs(self._counts())
            logger.info("CUDA graphs: %d", sum(map(len, self.steps.graphs.values())))
        self.reset()  # what was run until now was not sampled plainly
        if self.numerics.device.type == "cuda" and not self.is_draft:
            rows = min(_MANY_ROWS, self._most_rows())
            self.grammar_state.step_us = min(self._step_seconds(rows, 4) for _ in range(2)) * 1e6
        if self.config.draft is not None or self.is_draft:
            self._time_steps()
        self.steps.cache[:, :, :, 0] = 0
        self.reset()

    def _counts(self) -> tuple[int, ...]:
        """Tokens that each row of a step may have besides one, often: guesses, or what a draft has not guessed."""
        if self.is_draft:
            return CATCH_UP
        if self.config.draft is None:
            return ()
        most = MAX_DRAFT_TOKENS if self.config.num_draft_tokens is None else self.config.num_draft_tokens
        return tuple(range(2, most + 2))

    def _time_steps(self) -> None:
        """Measure what speculation weighs (ModelInfo.step_us, latency_us), on the null block: decode steps of rising
        size, launched behind one another as in serving; a draft's, as its chains are, by one plan."""
        in_a_row = 16 if self.asynchronous else 1
        sizes = [1 << i for i in range(8) if 1 << i <= self._most_rows()]
        how = (1, in_a_row) if self.is_draft else (in_a_row, 1)
        best = {size: min(self._step_seconds(size, *how) for _ in range(3)) * 1e6 for size in sizes}
        latency_us = min(self._step_seconds(1, 1) for _ in range(3)) * 1e6 - best[1]
        rising = np.maximum.accumulate(list(best.values())).tolist()
        logger.info("decode steps: %s us", ", ".join(f"{n} rows {us:.0f}" for n, us in zip(sizes, rising, strict=True)))
        latency_us = max(0.0, latency_us) if self.asynchronous else 0.0
        self.info = replace(self.info, step_us=tuple(zip(sizes, rising, strict=True)), latency_us=latency_us)

    def _step_seconds(self, num_rows: int, num_plans: int, repeats: int = 1) -> float:
        """Of one decode step among so many, on the null block."""
        starts, ones = np.zeros(num_rows, np.int32), np.ones(num_rows, np.int32)
        slots = np.arange(num_rows, dtype=np.int32)
        plan = StepPlan(0, slots=slots, num_computed=starts, num_tokens=ones, num_samples=ones, num_steps=repeats)
        start = time.perf_counter()
        for wait in [self.steps.launch(plan) for _ in range(num_plans)]:
            wait()
        return (time.perf_counter() - start) / (num_plans * repeats)

    def _most_rows(self) -> int:
        return min(self.config.max_num_seqs, self.config.max_num_batched_tokens)

    def reset(self) -> None:
        """Forget all requests, as after an engine's restart; the cache's contents are nobody's."""
        self.steps_done = 0
        self.steps.reset()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a step; the answer waits for its result. On a CPU the step itself waits until then."""
        self.steps_done += 1
        return self.steps.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """A step from start to end."""
        return self.launch(plan)()


def choose_numerics(config: EngineConfig) -> Numerics:
    """What `auto` stands for on this machine. Raises CallboardError for a device or backend that it does not have."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise CallboardError("device is cuda, but torch sees no GPU; use device=cpu, or install a CUDA build of torch.")
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu and config.device != "cpu" else _CPU
    on_gpu = device.type == "cuda"
    if config.kernel_backend == "triton" and not (on_gpu or INTERPRETED):
        raise CallboardError("kernel_backend is triton, which needs a GPU; use kernel_backend=torch on a CPU.")
    backend = "triton" if on_gpu and config.kernel_backend == "auto" else config.kernel_backend
    dtype = getattr(torch, ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype)
    return Numerics(
        dtype=dtype,
        device=device,
        backend="torch" if backend == "auto" else backend,
        # Deterministic products choose for themselves, toggle or not (C6); this tells the memory plan what they take.
        packed=(config.packed_weights or config.deterministic) and can_pack(dtype, device),
        deterministic=config.deterministic,
    )
