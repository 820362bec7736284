"""Sampling parameters as a table: each field of SamplingParams carries its description.

From the description follow validation, the columns of a slot's row on the device and on the host, which pass over the
logits a parameter belongs to (worker/slot_sampling.py), and the bounds of the HTTP API.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any

from runtime.spec.bounds import Bounds


class Effect(Enum):
    """The part of a request's way to a token that a parameter changes."""

    LENGTH = auto()  # where the output ends: the scheduler's
    DRAW = auto()  # how a token is drawn from what the logits leave
    FILTER = auto()  # which tokens are left to be drawn; without a temperature it changes nothing
    PENALTY = auto()  # logits of tokens that stand in the request already
    BIAS = auto()  # logits of single tokens
    HOLD = auto()  # logits of tokens that would end the output too early
    GRAMMAR = auto()  # which tokens are allowed at all
    REPORT = auto()  # log-probabilities, beside the token
    TEXT = auto()  # the text of the output: neither engine nor runners look at it


# All rows of a step are sampled by the captured pass, which reads their columns. The rows of a request with an effect
# of the second pass are then sampled again from changed logits; so are those that HOLD while the output is too short.
# Penalties change logits in place, so the captured pass leaves them to the second one where that one, or REPORT, wants
# the model's own.
CAPTURED_PASS = frozenset({Effect.DRAW, Effect.FILTER, Effect.PENALTY})
SECOND_PASS = frozenset({Effect.BIAS, Effect.GRAMMAR})

UNSET = -1  # stands for None in a column


@dataclass(frozen=True, slots=True)
class SamplingField:
    """The description of one parameter."""

    name: str
    type: str  # as annotated
    effect: Effect
    neutral: Any  # the value that changes nothing
    bounds: Bounds
    column: int | None  # of a slot's row, whose entries are 32 bits wide

    @property
    def code(self) -> str:
        """The kind of number that its column holds: "f" or "i"."""
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
) -> Any:
    """A dataclass field with its description. Values lie from `low`, or above `above`, to `high`; `neutral` is the
    default unless it says otherwise."""
    description = (effect, default if neutral is ... else neutral, Bounds(low, high, above), column)
    return field(default=default, metadata={"sampling": description})


def _type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


class SamplingTable:
    """The fields of a class of sampling parameters, and all that is derived from them."""

    def __init__(self, params: type) -> None:
        self.fields = tuple(SamplingField(f.name, _type_name(f.type), *f.metadata["sampling"]) for f in fields(params))
        self.columns = [(f.column, f.name, f.code) for f in self.fields if f.column is not None]
        self._bounded = [f for f in self.fields if f.bounds != Bounds()]

    def out_of_bounds(self, params: object) -> SamplingField | None:
        """The first field whose value is not within its bounds; None is, where a field may be that."""
        for f in self._bounded:
            if (value := getattr(params, f.name)) is not None and not f.bounds.hold(value):
                return f
        return None

    def has_effect(self, params: object, effects: Set[Effect]) -> bool:
        """True if a parameter with one of these effects is not neutral."""
        return any(f.effect in effects and getattr(params, f.name) != f.neutral for f in self.fields)


_tables: dict[type, SamplingTable] = {}


def table_of(params: type) -> SamplingTable:
    """The table of a class, made once."""
    if (table := _tables.get(params)) is None:
        table = _tables[params] = SamplingTable(params)
    return table
