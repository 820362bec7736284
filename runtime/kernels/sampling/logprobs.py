"""Log-probabilities of chosen tokens and the best tokens, row by row, without a wait for the device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_ALIGNED = 4  # float32 numbers that a GPU loads at once


def log_softmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities [m, vocab or a little more] for float32 logits rows.

    A GPU sums a row in an order that depends on its first element's alignment. Rows with any vocabulary begin at a
    multiple of 16 bytes here, so a row's bits do not depend on its place. Columns that fill up a row have -inf."""
    if logits.is_cuda and (missing := -logits.shape[-1] % _ALIGNED):
        logits = F.pad(logits, (0, missing), value=-math.inf)
    return logits.log_softmax(-1)


def token_logprobs(
    logits: torch.Tensor,  # [m, vocab] float32, the model's own
    token_ids: torch.Tensor,  # [m] int64
    num_top: int,
    others: torch.Tensor | None = None,  # [m, num_others] int64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob [m], rank from 1 [m], top ids [m, num_top] best first, their logprobs [m, num_top]).

    `others` follow the top ids."""
    logprobs = log_softmax_rows(logits)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]))
    if others is None:
        return own.squeeze(1), ranks, top.indices, top.values
    ids, values = torch.cat((top.indices, others), 1), torch.cat((top.values, logprobs.gather(1, others)), 1)
    return own.squeeze(1), ranks, ids, values
