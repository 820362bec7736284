"""Decides when an automaton is worth building. Pure, so that it can be simulated."""

from __future__ import annotations

MOST_STEP_US = 3000.0  # longer steps hide the host's time for masks
_S_PER_BYTE = 3e-9  # CPU seconds per expression byte and vocabulary token, before the first build
_PRIOR_BYTES = 4096  # this estimate's weight, in bytes of expressions


class AutomatonPolicy:
    """Builds an automaton when its grammar returns and the host has spent the expected build time on masks.

    As in the ski-rental problem, host and builder together take at most about twice the time that the best choice
    would have taken. A grammar that does not return costs nothing."""

    def __init__(self, step_us: float, vocab_size: int, most_s: float = 5.0) -> None:
        """`step_us` is the time of a decode step with many rows; a build is never begun if it is expected to take over
        `most_s`."""
        self._is_on, self._most_s = step_us < MOST_STEP_US, most_s
        self._bytes, self._seconds = float(_PRIOR_BYTES), _S_PER_BYTE * vocab_size * _PRIOR_BYTES

    def expected_s(self, expression: str) -> float:
        """Return the CPU seconds of a build, which are proportional to the expression's length."""
        return len(expression) * self._seconds / self._bytes

    def pays(self, host_s: float, expression: str) -> bool:
        """Return True if an automaton should be built now; `host_s` is the time of the host on this grammar's masks."""
        return self._is_on and host_s >= (expected := self.expected_s(expression)) and expected <= self._most_s

    def built(self, expression: str, seconds: float) -> None:
        """Learn from a build."""
        self._bytes += len(expression)
        self._seconds += seconds
