"""Logprobs: log-probabilities of sampled tokens, or of prompt tokens, on their way into a StepResult."""

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

    rows: Int32s  # the samples that the rows belong to; empty for prompt tokens
    num_best: int  # best alternatives of each row; alternatives by id come after them
    ranks: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    drawn: torch.Tensor | None = None  # of rows that report sampling_logprobs; None if none does

    def downloaded(self, download: Callable[[torch.Tensor], torch.Tensor]) -> Logprobs:
        """On the host, when the step is over."""
        ranks, own, top_ids, top = map(download, (self.ranks, self.logprobs, self.top_ids, self.top_logprobs))
        drawn = None if self.drawn is None else download(self.drawn)
        return Logprobs(self.rows, self.num_best, ranks, own, top_ids, top, drawn)

    def report(self, result: StepResult) -> None:
        """Write the rows into the result: the rows of samples first, then the rows of prompt tokens.

        Rows with fewer alternatives are filled up with zeros, which the engine does not read."""
        ranks, ids = (x.numpy().astype(np.int32) for x in (self.ranks, self.top_ids))
        values, top = self.logprobs.numpy().copy(), self.top_logprobs.numpy().copy()
        if not len(result.ranks):
            result.logprob_rows, result.num_best = self.rows, self.num_best
            if self.drawn is not None:
                result.sampling_logprobs = self.drawn.numpy().copy()
        if len(result.ranks):
            width = max(ids.shape[1], result.top_ids.shape[1])
            ids, top = (
                np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in pair])
                for pair in ((result.top_ids, ids), (result.top_logprobs, top))
            )
            ranks, values = np.concatenate((result.ranks, ranks)), np.concatenate((result.logprobs, values))
        result.ranks, result.logprobs, result.top_ids, result.top_logprobs = ranks, values, ids, top
