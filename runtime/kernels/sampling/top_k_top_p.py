"""Top-k, top-p and min-p as one lower bound for each row: a token survives if its logit reaches it.

Ties survive together, so the order of equal tokens does not matter. This function is the one rule: `choose.py` and
`cpu/sampling/filters.py` are its kernels, and `drawn_logprobs.py` calls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

_NUCLEUS_GUESSES = (1024, 8192)  # tokens sorted for top-p before all of them; almost every nucleus is smaller


class Filters(NamedTuple):
    """The parameters of rows that remove tokens, by their names in SamplingParams."""

    top_k: torch.Tensor  # [n] int32 or int64, 0 is off
    top_p: torch.Tensor  # [n] float32, 1 is off
    min_p: torch.Tensor  # [n] float32, 0 is off


# `top_k_top_p_bounds_torch`, or a function for the same tokens.
FilterBounds = Callable[[torch.Tensor, Filters], torch.Tensor]


def top_k_top_p_bounds_torch(
    logits: torch.Tensor,  # [n, vocab] float32, already divided by the temperature
    filters: Filters,
    num_sorted: int = 0,
) -> torch.Tensor:
    """[n] float32: the least logit that survives top-k, then top-p among the survivors, and min-p.

    `num_sorted` best logits of a row decide. With 0 their number depends on the rows, and the host waits."""
    top_k, top_p, min_p = filters
    vocab, k, p = logits.shape[-1], top_k.long()[:, None], top_p.double()[:, None]
    best = logits.amax(-1, keepdim=True)
    sizes = [num_sorted] if num_sorted else [s for s in _NUCLEUS_GUESSES if int(top_k.max()) < s < vocab] + [vocab]
    for size in sizes:
        ordered = logits.topk(size).values if size < vocab else logits.sort(-1, descending=True).values
        kth = ordered.gather(1, (k - 1).clamp(0, size - 1)).where(k > 0, -math.inf)
        # Sums of float64 do not depend on the way in which a scan is cut, for any practical comparison.
        kept, masses = ((x - best).double().exp().masked_fill_(x < kth, 0.0) for x in (logits, ordered))
        needed, reached = p * kept.sum(-1, keepdim=True), masses.cumsum(-1)
        if num_sorted or bool(((reached[:, -1:] >= needed) | (p >= 1.0)).all()):
            break
    last = (reached - masses < needed).sum(-1, keepdim=True) - 1
    nucleus = ordered.gather(1, last.clamp(min=0)).where(p < 1.0, -math.inf)  # a row with a NaN has none
    return torch.maximum(torch.maximum(kth, nucleus), best + min_p[:, None].log()).squeeze(1)
