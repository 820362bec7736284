"""Ranges and multiples of numbers as regular expressions, digit by digit.

Integers have at most 19 digits. A number with a bound is written without an exponent. Its decimals near the bound have
few enough digits to be different floats, so an excluded bound stays excluded when a program reads the number."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from runtime.structured.pattern import shown
from runtime.structured.rules import NEVER, JsonSchema, Rule, Terminal, terminal
from runtime.structured.schema.keywords import at

_MOST_DIGITS = 19
_MOST_BOUND = Decimal(10) ** 17  # the largest number that is written without an exponent
_MOST_LISTED = 1000  # multiples within bounds, or their endings, in one expression
_MOST_DIVISOR = 10_000  # llguidance needs a state for each remainder
_MOST_MULTIPLE = 10**15 - 1
_EXACT_DIGITS = 15  # a decimal of 15 digits survives a double
INTEGER = "(?:0|\\x{2d}?[1-9][0-9]{0,18})"
# A number with an exponent has one digit before its point. Every number is finite as a double.
NUMBER = (
    "\\x{2d}?(?:(?:0|[1-9][0-9]{0,15})(?:\\x{2e}[0-9]{1,17})?"
    "|[0-9](?:\\x{2e}[0-9]{1,17})?[eE][\\x{2b}\\x{2d}]?(?:[0-9]{1,2}|[12][0-9]{2}|30[0-7]))"
)


def integers(low: int | None, high: int | None) -> str | None:
    """Return the expression of the whole numbers from `low` to `high`, both included; None if there are none."""
    end = 10**_MOST_DIGITS - 1
    low, high = max(-end, -end if low is None else low), min(end, end if high is None else high)
    options = []
    if low < 0 and low <= high:
        options.append("\\x{2d}" + _naturals(max(1, -high), -low))
    if max(low, 0) <= high:
        options.append(_naturals(max(low, 0), high))
    return _any_of(options)


def decimals(low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool) -> str | None:
    """Return the expression of the numbers between bounds, without an open bound itself; None if there are none."""
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
    """Return the expression of the numbers from `low` >= 0 to `high`; None if there are none."""
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
    """Return the digits behind the point, without zeros at the end."""
    return f"{value:f}".partition(".")[2].rstrip("0")


def _room(value: Decimal) -> int:
    return len(_fraction(value)) + 1


def _point(low: str, high: str | None, low_open: bool, high_open: bool, room: int) -> str | None:
    """Return the expression of a fraction 0.low <= x <= 0.high with its point; None without such a fraction.

    The fraction is optional if x may be 0."""
    digits = _digits(low, high, low_open, high_open, room)
    bare = not (low or low_open) and not (high == "" and high_open)
    if digits is None:
        return "" if bare else None
    return f"(?:\\x{{2e}}{digits})" + ("?" if bare else "")


def _digits(
    low: str | None, high: str | None, low_open: bool, high_open: bool, room: int, least: int = 1
) -> str | None:
    """Return an expression for `least` to `room` digits within bounds; None if there are none.

    A bound holds its remaining digits, followed by zeros; None once earlier digits have decided it."""
    if room == 0 or (high == "" and high_open):
        return None
    if low is None and high is None:
        return f"[0-9]{{{room}}}" if least == room else f"[0-9]{{{least},{room}}}"
    groups: dict[tuple[str | None, str | None], list[int]] = {}
    first, last = int(low[:1] or "0") if low is not None else 0, int(high[:1] or "0") if high is not None else 9
    for digit in range(first, last + 1):
        above = low[1:] if low is not None and digit == first else None
        below = high[1:] if high is not None and digit == last else None
        if above is not None and not above.strip("0") and not low_open:
            above = None
        if below == "9" * (room - 1) and not high_open:
            below = None
        groups.setdefault((above, below), []).append(digit)
    options = []
    for (above, below), found in groups.items():
        digits = f"[{found[0]}-{found[-1]}]" if len(found) > 1 else str(found[0])
        rest = _digits(above, below, low_open, high_open, room - 1, max(least - 1, 1))
        # The number may end here if zeros after this digit are within the bounds.
        ends = least == 1 and above is None and not (below == "" and high_open)
        if rest is not None:
            options.append(digits + (f"(?:{rest})?" if ends else rest))
        elif ends:
            options.append(digits)
    return _any_of(options)


def _naturals(low: int, high: int) -> str:
    """Return the expression of the whole numbers from `low` >= 0 to `high` >= low."""
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        start, end = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        options.append(_digits(str(start), str(end), False, False, length, length) or "")
    return _any_of(options) or ""


def _any_of(options: list[str]) -> str | None:
    if not options:
        return None
    return options[0] if len(options) == 1 else "(?:" + "|".join(options) + ")"


def rule(schema: dict[str, Any], where: str) -> Rule:
    """Return the rule for numbers of a normal schema with type number or integer. Raises GrammarError."""
    low, high, low_open, high_open = _ends(schema, where)
    is_free, of = low is None and high is None, schema.get("multipleOf")
    if of is not None and of <= 0:
        raise at(where, f"has 'multipleOf' as {shown(of)}; it should be above 0")
    if schema["type"] == "integer":  # an integer is a multiple of a fraction if its numerator divides it
        of = Fraction(1 if of is None else of).numerator
    if of is None:
        found = NUMBER if is_free else decimals(low, high, low_open, high_open)
        return NEVER if found is None else terminal(found)
    multiples: Rule | None
    if of == int(of):
        least = None if low is None else math.floor(low) + 1 if low_open else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if high_open else math.floor(high)
        multiples = _whole_multiples(int(of), least, most)
    else:
        places = -int(Decimal(of).normalize().as_tuple().exponent)
        free = f"\\x{{2d}}?(?:0|[1-9][0-9]{{0,14}})(?:\\x{{2e}}[0-9]{{1,{places}}})?"
        found = free if is_free else decimals(low, high, low_open, high_open)
        unit = int(Decimal(of).scaleb(places))
        endings = free if unit == 1 else _endings(unit, places)
        multiples = NEVER if found is None else None if endings is None else Terminal((found, endings))
    if multiples is None:
        supported = f"whole numbers up to {_MOST_DIVISOR}, and numbers that divide 10^n"
        raise at(where, f"has 'multipleOf' {shown(of)}; supported are {supported}")
    return multiples


def _ends(schema: dict[str, Any], where: str) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """Return the lower and the upper bound, and whether each is excluded. Raises GrammarError."""
    low, low_open = schema.get("minimum"), False
    high, high_open = schema.get("maximum"), False
    if (bound := schema.get("exclusiveMinimum")) is not None and (low is None or bound >= low):
        low, low_open = bound, True
    if (bound := schema.get("exclusiveMaximum")) is not None and (high is None or bound <= high):
        high, high_open = bound, True
    most = Decimal(10) ** _MOST_DIGITS if schema["type"] == "integer" else _MOST_BOUND
    if low is not None and low < -most:  # lower than every number that is written
        low, low_open = -most, False
    if high is not None and high > most:
        high, high_open = most, False
    for name, bound in (("minimum", low), ("maximum", high)):
        if bound and not (Decimal(bound).adjusted() >= -9 and abs(bound) <= most):
            raise at(where, f"has a {name} of {shown(bound)}; supported are 0 and sizes from 1e-9 to 1e17")
    return None if low is None else Decimal(low), None if high is None else Decimal(high), low_open, high_open


def _whole_multiples(of: int, least: int | None, most: int | None) -> Rule | None:
    """Return the rule for multiples of `of` within bounds; None if `of` is not supported."""
    ranged = INTEGER if least is None and most is None else integers(least, most)
    if ranged is None:
        return NEVER
    if of == 1:
        return terminal(ranged)
    if least is not None and most is not None and (most - least) // of < _MOST_LISTED:
        found = _any_of([str(n).replace("-", "\\x{2d}") for n in range(-(-least // of) * of, most + 1, of)])
        return NEVER if found is None else terminal(found)
    if (endings := _endings(of, 0)) is not None:
        return Terminal((ranged, endings))
    if of > _MOST_DIVISOR:
        return None
    low = -_MOST_MULTIPLE if least is None else max(-_MOST_MULTIPLE, least)
    high = _MOST_MULTIPLE if most is None else min(_MOST_MULTIPLE, most)
    if high // of * of < low:
        return NEVER
    return JsonSchema(json.dumps({"type": "integer", "multipleOf": of, "minimum": low, "maximum": high}))


def _endings(unit: int, places: int) -> str | None:
    """Return an expression for multiples of `unit` * 10**-places by their last digits; None if these are many."""
    tail = next((n for n in range(1, 7) if 10**n % unit == 0 and 10**n // unit <= _MOST_LISTED), None)
    if tail is None or places > 9:
        return None
    width = max(tail, places)  # the last digits, before and behind the point; the last `tail` decide
    options = []
    for n in range(0, 10**tail, unit):
        digits = ["[0-9]"] * (width - tail) + list(f"{n:0{tail}}")
        before, behind = digits[: width - places], digits[width - places :]
        whole = f"(?:[0-9]*{''.join(before)}|{int(''.join(before))})" if before else "[0-9]+"
        for length in range(places + 1):  # zeros at the end may be left out
            if set(behind[length:]) <= {"0", "[0-9]"}:
                options.append(whole + ("\\x{2e}" + "".join(behind[:length]) if length else ""))
    return "\\x{2d}?" + (_any_of(list(dict.fromkeys(options))) or "")
