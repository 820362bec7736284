"""Logprobs: log-probabilities of sampled tokens on their way into a StepResult."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.core.plan import StepResult


@dataclass(slots=True)
class Logprobs:
    """One row a token, with the columns of StepResult."""

    rows: Int32s  # the samples that the rows belong to
    num_best: int  # best alternatives of each row; alternatives by id come after them
    ranks: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    drawn: torch.Tensor | None = None  # values for rows that report sampling_logprobs; None if none does

    def downloaded(self, download: Callable[[torch.Tensor], torch.Tensor]) -> Logprobs:
        """On the host, when the step is over."""
        ranks, own, top_ids, top = map(download, (self.ranks, self.logprobs, self.top_ids, self.top_logprobs))
        drawn = None if self.drawn is None else download(self.drawn)
        return Logprobs(self.rows, self.num_best, ranks, own, top_ids, top, drawn)

    def report(self, result: StepResult) -> None:
        """Write the rows into the result."""
        result.logprob_rows, result.num_best = self.rows, self.num_best
        result.ranks, result.top_ids = (x.numpy().astype(np.int32) for x in (self.ranks, self.top_ids))
        result.logprobs, result.top_logprobs = self.logprobs.numpy().copy(), self.top_logprobs.numpy().copy()
        if self.drawn is not None:
            result.sampling_logprobs = self.drawn.numpy().copy()
