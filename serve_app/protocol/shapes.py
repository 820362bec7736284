"""The kinds of values that fields of requests hold."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, LiteralString, TypeVar
from urllib.parse import quote

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from runtime.output.fields import Options, invalid, shown
from serve_app.protocol.other_servers import Refused

_T = TypeVar("_T")

_MAX_IGNORED = 32  # names of unknown fields to report
MAX_VALUES = 20_000  # of a JSON that is parsed at once: pydantic takes up to 3 us for each


class RequestModel(Options):
    """An object of a request; fields that it does not have are left out."""

    token_ids_field: ClassVar[str | None] = None  # which field may be a long list of token ids, or of such lists
    model_config = ConfigDict(extra="ignore")


class OpenRequestModel(RequestModel):
    """A request that keeps the fields which it does not have: some are refused, the others named in a header."""

    model_config = ConfigDict(extra="allow")
    refused: ClassVar[dict[str, Refused]] = {}

    def ignored_fields(self) -> list[str]:
        """The first of the names that mean nothing here, fit for a header."""
        return [quote(name, safe="")[:64] for name in list(self.model_extra or ())[:_MAX_IGNORED]]

    def check(self) -> None:
        """Fields that are known elsewhere; raises FieldError."""
        for name, value in (self.model_extra or {}).items():
            if (refused := self.refused.get(name)) is not None and value not in refused.harmless:
                problem = f"is {shown(value)}: it would change the answer but is not supported"
                raise invalid(name, f"{problem}; {refused.instead}")
        super().check()


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]  # a long list of faults would cost minutes


def only(*harmless: Any, says: LiteralString = "this field is not supported yet; leave it out") -> AfterValidator:
    """Allows a field that is not supported only the values that ask for nothing."""

    def check(value: Any) -> Any:
        if value not in harmless:
            raise PydanticCustomError("not_supported", says)
        return value

    check.says = says  # type: ignore[attr-defined]  # for the page of all fields
    return AfterValidator(check)


LEGACY = only(None, [], says="this field is OpenAI's old one; use tools, tool_choice and tool_calls instead")


def text_or_list(value: Any) -> str | None:
    """The union tag of a text or a list of things; tags start with "<" and are left out of field paths."""
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def has_too_many_values(json: bytes) -> bool:
    """True if there may be over MAX_VALUES values; marks within texts do not count, if they are not too many."""
    if _num_marks(json) <= MAX_VALUES:
        return False
    most = 2 * MAX_VALUES
    parts = json.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', most)
    return len(parts) > most or sum(map(_num_marks, parts[::2])) > MAX_VALUES


def _num_marks(json: bytes) -> int:
    """The number of marks of which every value but the outermost has at least one before it."""
    return json.count(b",") + json.count(b"[") + json.count(b"{")


def or_default(value: _T | None, default: _T) -> _T:
    """A field's value, where null is as good as none."""
    return default if value is None else value
