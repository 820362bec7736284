"""What sampling wants beside filters and noise: penalties before a token is chosen, log-probabilities of the choice.

All are row-wise, and wait for no device.
"""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,  # [n, vocab] float32, changed in place
    tokens: torch.Tensor,  # [n, max_known] int32, what lies beyond a row's num_known is ignored
    num_known: torch.Tensor,  # [n] prompt and output tokens so far
    prompt_len: torch.Tensor,  # [n]
    repetition: torch.Tensor,  # [n] float32, 1 is off
    frequency: torch.Tensor,  # [n] float32, 0 is off
    presence: torch.Tensor,  # [n] float32, 0 is off
) -> None:
    """Repetition (arXiv 1909.05858) over prompt and output; frequency and presence, as OpenAI's, over output."""
    at = torch.arange(tokens.shape[1], device=tokens.device)
    known = at < num_known[:, None]
    output = known & (at >= prompt_len[:, None])
    ids = tokens.long()
    seen = torch.zeros_like(logits).scatter_add_(1, ids, known.float()) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, ids, output.float())
    factor = torch.where(logits > 0, 1.0 / repetition[:, None], repetition[:, None])
    logits.mul_(factor.where(seen, 1.0))
    logits.sub_(counts * frequency[:, None]).sub_((counts > 0) * presence[:, None])


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
