"""Steps of the torch kernels: inputs and gathers are planned on the host, and a step runs when its result is wanted.

The path of a CPU, and the twin that every other path is tested against (C7).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from runtime.core.plan import Int32s, StepPlan, StepResult, joined
from runtime.features.grammar_state import GrammarState, Masks
from runtime.features.pooler import Pooler
from runtime.features.prompt_scorer import PromptScorer
from runtime.kernels.attention.attention_torch import AttentionShape
from runtime.models.decoder import Decoder
from runtime.spec.pooling import Pooling
from runtime.worker.cpu.inputs import StepInput, build_input
from runtime.worker.cpu.sampler import Logprobs, Sampler
from runtime.worker.kv_cache import KVCache
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.slots import Slots
from runtime.worker.steps import make_result


class CpuSteps:
    """The requests' slots and parameters, and the order of a step's parts."""

    asynchronous = False

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        num_slots: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        grammar_state: GrammarState,
        pooling: Pooling | None = None,
        classifier: torch.Tensor | None = None,
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.split = SplitLogits(decoder.spec.whole.vocab_size, decoder.communicator)
        self.num_slots, self.max_model_len, self.eos_token_ids = num_slots, max_model_len, eos_token_ids
        self.grammar_state = grammar_state
        self.pooling, self.classifier = pooling, classifier
        self.attention_shape = AttentionShape(
            num_heads=decoder.spec.num_heads,
            num_kv_heads=cache.num_kv_heads,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            dtype=decoder.numerics.dtype,
            device=cache.device,
            exact=decoder.numerics.deterministic,
        )
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        device = self.cache.device
        max_blocks = -(-self.max_model_len // self.cache.block_size)
        self.slots = Slots(self.num_slots, self.max_model_len, max_blocks, device)
        self.sampler = Sampler(self.num_slots, self.split.vocab_size, self.eos_token_ids, device, self.split)
        self.scorer = PromptScorer(self.decoder, self.num_slots, self.split)
        self.pooler = Pooler(self.decoder, self.num_slots, self.pooling, self.classifier)
        self.grammar_state.clear()
        self.poisoned = False  # some step had a non-finite value, so that free blocks may hold one

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """The step, deferred until its result is wanted."""
        if plan.num_steps > 1:
            return lambda: joined([self._execute(one) for one in plan.expanded()])
        return partial(self._execute, plan)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.freed.tolist():
            self.sampler.remove(slot)
            self.scorer.remove(slot)
            self.pooler.remove(slot)
            self.grammar_state.remove(slot)
        for new in plan.new:
            self.slots.add(new)
            self.sampler.add(new)
            self.scorer.add(new)
            self.pooler.add(new)
            self.grammar_state.add(new)
        self.slots.write_tables(plan.block_table_writes)
        if len(plan.draft_token_ids):
            self.slots.write_given(plan)
        if self.poisoned:
            self._clear_fresh_blocks(plan)
        step = build_input(plan, self.slots, self.attention_shape)
        hidden = self.decoder.forward(step.batch, self.cache.layers)
        if not hidden.sum(dtype=torch.float32).isfinite():
            self.poisoned = True
        where = self.scorer.find(plan, step.last, self.max_model_len)
        masks = self.grammar_state.masks(plan)
        token_ids, logprobs = self._sample(hidden, step, masks)
        if where.size:
            at = torch.from_numpy(where).to(hidden.device)
            prompts = self.scorer.score(hidden, self.slots.flat_tokens, at)
            logprobs = prompts if logprobs is None else logprobs.then(prompts)
        pooled = self._pooled(hidden, plan, step)
        return make_result(plan.step_id, token_ids.cpu(), logprobs and logprobs.map(torch.Tensor.cpu), masks, pooled)

    def _pooled(self, hidden: torch.Tensor, plan: StepPlan, step: StepInput) -> tuple[Int32s, torch.Tensor] | None:
        """Which of the step's samples are in place of vectors, and the vectors."""
        self.pooler.accumulate(hidden, plan, step.last)
        if not (which := self.pooler.find(plan)).size:
            return None
        states = hidden.index_select(0, torch.from_numpy(step.sampled[which]).to(hidden.device))
        return which, self.pooler.pool(states, step.sampled_slots[which], step.sampled_positions[which] - 1).cpu()

    def _sample(
        self, hidden: torch.Tensor, step: StepInput, masks: Masks | None
    ) -> tuple[torch.Tensor, Logprobs | None]:
        device = self.cache.device
        if not len(step.sampled):
            return torch.zeros(0, device=device), None
        logits = self.decoder.logits(hidden.index_select(0, torch.from_numpy(step.sampled).to(device)))
        token_ids, logprobs = self.sampler.sample(logits, step.sampled_slots, step.sampled_positions, self.slots, masks)
        if masks is not None:
            self.grammar_state.sampled(masks, token_ids.cpu().numpy)
        at = step.sampled_slots.astype(np.int64) * self.slots.max_model_len + step.sampled_positions
        self.slots.write_sampled(torch.from_numpy(at).to(device), token_ids)
        return token_ids, logprobs

    def _clear_fresh_blocks(self, plan: StepPlan) -> None:
        """Zero the blocks that rows of this step begin to fill: masked positions must be finite, and their last owner
        may have left something that is not (C9: a fault stays with its request)."""
        starts = np.full(self.num_slots, np.iinfo(np.int32).max, np.int32)
        starts[plan.slots] = plan.num_computed
        slots, index, blocks = plan.block_table_writes
        fresh = blocks[index >= -(-starts[slots] // self.cache.block_size)]
        self.cache.clear(torch.from_numpy(fresh.astype(np.int64)).to(self.cache.device))
