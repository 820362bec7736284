"""Log-probabilities of chosen tokens and of the best tokens, row by row, without a wait for the device."""

from __future__ import annotations

import torch


def token_logprobs(
    logits: torch.Tensor,  # [m, vocab] float32, the model's own
    token_ids: torch.Tensor,  # [m] int64
    num_top: int,
    others: torch.Tensor | None = None,  # [m, num_others] int64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob [m], rank from 1 [m], top ids [m, num_top] best first, their logprobs [m, num_top]).

    `others` follow the top ids."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]))
    if others is None:
        return own.squeeze(1), ranks, top.indices, top.values
    ids, values = torch.cat((top.indices, others), 1), torch.cat((top.values, logprobs.gather(1, others)), 1)
    return own.squeeze(1), ranks, ids, values
