"""Steps: the interface of CpuSteps and GpuSteps, which run a runner's plans, and the result that both make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from runtime.core.plan import Int32s, StepPlan, StepResult
from runtime.features.grammar_state import Masks
from runtime.spec.pooling import Pooling
from runtime.worker.cpu.sampler import Logprobs
from runtime.worker.kv_cache import KVCache


class Steps(Protocol):
    """The state of a runner's requests, and the order of a step's parts, which runtime/core/plan.py promises:

    free slots -> open slots -> write block tables -> run rows -> sample -> keep the tokens in their slots
    """

    asynchronous: bool  # a step runs while the host does something else
    cache: KVCache
    pooling: Pooling | None  # how vectors are made of prompts; None: they are not

    def reset(self) -> None:
        """Forget all requests."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start the step; the answer waits for its result. On a CPU the step itself waits until then."""


def make_result(
    step_id: int,
    token_ids: torch.Tensor,
    logprobs: Logprobs | None,
    masks: Masks | None,
    pooled: tuple[Int32s, torch.Tensor] | None = None,
) -> StepResult:
    """The result of a step from tensors on the host; `pooled` are samples in place of which there are vectors."""
    result = StepResult(step_id, token_ids.numpy().astype(np.int32))
    if pooled is not None:
        result.pooled_rows, result.pooled = pooled[0], pooled[1].numpy().copy()
    if logprobs is not None:
        result.logprob_rows = logprobs.rows
        result.ranks = logprobs.ranks.numpy().astype(np.int32)
        result.logprobs = logprobs.logprobs.numpy()
        result.top_ids = logprobs.top_ids.numpy().astype(np.int32)
        result.top_logprobs = logprobs.top_logprobs.numpy()
        result.num_best = logprobs.num_best
    if masks is not None:
        result.begun, result.failures, result.deferred = masks.begun, masks.failures, masks.deferred
    return result
