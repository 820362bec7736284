"""Bounds of CPU time in terms of this machine's own speed, so that a slow or busy machine fails no test."""

import time

_ROUNDS = 200_000


def reference_s() -> float:
    """CPU seconds of a fixed piece of Python work: about 10 ms on a server's core. Measure it beside the work that it
    bounds."""
    times = []
    for _ in range(3):
        began, total = time.thread_time(), 0
        for i in range(_ROUNDS):
            total += i & 7
        times.append(time.thread_time() - began)
    return sorted(times)[1]
