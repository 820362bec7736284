"""Faults in the fields of a request, over HTTP or from a Python call."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from runtime.base.plain_values import integer, is_integer
from runtime.base.types import CallboardError


class FieldError(CallboardError):
    """A field is invalid; the sentence names it."""

    is_sent = False  # True if the sentence has the client's name for the field, not a chat's

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(field, sentence)  # pickle needs both
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


def invalid(field: str, problem: str) -> FieldError:
    """Return the error for a field. Its name is the subject of `problem`."""
    return FieldError(field, f"{shortened(field)} {problem}.")


def shortened(text: str, most: int = 200) -> str:
    """Return a client's text for a message, cut if it is long."""
    return text if len(text) <= most else text[: most - 3] + "..."


def shown(value: Any) -> str:
    """Return a client's value for a message, cut if it is long."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), 60)


def fault_of(path: str, fault: ErrorDetails) -> FieldError:
    """Return the error for the field at `path` that pydantic found."""
    if fault["type"] == "missing":
        return FieldError(path, f"{path} is missing; it is required.")
    reason = fault["msg"][:1].lower() + fault["msg"][1:]
    return FieldError(path, f"{path} is {shown(fault['input'])}: {reason}.")


def path_of(fault: ErrorDetails) -> str:
    """Return the path of a fault that pydantic found, without union tags, which begin with "<"."""
    return shortened(".".join(str(at) for at in fault["loc"] if not str(at).startswith("<")))


class Options(BaseModel):
    """A request's object without unknown fields. Null in an optional field means that it is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        inner = schema
        while inner["type"] != "model-fields":
            inner = inner["schema"]
        for name, field in cls.model_fields.items():
            field_schema = inner["fields"][name]["schema"]
            if not field.is_required() and field.default is not None and "metadata" not in field_schema:
                check_null = partial(_not_null, field)
                accepted = core_schema.nullable_schema(field_schema["schema"])
                field_schema["schema"] = core_schema.no_info_after_validator_function(check_null, accepted)
                field_schema["metadata"] = {"null": "absence"}  # a nested model's schema comes here again
        return schema  # type: ignore[no-any-return]

    def check(self) -> None:
        """Check rules between fields. Raises FieldError."""


class OpenOptions(Options):
    """A request's object in which unknown fields are left out."""

    model_config = ConfigDict(extra="ignore")


def _not_null(field: FieldInfo, value: Any) -> Any:
    return field.get_default(call_default_factory=True) if value is None else value


_O = TypeVar("_O", bound=Options)


def read_options(kind: type[_O], values: dict[str, Any]) -> _O:
    """Return options from keywords. Raises FieldError for the first invalid one."""
    others = {name: value for name, value in values.items() if type(value) is not int and is_integer(value)}
    values = values | {name: integer(value, name) for name, value in others.items()}
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise fault_of(path_of(first), first) from None
