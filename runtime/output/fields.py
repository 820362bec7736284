"""Faults in the fields of a request, whether it came over HTTP or as a Python call."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from runtime.spec.types import CallboardError


class FieldError(CallboardError):
    """A field is at fault; the sentence names it."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(field, sentence)  # both, so that it can be pickled
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


def invalid(field: str, problem: str) -> FieldError:
    """The error for a field whose name is the subject of `problem`."""
    return FieldError(field, f"{shortened(field)} {problem}.")


def shortened(text: str, most: int = 200) -> str:
    """A client's own text as a message may show it: not all of a long one."""
    return text if len(text) <= most else text[: most - 3] + "..."


def shown(value: Any) -> str:
    """A client's own value as a message may show it."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), 60)


def fault_of(path: str, fault: ErrorDetails) -> FieldError:
    """The error for the field at `path`, as pydantic found it."""
    if fault["type"] == "missing":
        return FieldError(path, f"{path} is missing; it is required.")
    reason = fault["msg"][:1].lower() + fault["msg"][1:]
    return FieldError(path, f"{path} is {shown(fault['input'])}: {reason}.")


def path_of(fault: ErrorDetails) -> str:
    """Where pydantic found a fault; tags of unions, which begin with "<", are no part of it."""
    return shortened(".".join(str(at) for at in fault["loc"] if not str(at).startswith("<")))


class Options(BaseModel):
    """An object of a request that holds nothing but its own fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def check(self) -> None:
        """Rules between fields; raises FieldError."""


_O = TypeVar("_O", bound=Options)


def read_options(kind: type[_O], values: dict[str, Any]) -> _O:
    """Options that were given as keywords; raises FieldError for the first one at fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise fault_of(path_of(first), first) from None
