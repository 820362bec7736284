"""What sampling does to logits before one token is chosen: penalties, filters; and log-probabilities of the choice.

All are row-wise. Filters are lower bounds: a token survives if its logit reaches its row's bound, so ties survive
together and no order among equals can show.
"""

from __future__ import annotations

import math

import torch

_NUCLEUS_GUESSES = (1024, 8192)  # tokens sorted for top-p before all of them are; almost every nucleus is smaller


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


def lower_bounds(
    logits: torch.Tensor,  # [n, vocab] float32, already divided by the temperature
    top_k: torch.Tensor,  # [n] int64, 0 is off
    top_p: torch.Tensor,  # [n] float32, 1 is off
    min_p: torch.Tensor,  # [n] float32, 0 is off
) -> torch.Tensor:
    """[n, 1]: the least logit that survives top-k, then top-p among those, and min-p."""
    best = logits.amax(-1, keepdim=True)
    bounds = best + min_p[:, None].log()
    vocab = logits.shape[-1]
    if (most := int(top_k.max())) > 0:
        values = logits.topk(min(most, vocab)).values
        kth = values.gather(1, (top_k[:, None] - 1).clamp(0, values.shape[1] - 1))
        bounds = torch.maximum(bounds, kth.where(top_k[:, None] > 0, -math.inf))
        kept = logits.masked_fill(logits < kth.where(top_k[:, None] > 0, -math.inf), -math.inf)
    else:
        kept = logits
    rows = (top_p < 1.0).nonzero().squeeze(1)
    if len(rows):
        nucleus = _nucleus_bounds(kept.index_select(0, rows), top_p[rows, None])
        bounds[rows] = torch.maximum(bounds[rows], nucleus)
    return bounds


def _nucleus_bounds(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the last logit of the smallest set of best tokens whose probability reaches top_p."""
    vocab = logits.shape[-1]
    best_logprob = logits.log_softmax(-1).amax(
        -1, keepdim=True
    )  # unlike logsumexp, summed alike for any number of rows
    for size in (*(s for s in _NUCLEUS_GUESSES if s < vocab), vocab):
        ordered = logits.topk(size).values
        probs = (ordered - ordered[:, :1] + best_logprob).exp()
        mass = probs.cumsum(-1)
        if bool((mass[:, -1:] >= top_p).all()):
            break
    last = (mass - probs < top_p).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last)


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
