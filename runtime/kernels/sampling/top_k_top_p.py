"""Top-k, top-p and min-p as one lower bound for each row: a token survives if its logit reaches it.

Ties survive together, so the order of equal tokens does not matter. `choose.py` is the kernel for the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

# `top_k_top_p_bounds_torch`, or a function for the same tokens.
FilterBounds = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_NUCLEUS_GUESSES = (1024, 8192)  # tokens sorted for top-p before all of them are; almost every nucleus is smaller


def top_k_top_p_bounds_torch(
    logits: torch.Tensor,  # [n, vocab] float32, already divided by the temperature
    top_k: torch.Tensor,  # [n] int32 or int64, 0 is off
    top_p: torch.Tensor,  # [n] float32, 1 is off
    min_p: torch.Tensor,  # [n] float32, 0 is off
) -> torch.Tensor:
    """[n] float32: the least logit that survives top-k, then top-p among the survivors, and min-p."""
    best = logits.amax(-1, keepdim=True)
    bounds = best + min_p[:, None].log()
    vocab = logits.shape[-1]
    if (most := int(top_k.max())) > 0:
        values = logits.topk(min(most, vocab)).values
        kth = values.gather(1, (top_k[:, None].long() - 1).clamp(0, values.shape[1] - 1))
        bounds = torch.maximum(bounds, kth.where(top_k[:, None] > 0, -math.inf))
        kept = logits.masked_fill(logits < kth.where(top_k[:, None] > 0, -math.inf), -math.inf)
    else:
        kept = logits
    rows = (top_p < 1.0).nonzero().squeeze(1)
    if len(rows):
        nucleus = _nucleus_bounds(kept.index_select(0, rows), top_p[rows, None])
        bounds[rows] = torch.maximum(bounds[rows], nucleus)
    return bounds.squeeze(1)


def _nucleus_bounds(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the last logit of the smallest set of best tokens with a probability of at least top_p."""
    vocab = logits.shape[-1]
    # The best log-probability, unlike logsumexp, has the same order of sums for any number of rows.
    best_logprob = logits.log_softmax(-1).amax(-1, keepdim=True)
    for size in (*(s for s in _NUCLEUS_GUESSES if s < vocab), vocab):
        ordered = logits.topk(size).values
        probs = (ordered - ordered[:, :1] + best_logprob).exp()
        mass = probs.cumsum(-1)
        if bool((mass[:, -1:] >= top_p).all()):
            break
    last = (mass - probs < top_p).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last.clamp(min=0))  # a row with a NaN has none
