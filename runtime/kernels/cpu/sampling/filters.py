"""Top-k, top-p and min-p without a sort of the vocabulary: `top_k_top_p_bounds_torch` on a CPU.

A kernel sums the masses of all tokens, and collects the logits near the best one. If they contain the bound, only they
are sorted; else the kernel runs again with a wider range."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.kernels.llvm.language import (
    F32s,
    Float,
    I64s,
    Int,
    Value,
    f32,
    i32,
    i64,
    loop,
    maximum,
    number,
    variable,
    when,
    where,
    zeros,
)
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.llvm.mathematics import exp
from runtime.kernels.sampling.top_k_top_p import Filters

_LANES = 16
_RANGES = (8.0, 16.0, math.inf)  # distances below the best logit


def collect(
    logits: F32s,  # [vocab]
    found: F32s,  # [vocab]: the logits that are at most `below` less than the best one
    results: F32s,  # [2]: the best logit, and the sum of e^(logit - best)
    count: I64s,  # [1]
    vocab: Int,
    below: Float,
    part: Int,
    parts: Int,
) -> None:
    """One part does all of the work."""
    whole = vocab // _LANES * _LANES
    best = variable(number(-math.inf, f32(_LANES)))
    for at in loop(0, whole, _LANES):
        best.set(maximum(logits.load(at, _LANES), best.now))
    largest = variable(best.now.reduce(maximum))
    for at in loop(whole, vocab):
        largest.set(maximum(logits.load(at), largest.now))
    least, taken, mass = largest.now - below, variable(zeros(i64)), variable(zeros(f32))
    for width, begin, end in ((_LANES, number(0, i64), whole), (1, whole, vocab)):
        sums = variable(zeros(f32(width)))
        for at in loop(begin, end, width):
            x = logits.load(at, width)
            sums += exp(maximum(x - largest.now, -100.0))
            near = x >= least
            any_near = near if width == 1 else where(near, number(1, i32), zeros(i32(width))).reduce(_either).equals(1)
            with when(any_near):
                for lane in range(width):
                    value = x[lane] if width > 1 else x
                    found.store(taken.now, value)
                    taken += (value >= least).to(i64)
        mass += sums.now.reduce(lambda a, b: a + b)
    results.store(0, largest.now)
    results.store(1, mass.now)
    count.store(0, taken.now)


def _either(a: Value, b: Value) -> Value:
    return a | b


def top_k_top_p_bounds(
    launcher: Launcher,
    logits: torch.Tensor,  # [n, vocab] float32, already divided by the temperature
    filters: Filters,
) -> torch.Tensor:
    """[n] float32: the least logit that survives top-k, then top-p among the survivors, and min-p."""
    rows = zip(logits, *(parameter.tolist() for parameter in filters), strict=True)
    return torch.tensor([_bound(launcher, *row) for row in rows])


def _bound(launcher: Launcher, logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> float:
    vocab = len(logits)
    found, results = launcher.buffer("near", vocab + 1), launcher.buffer("best", 2)
    count = launcher.buffer("count", 1, dtype=torch.int64)
    for below in _RANGES:
        launcher.launch(kernel(collect), (logits, found, results, count, vocab, below), 1)
        best, mass = results.tolist()
        near = np.sort(found.numpy()[: int(count)])[::-1]
        bound = _bound_of(near, float(best), float(mass), top_k, top_p, len(near) == vocab)
        if bound is not None:
            return max(bound, best + math.log(min_p) if min_p > 0 else -math.inf)
    return -math.inf  # a row with a NaN


def _bound_of(
    near: NDArray[np.float32],  # the best logits, falling
    best: float,
    mass: float,  # all tokens' mass
    top_k: int,
    top_p: float,
    is_whole: bool,  # `near` has all tokens
) -> float | None:
    """The bound of top-k and top-p, or None if it may lie below `near`."""
    bound = -math.inf
    if top_k and top_k < len(near):
        bound = float(near[top_k - 1])
        near = near[near >= bound]
    elif top_k and not is_whole:
        return None
    if top_p >= 1.0:
        return bound
    masses = np.exp(near - np.float32(best), dtype=np.float32)
    total = float(masses.sum()) if top_k and bound > -math.inf else mass
    reached = np.cumsum(masses / np.float32(total), dtype=np.float32)
    if not is_whole and bound == -math.inf and reached[-1] < top_p:
        return None
    last = int(np.searchsorted(reached, top_p))
    return max(bound, float(near[min(last, len(near) - 1)]))
