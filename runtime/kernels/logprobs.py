"""Log-probabilities of chosen tokens and of the best ones: row-wise, and without a wait for the device."""

from __future__ import annotations

import torch


def token_logprobs(
    logits: torch.Tensor,  # [m, vocab] float32, the model's own
    token_ids: torch.Tensor,  # [m] int64
    num_top: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob [m], rank from 1 [m], top ids [m, num_top] best first, their logprobs [m, num_top])."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]))
    return own.squeeze(1), ranks, top.indices, top.values
