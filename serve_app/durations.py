"""Durations: seconds as a number, or with units as in 90s, 10m and 1h30m."""

from __future__ import annotations

import math
import re
from typing import Any, Self

from pydantic_core import CoreSchema, core_schema

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|µs|ns)")


class Duration(float):
    """A number of seconds. Raises ValueError for any other text."""

    def __new__(cls, value: Any) -> Self:
        return super().__new__(cls, _seconds(value))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"type": "string"}]}


def _seconds(value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        text = str(value)
        body = text.lstrip("+-")
        parts = _PART.findall(body) if isinstance(value, str) and len(text) < 64 else []
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        if not parts or "".join(map("".join, parts)) != body or len(text) - len(body) > 1:
            seconds = math.nan
        seconds = -seconds if text.startswith("-") else seconds
    if math.isnan(seconds):
        raise ValueError(f"{value!r} is not a duration; write seconds or units, such as 30s, 10m or 1h30m")
    return seconds
