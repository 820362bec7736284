"""Costs: whether loading a prefix from the tier is quicker than computing it.

Both rates are measured. Until then they are rough figures for the device. The figure for loads is too low on purpose:
a slow load costs more than one that is left out."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from statistics import median

_LATENCY_S = 2e-3  # plans and results of a load, besides its bytes
_SHARE = 0.7  # a load must take less than this share of the time to compute; CALLBOARD_TIER_SHARE replaces it
_PRIORS = {"cuda": (10_000.0, 10e9), "cpu": (300.0, 0.5e9)}  # device -> prompt tokens and loaded bytes, per second
_LEAST_TOKENS = {"cuda": 256, "cpu": 32}  # a CPU computes this many in a tenth of a second, a GPU in less
_LEAST_BYTES = 1 << 20  # smaller loads measure latency
_NUM_SAMPLES = 5
_KEPT_S = 60.0  # older samples are dropped: after a slow time, loads are tried again


def least_tokens(device: str, chosen: int | None) -> int:
    """Tokens of the shortest prefix that is stored and loaded; shorter ones are computed. The device's if none is
    chosen."""
    return _LEAST_TOKENS["cpu" if device == "cpu" else "cuda"] if chosen is None else chosen


class Costs:
    """Measures loads, one after another or several at once."""

    def __init__(
        self,
        device: str,
        clock: Callable[[], float],
        prefill_rate: Callable[[], float],
        first_rate: Callable[[], float] | None = None,
    ) -> None:
        """`prefill_rate` returns the measured prompt tokens per second; 0 before the first estimate.

        `first_rate` returns the bytes per second without recent loads; None for the device's usual rate from RAM."""
        self._clock, self._measured_prefill = clock, prefill_rate
        self._share = float(os.environ.get("CALLBOARD_TIER_SHARE") or _SHARE)
        self._prefill_prior, load_prior = _PRIORS["cpu" if device == "cpu" else "cuda"]
        self._first_rate = first_rate or (lambda: load_prior)
        self._samples: deque[tuple[float, float]] = deque(maxlen=_NUM_SAMPLES)  # time, bytes per second
        self._ended_at = 0.0  # the last load's end

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self._measured_prefill() or self._prefill_prior

    @property
    def load_rate(self) -> float:
        """Bytes per second, each rank's own."""
        while self._samples and self._clock() - self._samples[0][0] > _KEPT_S:
            self._samples.popleft()
        return median(rate for _, rate in self._samples) if self._samples else self._first_rate()

    def is_worth(self, num_bytes: int, num_tokens: int) -> bool:
        """Return True if these bytes are loaded sooner than their tokens are computed."""
        return num_bytes / self.load_rate + _LATENCY_S < self._share * num_tokens / self.prefill_rate

    def observe(self, num_bytes: int, begun_at: float) -> None:
        """A load has ended. Loads share the link, so its time begins with the end of the load before it."""
        now = self._clock()
        took_s, self._ended_at = now - max(begun_at, self._ended_at), now
        if num_bytes >= _LEAST_BYTES and took_s > 0:
            self._samples.append((now, num_bytes / max(took_s - _LATENCY_S, 0.1 * took_s)))

    def seconds_saved(self, num_tokens: int, begun_at: float) -> float:
        """Return the time to compute tokens that were loaded instead, less the time since the load began."""
        return num_tokens / self.prefill_rate - (self._clock() - begun_at)
