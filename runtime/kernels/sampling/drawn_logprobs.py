"""Log-probabilities of sampled tokens under the distribution that each was drawn from, row by row.

That is the softmax of the logits after edits, masks, penalties and temperature, over the tokens that the filters keep.
The functions wait for no device. A row's bits depend on no other row.
"""

from __future__ import annotations

import math

import torch

from runtime.kernels.sampling.logprobs import log_softmax_rows

_AT_ONCE = 1 << 21  # logits sorted at once; each takes about 40 bytes


def drawn_logprobs(
    logits: torch.Tensor,  # [n, vocab] float32, edited; -inf for tokens that cannot be drawn
    token_ids: torch.Tensor,  # [n] int64, the drawn ones
    temperatures: torch.Tensor,  # [n] float32; 0 for greedy
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,  # top_k, top_p, min_p; None if applied
    most_top_k: int = 0,  # the largest top_k; 0 if a row with another filter lacks one
) -> torch.Tensor:
    """[n] float32; 0 for greedy rows."""
    scaled = logits / temperatures.where(temperatures > 0, 1.0)[:, None]
    if filters is not None:
        own = scaled.gather(1, token_ids[:, None])
        step = max(1, _AT_ONCE // scaled.shape[1])
        parts = zip(*(x.split(step) for x in (scaled, *filters)), strict=True)
        bounds = torch.cat([_bounds(rows, k, p, m, most_top_k) for rows, k, p, m in parts])
        # A drawn token survives by definition: rounding must not exclude it here.
        scaled.masked_fill_(scaled < torch.minimum(bounds[:, None], own), -math.inf)
    own = log_softmax_rows(scaled).gather(1, token_ids[:, None]).squeeze(1)
    return own.where(temperatures > 0, 0.0)


def _bounds(
    scaled: torch.Tensor,  # [n, vocab] float32
    top_k: torch.Tensor,  # [n] int32, 0 is off
    top_p: torch.Tensor,  # [n] float32, 1 is off
    min_p: torch.Tensor,  # [n] float32, 0 is off
    most_top_k: int,
) -> torch.Tensor:
    """[n] float32: the least logit that survives, as `top_k_top_p_bounds_torch` finds it."""
    vocab = scaled.shape[1]
    is_few = 0 < most_top_k < vocab
    ordered = scaled.topk(most_top_k).values if is_few else scaled.sort(-1, descending=True).values
    at = (top_k.long() - 1).clamp(0, ordered.shape[1] - 1)[:, None]
    kth = ordered.gather(1, at).where(top_k[:, None] > 0, -math.inf)
    # Sums of float64 do not depend on the way in which a scan is cut, for any practical comparison.
    masses = (ordered - ordered[:, :1]).double().exp().masked_fill_(ordered < kth, 0.0)
    reached = masses.cumsum(-1)
    last = (reached - masses < top_p.double()[:, None] * reached[:, -1:]).sum(-1, keepdim=True) - 1
    nucleus = ordered.gather(1, last.clamp(min=0)).where(top_p[:, None] < 1.0, -math.inf)
    return torch.maximum(torch.maximum(kth, nucleus), ordered[:, :1] + min_p[:, None].log()).squeeze(1)
