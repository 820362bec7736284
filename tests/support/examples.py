"""How many examples a property test tries."""

from hypothesis import settings


def examples(thorough: int) -> int:
    """The number for `max_examples`: `thorough` with CALLBOARD_TESTS=all, else a quarter of it."""
    return -(-thorough * settings().max_examples // 100)
