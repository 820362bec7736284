"""Clients in a closed loop over the real scheduler. The executor computes nothing: a request's seed is the length of
its answer."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import Request, SamplingParams
from runtime.core.plan import StepPlan, StepResult
from runtime.core.request_state import NEVER, RequestState
from runtime.policy.admission import Admission
from tests.support.engine.whole import whole_scheduler

EOS, WORD = 0, 1
CONTEXT, BLOCK = 2048, 16


@dataclass(frozen=True)
class Clients:
    """`num` clients that each send a request when the last one was answered. Answers have random lengths, up to
    `max_tokens`, or up to the context if it is None."""

    num: int
    length: Callable[[random.Random], float]
    max_tokens: int | None = None


class Simulation:
    """`contexts` whole contexts of KV memory, 64 slots."""

    def __init__(self, *groups: Clients, contexts: int = 3, seed: int = 0, knows_lengths: bool = False) -> None:
        config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048, block_size=BLOCK, prefix_cache=False)
        info = ModelInfo("f", 2, CONTEXT, (EOS,), contexts * CONTEXT // BLOCK + 1, BLOCK, "none", "none")
        self.scheduler = whole_scheduler(config, info)
        self._admission = self.scheduler.extras[Admission]
        if knows_lengths:
            self._admission._expect = self._know
        self._num_asked = 0
        self._ends: dict[int, int] = {}  # slot -> number of tokens with which its request ends
        self.num_steps = self.num_rows = self.num_done = 0
        for number, group in enumerate(g for g in groups for _ in range(g.num)):
            self._ask(group, random.Random(f"{seed} {number}"))  # one for each client, whatever the order of service

    def _know(self, state: RequestState):
        """In the place of Admission._expect."""
        length = min(state.max_len, state.prompt_len + state.request.seed)
        known = self._admission._expected[state]
        known.num_blocks, known.revise_at = -(-length // BLOCK), NEVER
        return known

    def _ask(self, group: Clients, rng: random.Random) -> None:
        prompt_len = rng.randrange(20, 150)
        length, room = max(1, int(group.length(rng))), CONTEXT - prompt_len
        params = SamplingParams(max_tokens=min(group.max_tokens or room, room))
        self._num_asked += 1
        self.scheduler.add(
            Request(str(self._num_asked), [WORD] * prompt_len, prompt_len, params, seed=length), (group, rng)
        )

    def run(self, num_requests: int) -> tuple[float, float]:
        """Answer `num_requests` more; returns the mean number of rows of a step, and preemptions for each request."""
        scheduler = self.scheduler
        steps, rows, done, preemptions = self.num_steps, self.num_rows, self.num_done, scheduler.stats.preemptions
        while self.num_done < done + num_requests:
            step = scheduler.schedule()
            assert step is not None
            plan = step.plan
            output = scheduler.commit(StepResult(plan.step_id, self._sample(plan)))
            self.num_steps += 1
            self.num_rows += len(plan.slots)
            for state, _ in output.finished:
                self.num_done += 1
                self._ask(*state.owner)
        num_done = self.num_done - done
        concurrency = (self.num_rows - rows) / (self.num_steps - steps)
        return concurrency, (scheduler.stats.preemptions - preemptions) / num_done

    def _sample(self, plan: StepPlan) -> np.ndarray:
        for new in plan.new:
            self._ends[new.slot] = new.prompt_len + new.seed
        columns = plan.slots, plan.num_computed, plan.num_tokens, plan.num_samples
        rows = zip(*(column.tolist() for column in columns), strict=True)
        tokens = [EOS if start + count + 1 >= self._ends[slot] else WORD for slot, start, count, n in rows if n]
        return np.array(tokens, np.int32)
