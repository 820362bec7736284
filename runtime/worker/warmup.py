"""WarmUp: steps before the first request. They build kernels, measure the memory of the largest step, and are timed.

Their rows use only the null block, which every cache has. The caller resets the slots afterwards."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from runtime.base.sampling_fields import Effect, table_of
from runtime.base.types import Grammar, SamplingParams
from runtime.core.plan import Encoding, NewSlot, StepPlan
from runtime.worker.memory import MemoryPlan
from runtime.worker.steps import Steps

logger = logging.getLogger(__name__)

_MANY_ROWS = 64  # rows in a decode step long enough to show whether masks are hidden behind it
_LONG = 1100  # tokens; prompts of 1,024 tokens and more attend by another kernel
_PROMPT_LENS = (1, 8, 32, 300, _LONG)  # mixtures have other tiles for each length
_CPU_PROMPT_LENS = (1, 32)
# A grammar that cannot be served. Its output fails after its masks have passed through all mask kernels.
_FAILING = Grammar("", "", "")
_FILTERS: dict[str, Any] = dict.fromkeys(table_of(SamplingParams).names(Effect.FILTER), 0.5) | {"top_k": 2}
_EVERYTHING = SamplingParams(
    **_FILTERS,
    temperature=1.0,
    repetition_penalty=1.1,
    logprobs=1,
    sampling_logprobs=True,
    logit_bias=((0, 1.0),),
    prompt_logprobs=1,
    grammar=_FAILING,
)


class WarmUp:
    """One runner's warm-up, within its memory plan's limits."""

    def __init__(self, steps: Steps, memory: MemoryPlan, makes_vectors: bool = False) -> None:
        self.steps, self.max_num_tokens = steps, memory.max_num_batched_tokens
        self.makes_vectors = makes_vectors
        self.most_rows = min(memory.max_num_seqs, self.max_num_tokens)
        self.longest_prompt = min(self.max_num_tokens, memory.max_model_len - 1)
        self.adapter = int(
            memory.adapters > 0
        )  # index for the first row in a step with an adapter; 0 without room for adapters

    def run_largest_steps(self) -> None:
        """The most rows and tokens of a step, in many prompts and in one."""
        lengths = [min(self.max_num_tokens // self.most_rows, self.longest_prompt)] * self.most_rows
        self._run_prompts(lengths, adapter=self.adapter)
        self._run_prompts([self.longest_prompt], adapter=self.adapter)

    def build_kernels(self, on_gpu: bool) -> None:
        """Run rows with one, a few and many tokens. Libraries build every kernel now, so that requests do not wait
        for a compiler."""
        start = time.perf_counter()
        for length in _PROMPT_LENS if on_gpu else _CPU_PROMPT_LENS:
            for adapter in range(self.adapter + 1):
                self._run_prompts([min(length, self.longest_prompt)], adapter=adapter)
        for params in (SamplingParams(grammar=_FAILING), SamplingParams(repetition_penalty=1.1)):
            self._run_prompts([1], params)
        if self.makes_vectors:
            for length in (1, 32):
                self._run_prompts([min(length, self.longest_prompt)], SamplingParams(max_tokens=1, pooled=True))
        if (encoder := self.steps.encoder) is not None:
            self._run_prompts([2], SamplingParams(), image=encoder.smallest())
        logger.info("kernels: built and run once in %.1f s", time.perf_counter() - start)

    def large_step_us(self) -> float:
        """Time of a decode step with many rows, a few steps in flight."""
        return min(self._step_us(min(_MANY_ROWS, self.most_rows), 4) for _ in range(2))

    def time_steps(self, is_draft: bool) -> tuple[tuple[tuple[int, float], ...], float]:
        """Measure the times that speculation weighs (ModelInfo.step_us, latency_us): decode steps of rising size.

        Several steps are in flight, as in serving. A draft model gets one plan with several steps."""
        in_a_row = 16 if self.steps.asynchronous else 1
        sizes = [1 << i for i in range(8) if 1 << i <= self.most_rows]
        num_plans, num_steps = (1, in_a_row) if is_draft else (in_a_row, 1)
        best = {size: min(self._step_us(size, num_plans, num_steps) for _ in range(3)) for size in sizes}
        latency_us = min(self._step_us(1, 1) for _ in range(3)) - best[1]
        rising: list[float] = np.maximum.accumulate(list(best.values())).tolist()
        logger.info("decode steps: %s us", ", ".join(f"{n} rows {us:.0f}" for n, us in zip(sizes, rising, strict=True)))
        latency_us = max(0.0, latency_us) if self.steps.asynchronous else 0.0
        return tuple(zip(sizes, rising, strict=True)), latency_us

    def _run_prompts(
        self, lengths: list[int], params: SamplingParams = _EVERYTHING, adapter: int = 0, image: Encoding | None = None
    ) -> None:
        """Run a step of prompts. Only the first has these parameters, the adapter and the image; others are plain."""
        slots, zeros = np.arange(len(lengths), dtype=np.int32), np.zeros(len(lengths), np.int32)
        new = [NewSlot(slot, np.zeros(1, np.int32), length, 0, SamplingParams()) for slot, length in enumerate(lengths)]
        new[0] = NewSlot(0, np.zeros(1, np.int32), lengths[0], 0, params, adapter)
        counts = np.array(lengths, np.int32)
        plan = StepPlan(0, new=new, slots=slots, num_computed=zeros, num_tokens=counts, num_samples=zeros + 1)
        if image is not None:
            plan.encodings, plan.embeds = [image], np.array([[0], [image.row], [image.num_rows]], np.int32)
            new[0].spans = np.array([[0, image.num_rows, 1, 1, image.num_rows]], np.int32)
        self.steps.launch(plan)()

    def _step_us(self, num_rows: int, num_plans: int, num_steps: int = 1) -> float:
        """Time of one decode step, measured over `num_plans` plans with `num_steps` steps each."""
        zeros, ones = np.zeros(num_rows, np.int32), np.ones(num_rows, np.int32)
        slots = np.arange(num_rows, dtype=np.int32)
        plan = StepPlan(0, slots=slots, num_computed=zeros, num_tokens=ones, num_samples=ones, num_steps=num_steps)
        start = time.perf_counter()
        for wait in [self.steps.launch(plan) for _ in range(num_plans)]:
            wait()
        return (time.perf_counter() - start) / (num_plans * num_steps) * 1e6
