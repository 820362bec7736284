"""Log-probabilities of sampled tokens under the distribution that each was drawn from, row by row.

That is the softmax of the logits after edits, masks, penalties and temperature, over the tokens that the filters keep.
The functions wait for no device. A row's bits depend on no other row.
"""

from __future__ import annotations

import math

import torch

from runtime.kernels.sampling.logprobs import log_softmax_rows
from runtime.kernels.sampling.top_k_top_p import Filters, top_k_top_p_bounds_torch

_AT_ONCE = 1 << 21  # logits sorted at once; each takes about 40 bytes


def drawn_logprobs(
    logits: torch.Tensor,  # [n, vocab] float32, edited; -inf for tokens that cannot be drawn
    token_ids: torch.Tensor,  # [n] int64, the drawn ones
    temperatures: torch.Tensor,  # [n] float32; 0 for greedy
    filters: Filters | None = None,  # None if applied
    most_top_k: int = 0,  # the largest top_k; 0 if a row with another filter lacks one
) -> torch.Tensor:
    """[n] float32; 0 for greedy rows."""
    scaled = logits / temperatures.where(temperatures > 0, 1.0)[:, None]
    if filters is not None:
        own = scaled.gather(1, token_ids[:, None])
        vocab = scaled.shape[1]
        parts = zip(*(x.split(max(1, _AT_ONCE // vocab)) for x in (scaled, *filters)), strict=True)
        num_sorted = min(most_top_k or vocab, vocab)
        bounds = torch.cat([top_k_top_p_bounds_torch(rows, Filters(*part), num_sorted) for rows, *part in parts])
        # A drawn token survives by definition: rounding must not exclude it here.
        scaled.masked_fill_(scaled < torch.minimum(bounds[:, None], own), -math.inf)
    own = log_softmax_rows(scaled).gather(1, token_ids[:, None]).squeeze(1)
    return own.where(temperatures > 0, 0.0)
