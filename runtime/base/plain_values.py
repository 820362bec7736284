"""Python callers' values as plain ones, checked before a message holds them.

Integers of `numpy` and `torch` are integers, and so are their arrays without a dimension. No import of either is
needed: they have `ndim` and `dtype`. All functions raise CallboardError, which names the field and the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from operator import index
from typing import Any

from runtime.base.errors import CallboardError

INT64 = -(1 << 63), (1 << 63) - 1


def _fault(value: Any, field: str, needed: str) -> CallboardError:
    try:
        shown = repr(value)
    except Exception:  # raised by the caller's class, or for an integer with thousands of digits
        shown = type(value).__name__
    return CallboardError(f"{field} is {shown[:60]}; it must be {needed}.")


def _num_dims(value: Any) -> int:
    dims: int = getattr(value, "ndim", 0)
    return dims


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def is_integer(value: Any) -> bool:
    """True for an integer of Python, numpy or torch. Truth values are none."""
    if type(value) is int:
        return True
    try:
        return not _is_flag(value) and not _num_dims(value) and index(value) is not None
    except Exception:  # a TypeError, or what the caller's class raises
        return False


def integer(value: Any, field: str, low: int = INT64[0], high: int = INT64[1]) -> int:
    """Return an integer as an int."""
    if not is_integer(value):
        raise _fault(value, field, "an integer")
    if not low <= (plain := index(value)) <= high:
        raise _fault(plain, field, f"at least {low}" if high == INT64[1] and plain < low else f"from {low} to {high}")
    return plain


def integers(values: Any, field: str) -> list[int]:
    """Return the integers in an iterable, or in an array with one dimension."""
    found = _items(values.tolist() if hasattr(values, "tolist") else values, field, "a list of integers")
    if set(map(type, found)) <= {int} and (not found or (INT64[0] <= min(found) and max(found) <= INT64[1])):
        return found
    return [integer(value, f"{field}[{i}]") for i, value in enumerate(found)]


def number(value: Any, field: str) -> float:
    """Return a number that is not NaN as a float. An integer stays one."""
    plain: float
    if type(value) in (int, float):
        plain = value
    elif _is_flag(value) or isinstance(value, str | bytes) or _num_dims(value):
        raise _fault(value, field, "a number")
    else:
        try:
            plain = float(value)
        except Exception:  # a TypeError, or what the caller's class raises
            raise _fault(value, field, "a number") from None
    if math.isnan(plain) or (type(plain) is int and not INT64[0] <= plain <= INT64[1]):
        raise _fault(value, field, "a number")
    return plain


def flag(value: Any, field: str) -> bool:
    """Return a truth value as a bool."""
    if not _is_flag(value) or _num_dims(value):
        raise _fault(value, field, "True or False")
    return bool(value)


def text(value: Any, field: str) -> str:
    """Return a text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise _fault(value, field, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _fault(value, field, "a text without surrogates") from None
    return value


def texts(value: Any, field: str) -> tuple[str, ...]:
    """Return a text, or several, as a tuple."""
    found = [value] if isinstance(value, str) else _items(value, field, "a list of texts")
    return tuple(text(each, f"{field}[{i}]") for i, each in enumerate(found))


def biases(value: Any, field: str) -> tuple[tuple[int, float], ...]:
    """Return the pairs of a token id and a bias, or such a dict, as a tuple."""
    needed = "pairs of a token id and a bias"
    found = []
    for i, pair in enumerate(_items(list(value.items()) if isinstance(value, Mapping) else value, field, needed)):
        token, *rest = _items(pair, f"{field}[{i}]", needed) or [None]
        if len(rest) != 1:
            raise _fault(pair, f"{field}[{i}]", "a pair of a token id and a bias")
        found.append((integer(token, f"The token id of {field}[{i}]"), number(rest[0], f"{field}[{i}][1]")))
    is_plain = type(value) is tuple and all(tuple(map(type, pair)) == (int, float) for pair in value)
    return value if is_plain else tuple(found)  # a request's choices share one object


def _items(value: Any, field: str, needed: str) -> list[Any]:
    """Return an iterable's items. A set serves only as an option of ids, since their order is free."""
    is_set = isinstance(value, Set) and not field.endswith("_ids")
    if is_set or isinstance(value, str | bytes | Mapping):
        raise _fault(value, field, needed)
    try:
        items = iter(value)
    except TypeError:  # no iterable, or an array without a dimension
        raise _fault(value, field, needed) from None
    return list(items)


# A field's annotation -> types without a change, and the function for other values.
READERS: dict[str, tuple[frozenset[type], Callable[[Any, str], Any]]] = {
    "int": (frozenset({int}), integer),
    "int | None": (frozenset({int, type(None)}), integer),
    "float": (frozenset({int, float}), number),
    "bool": (frozenset({bool}), flag),
    "tuple[int, ...]": (frozenset(), lambda value, field: tuple(integers(value, field))),
    "tuple[tuple[int, float], ...]": (frozenset(), biases),
    "tuple[str, ...]": (frozenset(), texts),
}
