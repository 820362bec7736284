"""Top-k, top-p and min-p as one lower bound a row: a token survives if its logit reaches it. Ties survive together,
so that no order among equals can show.

The kernel needs no sort. Floats become int32 keys of the same order; the largest threshold that enough keys (top-k) or
enough probability (top-p) reach is found four bits at a time. Only tokens that can matter are searched: at least k
groups of 64 tokens have a best that reaches the k-th best of these bests, hence the k-th best token does; and all
tokens with less than (1 - p) / vocab of the best one's probability hold less than 1 - p together.
"""

from __future__ import annotations

import math

import torch

from runtime.kernels._triton import jit, tl

_NUCLEUS_GUESSES = (1024, 8192)  # tokens sorted for top-p before all of them are; almost every nucleus is smaller
_TILE = 2048  # tokens that a program reads at once
_GROUP = 64  # tokens whose best one is a first guess at top-k
_BLOCK = 512  # keys searched at once


def lower_bounds_torch(
    logits: torch.Tensor,  # [n, vocab] float32, already divided by the temperature
    top_k: torch.Tensor,  # [n] int32 or int64, 0 is off
    top_p: torch.Tensor,  # [n] float32, 1 is off
    min_p: torch.Tensor,  # [n] float32, 0 is off
) -> torch.Tensor:
    """[n] float32: the least logit that survives top-k, then top-p among those, and min-p."""
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
    """[n, 1]: the last logit of the smallest set of best tokens whose probability reaches top_p."""
    vocab = logits.shape[-1]
    # The best log-probability, unlike logsumexp, is summed alike for any number of rows.
    best_logprob = logits.log_softmax(-1).amax(-1, keepdim=True)
    for size in (*(s for s in _NUCLEUS_GUESSES if s < vocab), vocab):
        ordered = logits.topk(size).values
        probs = (ordered - ordered[:, :1] + best_logprob).exp()
        mass = probs.cumsum(-1)
        if bool((mass[:, -1:] >= top_p).all()):
            break
    last = (mass - probs < top_p).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last.clamp(min=0))  # a row with a NaN has none


@jit
def _key_of(x):
    """int32 that orders as the float32 does; with -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _float_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _weigh(keys_ptr, num_keys, thresholds, best, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the keys that reach each of thresholds [16]: their number, or with MASS the sum of e^(logit - best)."""
    weights = tl.zeros([16, BLOCK], tl.float32)
    for start in range(0, num_keys, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + at, mask=at < num_keys, other=0)
        weight = tl.exp(_float_of(keys) - best) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.where(at < num_keys, weight, 0.0)
        weights += tl.where(keys[None, :] >= thresholds[:, None], weight[None, :], 0.0)
    return tl.sum(weights, axis=1)


@jit
def _threshold(keys_ptr, num_keys, target, best, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest int32 whose weight (see `_weigh`) reaches the target; as low as it goes if none does. Sums of the
    same order grow with what is summed, rounded or not, so that the search by digits is sound."""
    digits = tl.arange(0, 16)
    threshold = tl.full([], -2147483648, tl.int32)
    for i in range(8):
        shift = 28 - 4 * i
        weights = _weigh(keys_ptr, num_keys, threshold + (digits << shift), best, MASS, BLOCK)
        digit = tl.sum((weights >= target).to(tl.int32), axis=0) - 1
        threshold += tl.maximum(digit, 0) << shift
    return threshold


@jit
def _lower_bounds_kernel(
    logits_ptr,  # [n, vocab] float32 contiguous
    top_k_ptr,  # [n] int32 or int64, param_stride apart, like the two below
    top_p_ptr,  # [n] float32
    min_p_ptr,  # [n] float32
    keys_ptr,  # [n, num_groups + vocab] int32: workspace
    bounds_ptr,  # [n] float32
    vocab,
    num_groups,  # a multiple of TILE / GROUP
    param_stride,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    groups_ptr = keys_ptr + row * (num_groups + vocab)
    kept_ptr = groups_ptr + num_groups
    top_k = tl.minimum(tl.load(top_k_ptr + row * param_stride), vocab).to(tl.int32)
    top_p = tl.load(top_p_ptr + row * param_stride)
    min_p = tl.load(min_p_ptr + row * param_stride)

    bests = tl.full([TILE // GROUP], -float("inf"), tl.float32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf"))
        of_groups = tl.max(tl.reshape(logits, [TILE // GROUP, GROUP]), axis=1)
        tl.store(groups_ptr + start // GROUP + tl.arange(0, TILE // GROUP), _key_of(of_groups))
        bests = tl.maximum(bests, of_groups)
    best = tl.max(bests, axis=0)
    bound = tl.full([], -float("inf"), tl.float32)
    if (top_k > 0) | (top_p < 1.0):
        tl.debug_barrier()  # what other threads stored is read from here on
        low = _key_of(bound)
        if top_k > 0:
            if top_k <= num_groups:
                low = tl.maximum(low, _threshold(groups_ptr, num_groups, top_k, best, False, BLOCK))
        else:
            low = tl.maximum(low, _key_of(best + tl.log((1.0 - top_p) * (0.5 / vocab))))  # half: room for rounding
        num_kept = tl.full([], 0, tl.int32)
        masses = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab, TILE):
            ids = start + tl.arange(0, TILE)
            logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf"))
            keys = _key_of(logits)
            kept = ((keys >= low) & (ids < vocab)).to(tl.int32)
            tl.store(kept_ptr + num_kept + tl.cumsum(kept, axis=0) - 1, keys, mask=kept == 1)
            num_kept += tl.sum(kept, axis=0)
            masses += tl.exp(logits - best)
        tl.debug_barrier()
        threshold, mass = low, tl.sum(masses, axis=0)
        if top_k > 0:
            threshold = _threshold(kept_ptr, num_kept, top_k, best, False, BLOCK)
            mass = tl.max(_weigh(kept_ptr, num_kept, threshold + tl.zeros([16], tl.int32), best, True, BLOCK), axis=0)
        if top_p < 1.0:
            threshold = tl.maximum(threshold, _threshold(kept_ptr, num_kept, top_p * mass, best, True, BLOCK))
        bound = _float_of(tl.maximum(threshold, low))
    if min_p > 0.0:
        bound = tl.maximum(bound, best + tl.log(min_p))
    tl.store(bounds_ptr + row, bound)


def lower_bounds_triton(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`lower_bounds_torch` as one kernel, a program a row, without a wait for the host. The three parameters have one
    stride."""
    n, vocab = logits.shape
    num_groups = -(-vocab // _TILE) * (_TILE // _GROUP)
    bounds = torch.empty(n, dtype=torch.float32, device=logits.device)
    keys = torch.empty((n, num_groups + vocab), dtype=torch.int32, device=logits.device)
    _lower_bounds_kernel[(n,)](
        logits, top_k, top_p, min_p, keys, bounds, vocab, num_groups, top_k.stride(0),
        GROUP=_GROUP, TILE=_TILE, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return bounds
