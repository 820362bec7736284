"""HeadDrafter: the engine's side of a head. Its draft tokens stay on the runner.

    plan n      next_drafts = 3    the step samples t; then its head makes g1, g2, g3
    plan n+1    a row with t and three DEVICE_DRAFT, and again next_drafts = 3
    result n+1  samples s1..s4, and the draft tokens g1, g2, g3 that they verify

The samples of step n leave before its head runs. So the engine plans step n+1 while the head computes."""

from __future__ import annotations

from itertools import islice

from runtime.base.model_info import HeadInfo
from runtime.core.plan import DEVICE_DRAFT, StepResult
from runtime.core.request_state import RequestState
from runtime.core.step import Step
from runtime.speculation.choose_k import Drafter, StepTimes


class HeadDrafter(Drafter):
    """Counts each request's draft tokens on the runner. They follow its last sample."""

    in_runner = True

    def __init__(self, head: HeadInfo) -> None:
        self.most = head.most_drafts
        self._times = StepTimes(head.step_us) if head.step_us else None
        self._ready: dict[RequestState, tuple[int, int]] = {}  # the request's epoch, and its draft tokens

    def step_us(self, num_rows: int) -> float:
        return 0.0 if self._times is None else self._times.us(num_rows)

    def on_result(self, step: Step, result: StepResult) -> None:
        if len(result.draft_token_ids):
            named = iter(result.draft_token_ids.tolist())
            step.sampled_rows = [(state, epoch, list(islice(named, len(d)))) for state, epoch, d in step.sampled_rows]
        for state, epoch, _ in step.sampled_rows:
            if state.epoch == epoch:
                self._ready[state] = epoch, step.next_drafts

    def guess(self, state: RequestState, most: int) -> list[int] | None:
        epoch, count = self._ready.get(state, (-1, 0))
        return [DEVICE_DRAFT] * min(most, count) if count and epoch == state.epoch else None

    def forget(self, state: RequestState) -> None:
        self._ready.pop(state, None)
