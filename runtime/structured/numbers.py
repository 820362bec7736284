"""Ranges of numbers as regular expressions, digit by digit.

Integers have at most 19 digits. A number with a bound has no exponent, and so few digits behind the point that no two
of its decimals near the bound are the same float: what the expression excludes stays excluded when a program reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

_MOST_DIGITS = 19
_EXACT_DIGITS = 15  # decimals of so many digits survive a double
INTEGER = "(?:0|\\x{2d}?[1-9][0-9]{0,18})"
# With an exponent there is one digit before the point; finite as a double in any case.
NUMBER = (
    "\\x{2d}?(?:(?:0|[1-9][0-9]{0,15})(?:\\x{2e}[0-9]{1,17})?"
    "|[0-9](?:\\x{2e}[0-9]{1,17})?[eE][\\x{2b}\\x{2d}]?(?:[0-9]{1,2}|[12][0-9]{2}|30[0-7]))"
)


def integers(low: int | None, high: int | None) -> str | None:
    """The whole numbers from `low` to `high`, both included; None if there are none."""
    end = 10**_MOST_DIGITS - 1
    low, high = max(-end, -end if low is None else low), min(end, end if high is None else high)
    options = []
    if low < 0 and low <= high:
        options.append("\\x{2d}" + _naturals(max(1, -high), -low))
    if max(low, 0) <= high:
        options.append(_naturals(max(low, 0), high))
    return _any_of(options)


def decimals(low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool) -> str | None:
    """The numbers between `low` and `high`, without an open bound itself; None if there are none."""
    zero = Decimal(0)
    options = []
    if high is None or high >= 0:
        near, near_open = (zero, False) if low is None or low < 0 else (low, low_open)
        options.append(_positive(near, high, near_open, high_open))
    if low is None or low < 0:
        near, near_open = (zero, True) if high is None or high > 0 else (-high, high_open)
        negative = _positive(near, None if low is None else -low, near_open, low_open)
        options.append(None if negative is None else "\\x{2d}" + negative)
    return _any_of([option for option in options if option is not None])


def _positive(low: Decimal, high: Decimal | None, low_open: bool, high_open: bool) -> str | None:
    """Those from `low` >= 0 to `high`."""
    if high is not None and (high < low or (high == low and (low_open or high_open))):
        return None
    first, last = int(low), None if high is None else int(high)
    room = max(1, _EXACT_DIGITS - len(str(first if last is None else last)), _room(low), _room(high or low))
    low_digits, high_digits = _fraction(low), None if high is None else _fraction(high)
    options: list[tuple[int | str, str | None]] = []
    if first == last:
        options.append((first, _point(low_digits, high_digits, low_open, high_open, room)))
    else:
        options.append((first, _point(low_digits, None, low_open, False, room)))
        if last is not None:
            options.append((last, _point("", high_digits, False, high_open, room)))
        if between := integers(first + 1, None if last is None else last - 1):
            options.append((between, f"(?:\\x{{2e}}[0-9]{{1,{room}}})?"))
    return _any_of([f"{whole}{rest}" for whole, rest in options if rest is not None])


def _fraction(value: Decimal) -> str:
    """The digits behind the point, without zeros at the end."""
    return f"{value:f}".partition(".")[2].rstrip("0")


def _room(value: Decimal) -> int:
    return len(_fraction(value)) + 1


def _point(low: str, high: str | None, low_open: bool, high_open: bool, room: int) -> str | None:
    """A fraction 0.low <= x <= 0.high with its point, or nothing where x may be 0; None if there is none at all."""
    digits = _digits(low, high, low_open, high_open, room)
    bare = not (low or low_open) and not (high == "" and high_open)
    if digits is None:
        return "" if bare else None
    return f"(?:\\x{{2e}}{digits})" + ("?" if bare else "")


def _digits(low: str | None, high: str | None, low_open: bool, high_open: bool, room: int) -> str | None:
    """One to `room` digits that go on within the bounds; None for a bound that no longer matters."""
    low = None if low == "" and not low_open else low
    if room == 0 or (high == "" and high_open):
        return None
    if low is None and high is None:
        return f"[0-9]{{1,{room}}}"
    groups: dict[tuple[str | None, str | None], list[int]] = {}
    least, most = int(low[:1] or "0") if low is not None else 0, int(high[:1] or "0") if high is not None else 9
    for digit in range(least, most + 1):
        above = None if low is None or digit > least else low[1:]
        below = None if high is None or digit < most else high[1:]
        groups.setdefault((above, below), []).append(digit)
    options = []
    for (above, below), found in groups.items():
        first = f"[{found[0]}-{found[-1]}]"
        rest = _digits(above, below, low_open, high_open, room - 1)
        # It may end here if zeros from here on are within the bounds.
        ends = (above is None or (above == "" and not low_open)) and not (below == "" and high_open)
        if rest is not None:
            options.append(first + (f"(?:{rest})?" if ends else rest))
        elif ends:
            options.append(first)
    return _any_of(options)


def _naturals(low: int, high: int) -> str:
    """The whole numbers from `low` >= 0 to `high` >= low."""
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        start = max(low, 10 ** (length - 1) if length > 1 else 0)
        options += _same_length(str(start), str(min(high, 10**length - 1)))
    return _any_of(options) or ""


def _same_length(low: str, high: str) -> list[str]:
    if not low:
        return [""]
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return [f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{rest}}}" if rest else "")]
    if low[0] == high[0]:
        return [low[0] + (_any_of(_same_length(low[1:], high[1:])) or "")]
    options = [low[0] + (_any_of(_same_length(low[1:], "9" * rest)) or "")]
    if int(high[0]) - int(low[0]) > 1:
        options.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    options.append(high[0] + (_any_of(_same_length("0" * rest, high[1:])) or ""))
    return options


def _any_of(options: list[str]) -> str | None:
    if not options:
        return None
    return options[0] if len(options) == 1 else "(?:" + "|".join(options) + ")"


def multiples(of: int) -> str | None:
    """What the multiples of a divisor of 1,000 end with, among integers; None for other numbers."""
    for places in range(1, 4):
        if 10**places % of == 0:
            numbers = range(0, 10**places, of)
            options = [*map(str, numbers), *(f"[0-9]*{n:0{places}}" for n in numbers)]
            return "\\x{2d}?" + (_any_of(options) or "")
    return None


def listed(numbers: Iterable[int]) -> str | None:
    """Just these."""
    return _any_of([("\\x{2d}" if n < 0 else "") + str(abs(n)) for n in numbers])
