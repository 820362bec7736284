"""How often a draft samples the same as its target, without an engine: both run only as the steps of a runner.

Both sample with the same noise at a position (C4). So a guess is right exactly if the draft, after the target's own
tokens, samples the target's next token. One pass over a finished text therefore decides all of its guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot, StepPlan
from runtime.models.decoder import Decoder
from runtime.worker.cpu.cpu_steps import CpuSteps
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.kv_cache import KVCache

_BLOCK_SIZE = 16  # the served size


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the tokens sampled after it."""

    token_ids: list[int]
    prompt_len: int
    seed: int
    temperature: float

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


def extend(decoder: Decoder, prompts: Sequence[Text], num_tokens: int) -> tuple[list[Text], np.ndarray]:
    """The texts with `num_tokens` more tokens, sampled in one batch without regard to EOS. Also the log-probabilities
    of these tokens, [num_texts, num_tokens] in nats before temperature."""
    steps = _steps(decoder, len(prompts), max(len(p.token_ids) for p in prompts) + num_tokens)
    news = [_new_slot(slot, prompt) for slot, prompt in enumerate(prompts)]
    lengths = np.array([len(p.token_ids) for p in prompts], np.int32)
    slots, ones = np.arange(len(prompts), dtype=np.int32), np.ones(len(prompts), np.int32)
    first = StepPlan(
        0,
        new=news,
        block_table_writes=_tables(steps, len(prompts)),
        slots=slots,
        num_computed=lengths * 0,
        num_tokens=lengths,
    )
    plans = [
        first,
        *(StepPlan(i, slots=slots, num_computed=lengths + i - 1, num_tokens=ones) for i in range(1, num_tokens)),
    ]
    for plan in plans:
        plan.num_samples = ones
    results = [wait() for wait in [steps.launch(plan) for plan in plans]]
    sampled = np.stack([result.token_ids for result in results], 1).tolist()
    texts = [replace(p, token_ids=[*p.token_ids, *new]) for p, new in zip(prompts, sampled, strict=True)]
    return texts, np.stack([result.logprobs for result in results], 1)


def find_matches(decoder: Decoder, texts: Sequence[Text]) -> list[np.ndarray]:
    """For each token of each output, whether the decoder samples it too after all tokens before it."""
    steps = _steps(decoder, 1, max(len(text.token_ids) for text in texts))
    waits = []
    for i, text in enumerate(texts):
        counts, samples = np.array([[len(text.token_ids) - 1], [len(text.output)]], np.int32)
        zero = np.zeros(1, np.int32)
        plan = StepPlan(
            i, new=[_new_slot(0, text)], slots=zero, num_computed=zero, num_tokens=counts, num_samples=samples
        )
        plan.block_table_writes = _tables(steps, 1)
        waits.append(steps.launch(plan))
    return [wait().token_ids == text.output for wait, text in zip(waits, texts, strict=True)]


def tokens_a_round(matches: Sequence[np.ndarray], num_guesses: int) -> float:
    """The mean yield of a round that verifies `num_guesses`: the guesses before the first wrong one, and the target's
    own token. Rounds that a text's end cuts short do not count."""
    num_rounds = num_tokens = 0
    for right in matches:
        at = 0
        while at + num_guesses < len(right):
            wrong = np.flatnonzero(~right[at : at + num_guesses])
            at += (step := 1 + (int(wrong[0]) if len(wrong) else num_guesses))
            num_tokens, num_rounds = num_tokens + step, num_rounds + 1
    return num_tokens / num_rounds if num_rounds else 0.0


def _steps(decoder: Decoder, num_slots: int, max_len: int) -> GpuSteps | CpuSteps:
    """Steps with a KV cache in which every slot has room for `max_len` tokens."""
    numerics = decoder.numerics
    num_blocks = 1 + num_slots * -(-max_len // _BLOCK_SIZE)
    cache = KVCache(decoder.spec.kv_cache(numerics.dtype_name), num_blocks, _BLOCK_SIZE, numerics.device)
    kind = GpuSteps if numerics.backend == "triton" else CpuSteps
    return kind(decoder, cache, num_slots, max_len, ())


def _tables(steps: GpuSteps | CpuSteps, num_slots: int) -> Int32s:
    """StepPlan.block_table_writes that give each slot its share of the blocks, without block 0."""
    num_blocks = -(-steps.max_model_len // _BLOCK_SIZE)
    slots, index = np.divmod(np.arange(num_slots * num_blocks, dtype=np.int32), np.int32(num_blocks))
    return np.stack((slots, index, slots * num_blocks + index + 1))


def _new_slot(slot: int, text: Text) -> NewSlot:
    params = SamplingParams(temperature=text.temperature, ignore_eos=True, logprobs=0)
    return NewSlot(slot, np.array(text.token_ids, np.int32), text.prompt_len, text.seed, params)
