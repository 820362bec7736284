"""Bounds of a number that a user sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """From `low`, or above `above`, to `high`; as text, the words of an error."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def hold(self, value: float) -> bool:
        """True if the value lies between them."""
        is_high_enough = value > self.above if self.above is not None else self.low is None or value >= self.low
        return is_high_enough and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.above is not None:
            return f"above {self.above:.15g}" + ("" if self.high is None else f" and at most {self.high:.15g}")
        return f"at least {self.low:.15g}" if self.high is None else f"between {self.low:.15g} and {self.high:.15g}"
