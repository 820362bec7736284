"""Times of an engine's steps by their rows, tokens and contexts, as measured on one H200, and the facts of the model.

Decode steps come from `benchmarks/results/decode.jsonl` (p50), less the time of their contexts. Steps with prompts come
from `benchmarks/results/prefill.jsonl` and `prefill_steps` (benchmarks/NOTES.md), less the
time of their attention. Steps of more tokens than the largest graph has, 4,096, are pieces of that size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from runtime.core.plan import StepPlan

_MOST_ROWS = 256
_GRAPHS = ((64, 512), (128, 2048))  # (multiple, most tokens) to which steps with prompts are padded


@dataclass(frozen=True)
class StepTimes:
    """Step times of one model on one kind of device. A step that only decodes takes `decode_us` by its rows and
    `position_us` for each position that they attend to. One with prompts takes `prompt_us` by its tokens and `row_us`
    more for each decode row. Attention takes `pair_us` for each pair of a prompt's token and a position. `context_us`
    is added, since few tokens behind many positions leave most of the device idle."""

    decode_us: tuple[tuple[int, float], ...]
    position_us: float
    prompt_us: tuple[tuple[int, float], ...]
    row_us: float
    pair_us: float
    context_us: float  # for each position before a prompt's chunk, of the prompt with most of them
    launch_us: float  # from a plan to the device's begin, where the device waits for it
    front_us: tuple[float, float]  # from a client to the engine, and from the engine back to the client
    start_s: float  # of an engine, until it is ready

    @cached_property
    def _rows_us(self) -> list[float]:
        rows, us = zip(*self.decode_us, strict=True)
        return [float(t) for t in np.interp(range(_MOST_ROWS + 1), rows, us)]

    @cached_property
    def _tokens_us(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        tokens, us = zip(*self.prompt_us, strict=True)
        return np.array(tokens, np.float64), np.array(us, np.float64)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, of prompts that are neither short nor long."""
        tokens, us = next(entry for entry in self.prompt_us if entry[0] >= 2048)
        return tokens * 1e6 / us

    def decode_s(self, num_rows: int, num_positions: int) -> float:
        """The time of a step of `num_rows` decode rows that attend to `num_positions` positions together."""
        return (self._rows_us[num_rows] + self.position_us * num_positions) / 1e6

    def step_s(self, plan: StepPlan) -> float:
        """The time of any step, in seconds."""
        counts, ends = plan.num_tokens.tolist(), (plan.num_computed + plan.num_tokens).tolist()
        total, num_decoding, num_positions, num_pairs, context = 0, 0, 0, 0, 0
        for count, end in zip(counts, ends, strict=True):
            total += count
            if count == 1:
                num_decoding += 1
                num_positions += end
            else:
                num_pairs += count * (end - count // 2)
                context = max(context, end - count)
        if num_decoding == total:
            return self.decode_s(num_decoding, num_positions)
        for multiple, most in _GRAPHS:
            if total <= most:
                total += -total % multiple
                break
        prompts_us = float(np.interp(total, *self._tokens_us)) + self.context_us * context
        return (
            prompts_us + self.row_us * num_decoding + self.position_us * num_positions + self.pair_us * num_pairs
        ) / 1e6


MODELS = {
    "llama-3.2-3b": StepTimes(
        decode_us=((1, 1763.0), (2, 2040.0), (8, 2140.0), (64, 2580.0), (256, 3970.0)),
        position_us=0.022,
        prompt_us=(
            (16, 1950.0), (64, 2600.0), (128, 2700.0), (256, 3340.0), (320, 4040.0), (512, 5350.0), (1024, 10300.0),
            (1536, 15000.0), (2048, 20300.0), (4096, 40600.0), (8192, 81200.0),
        ),
        row_us=12.0, pair_us=0.00052, context_us=0.4, launch_us=650.0, front_us=(1300.0, 900.0), start_s=4.0,
    ),
    "llama-3.1-8b": StepTimes(
        decode_us=((1, 3653.0), (2, 3970.0), (8, 4070.0), (32, 4720.0), (64, 4835.0), (128, 5570.0), (256, 8060.0)),
        position_us=0.0266,
        prompt_us=(
            (16, 4300.0), (64, 5200.0), (256, 7200.0), (512, 11500.0), (1024, 23000.0), (2048, 44800.0),
            (8192, 179300.0),
        ),
        row_us=15.0, pair_us=0.00099, context_us=0.45, launch_us=650.0, front_us=(1300.0, 900.0), start_s=5.2,
    ),
}  # fmt: skip
