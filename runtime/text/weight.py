"""The size of a value as text, known before the text is made."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from jinja2.utils import Namespace

_VIEWS: tuple[type[Collection[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Collection[Any]], ...] = (dict, list, tuple, *_VIEWS)
_SCALAR_CHARS = 8


class TooHeavy(OverflowError):
    """A value has more text, or is nested deeper, than is allowed."""


def weight(value: Any, most: int, *, indent: int = 0, most_depth: int | None = None) -> int:
    """About how many characters `value` has as JSON or as Python's own text; raises TooHeavy if there are more than
    `most`, or more than `most_depth` containers in each other.

    A list that holds the same long list many times is small in memory and endless as text, so the count stops as soon
    as it is above the limit. It takes time for each element but none for the characters."""
    if isinstance(value, str):
        return _within(len(value), most)
    size = 0
    open_containers: list[Iterator[Any]] = [iter((value,))]
    while open_containers:
        for item in open_containers[-1]:
            if isinstance(item, str):
                size += len(item) + 2
            elif isinstance(item, _CONTAINERS):
                depth = len(open_containers)
                if most_depth is not None and depth > most_depth:
                    raise TooHeavy(f"it is nested deeper than {most_depth}")
                size += len(item) * (2 + indent * depth) + 2
                if isinstance(item, dict):
                    size += sum(len(key) + 2 if isinstance(key, str) else _SCALAR_CHARS for key in item)
                    open_containers.append(iter(item.values()))
                else:
                    open_containers.append(iter(item))
                break
            elif isinstance(item, Namespace):
                raise TypeError("it makes text of a namespace")
            else:
                size += max(_SCALAR_CHARS, item.bit_length() // 3) if isinstance(item, int) else _SCALAR_CHARS
            if size > most:
                break
        else:
            open_containers.pop()
        _within(size, most)
    return size


def _within(size: int, most: int) -> int:
    if size > most:
        raise TooHeavy(f"it makes a value of size {size}, above {most}")
    return size
