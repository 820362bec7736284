"""Sampling parameters as a table: each field of SamplingParams carries its description.

Validation and the HTTP API's bounds follow from the description. So do the columns in a slot's row on device and
host, and the parameter's pass over the logits (worker/slot_sampling.py).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any

from runtime.base.errors import CallboardError
from runtime.base.plain_values import READERS, integer


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a number that a user sets: from `low`, or above `above`, to `high`. Their text is for errors."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def hold(self, value: float) -> bool:
        """Return True if the value is within the bounds."""
        is_high_enough = value > self.above if self.above is not None else self.low is None or value >= self.low
        return is_high_enough and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low, above, high = (x if isinstance(x, int | None) else f"{x:.15g}" for x in (self.low, self.above, self.high))
        if above is not None:
            return f"above {above}" + ("" if high is None else f" and at most {high}")
        return f"at least {low}" if high is None else f"between {low} and {high}"


_UNBOUNDED = Bounds()


class Effect(Enum):
    """What a parameter changes on a request's way to a token."""

    LENGTH = auto()  # where the output ends, which the scheduler decides
    DRAW = auto()  # how a token is drawn from the remaining ones
    FILTER = auto()  # the tokens that remain; without a temperature it changes nothing
    PENALTY = auto()  # logits for tokens that are in the request already
    BIAS = auto()  # logits for single tokens
    HOLD = auto()  # logits for tokens that would end the output too early
    GRAMMAR = auto()  # the tokens that are allowed
    REPORT = auto()  # log-probabilities, in addition to the token
    TEXT = auto()  # the output's text; engine and runners ignore it


# The captured pass samples a step's rows and reads their columns. A second pass samples rows again from changed
# logits. These rows have an effect of SECOND_PASS, or HOLD while the output is too short. Penalties change logits in
# place. The captured pass therefore leaves them out if the second pass, or REPORT, needs the model's own logits.
CAPTURED_PASS = frozenset({Effect.DRAW, Effect.FILTER, Effect.PENALTY})
SECOND_PASS = frozenset({Effect.BIAS, Effect.GRAMMAR})

UNSET = -1  # stands for None in a column


@dataclass(frozen=True, slots=True)
class SamplingField:
    """The description of one parameter."""

    name: str
    type: str  # the annotation
    effect: Effect
    neutral: Any  # the value that changes nothing
    bounds: Bounds
    column: int | None  # column in a slot's row, with 32-bit entries
    gguf: str  # name in a GGUF file's sampling metadata; empty if a model's files do not set it

    @property
    def code(self) -> str:
        """The type of its column: "f" or "i"."""
        return "f" if self.type == "float" else "i"

    @property
    def limits(self) -> dict[str, float]:
        """The bounds as pydantic's Field takes them."""
        limits = {"ge": self.bounds.low, "gt": self.bounds.above, "le": self.bounds.high}
        if self.bounds.high is None and self.type.startswith("int"):
            limits["lt"] = 1 << 31
        return {name: limit for name, limit in limits.items() if limit is not None}


def sampling(
    default: Any,
    effect: Effect,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    neutral: Any = ...,
    column: int | None = None,
    gguf: str = "",
) -> Any:
    """Return a dataclass field with its description.

    Values lie from `low`, or above `above`, to `high`. If `neutral` is not given, the default is neutral."""
    description = (effect, default if neutral is ... else neutral, Bounds(low, high, above), column, gguf)
    return field(default=default, metadata={"sampling": description})


def _type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


class SamplingTable:
    """The fields in a class of sampling parameters, with their columns and bounds."""

    def __init__(self, params: type) -> None:
        self.fields = tuple(SamplingField(f.name, _type_name(f.type), *f.metadata["sampling"]) for f in fields(params))
        self.columns = [(f.column, f.name, f.code) for f in self.fields if f.column is not None]
        defaults = {f.name: f.default for f in fields(params)}
        self._checks = [(f, defaults[f.name], *READERS.get(f.type, (frozenset(), None))) for f in self.fields]

    def check(self, params: object) -> None:
        """Make the values plain ones. Raises CallboardError at the first that cannot be one, or is out of bounds."""
        for f, default, plain_types, read in self._checks:
            value = getattr(params, f.name)
            if value is default:
                continue
            if read is not None and type(value) not in plain_types:
                value = read(value, f.name)
                object.__setattr__(params, f.name, value)
            if type(value) is int and f.bounds.high is None:
                integer(value, f.name)
            if f.bounds != _UNBOUNDED and value is not None and not f.bounds.hold(value):
                raise CallboardError(f"{f.name} is {value}; it must be {f.bounds}.")

    def names(self, *effects: Effect) -> tuple[str, ...]:
        """Return the names of the parameters with one of these effects."""
        return tuple(f.name for f in self.fields if f.effect in effects)

    def has_effect(self, params: object, effects: Set[Effect]) -> bool:
        """Return True if a parameter with one of these effects is not neutral."""
        return any(f.effect in effects and getattr(params, f.name) != f.neutral for f in self.fields)


_tables: dict[type, SamplingTable] = {}


def table_of(params: type) -> SamplingTable:
    """Return the table of a class, which is made once."""
    if (table := _tables.get(params)) is None:
        table = _tables[params] = SamplingTable(params)
    return table
