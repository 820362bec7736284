"""The decision whether an automaton is worth building: pure, so that it can be simulated."""

from __future__ import annotations

MOST_STEP_US = 3000.0  # steps that take longer hide what the host does for their masks
_S_PER_BYTE = 3e-9  # of CPU, for a byte of an expression and a token of the vocabulary, until builds were measured
_PRIOR_BYTES = 4096  # of expressions, that this estimate weighs


class AutomatonPolicy:
    """An automaton is built when its grammar comes back after the host has spent as much time on its masks as building
    is expected to take. Whatever comes, host and builder together then take about twice the time of one who knew it, at
    most, and a grammar that does not come back costs nothing."""

    def __init__(self, step_us: float, vocab_size: int, most_s: float = 5.0) -> None:
        """`step_us` is what a decode step of many rows takes; no build is expected to take over `most_s`."""
        self._is_on, self._most_s = step_us < MOST_STEP_US, most_s
        self._bytes, self._seconds = float(_PRIOR_BYTES), _S_PER_BYTE * vocab_size * _PRIOR_BYTES

    def expected_s(self, expression: str) -> float:
        """CPU seconds: they go by the expression's length, whatever is in it."""
        return len(expression) * self._seconds / self._bytes

    def pays(self, host_s: float, expression: str) -> bool:
        """True if an automaton should be built now: the host has spent `host_s` seconds on masks of this grammar."""
        return self._is_on and host_s >= (expected := self.expected_s(expression)) and expected <= self._most_s

    def built(self, expression: str, seconds: float) -> None:
        """Learn from a build."""
        self._bytes += len(expression)
        self._seconds += seconds
