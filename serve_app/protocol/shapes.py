"""The kinds of values that request fields hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, ClassVar, Literal, LiteralString, TypeVar
from urllib.parse import quote

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from runtime.output.fields import OpenOptions, invalid, shown
from runtime.output.options import CacheControl, CacheTtl
from runtime.output.tools import HostedTool
from serve_app.protocol.other_servers import UnsupportedField

_T = TypeVar("_T")
_L = TypeVar("_L")

_MAX_IGNORED = 32  # names of unknown fields to report
MAX_VALUES = 20_000  # values in a JSON that is parsed at once: pydantic takes up to 3 us for each


class RequestModel(OpenOptions):
    """An object of a request; unknown fields are left out."""

    token_ids_field: ClassVar[str | None] = None  # field that may hold a long list of token ids, or several


class CacheBreakpoint(RequestModel):
    """OpenAI's mark of the same meaning."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None  # None for the request's


class CacheOptions(RequestModel):
    """OpenAI's options for the cached prompt."""

    mode: Literal["implicit", "explicit"] = "implicit"  # "explicit": only breakpoints have a lifetime
    ttl: CacheTtl = "30m"
    prewarm: bool = False  # the prompt is computed and cached, and the answer is empty


class MarkedModel(RequestModel):
    """A part of a prompt that may end a cached prefix. Marks are left out of templates and stored conversations."""

    cache_control: Annotated[CacheControl | None, Field(exclude=True)] = None
    prompt_cache_breakpoint: Annotated[CacheBreakpoint | None, Field(exclude=True)] = None


def cache_marks(contents: Iterable[Any]) -> Iterator[CacheControl | CacheBreakpoint]:
    """Yield the marks in contents, which may be texts, marked parts or lists of these."""
    for content in contents:
        if isinstance(content, list):
            yield from cache_marks(content)
        elif isinstance(content, MarkedModel):
            yield from (mark for mark in (content.cache_control, content.prompt_cache_breakpoint) if mark is not None)
            yield from cache_marks([getattr(content, "content", None)])


class OpenRequestModel(RequestModel):
    """A request that keeps unknown fields: some are refused, and a header names the others."""

    model_config = ConfigDict(extra="allow")
    refused: ClassVar[dict[str, UnsupportedField]] = {}
    within: ClassVar[str] = ""  # begins the fields' paths

    def ignored_fields(self) -> list[str]:
        """Return the first names of fields without an effect, safe for a header."""
        names = [name for name, value in (self.model_extra or {}).items() if value is not None]
        return [quote(name, safe="")[:64] for name in names[:_MAX_IGNORED]]

    def check(self) -> None:
        """Check fields of other servers; raises FieldError."""
        for name, value in (self.model_extra or {}).items():
            if (refused := self.refused.get(name)) is not None and value not in refused.harmless:
                problem = f"is {shown(value)}: it would change the answer but is not supported"
                raise invalid(self.within + name, f"{problem}; {refused.instead}")
        super().check()


def hosted(tools: Sequence[object] | None) -> list[str]:
    """Return the tools that are left out since another server runs them, safe for a header."""
    return kinds_in("tools", (tool.type for tool in tools or () if isinstance(tool, HostedTool)))


def kinds_in(where: str, kinds: Iterable[str]) -> list[str]:
    """Return the kinds of a field's elements without an effect, each once, safe for a header."""
    return [f"{where}.{quote(kind, safe='')[:64]}" for kind in list(dict.fromkeys(kinds))[:_MAX_IGNORED]]


def check_absent(names: AbstractSet[str], fields: Mapping[str, Any], api: str) -> None:
    """Raise FieldError for a field of chats that an API lacks."""
    for name in names & fields.keys():
        if fields[name] is not None:
            error = invalid(name, f"is no field of {api}'s requests; send it to /v1/chat/completions")
            error.is_sent = True
            raise error


VersionName = Annotated[
    Annotated[str, Field(min_length=1, max_length=256), Tag("<text>")]
    | Annotated[int, Field(ge=0, lt=1 << 63), Tag("<number>")],
    Discriminator(lambda value: "<number>" if isinstance(value, int) and not isinstance(value, bool) else "<text>"),
]  # weights
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]  # since a long list of faults takes minutes


def only(*harmless: Any, remedy: LiteralString = "this field is not supported yet; leave it out") -> AfterValidator:
    """Allow an unsupported field only its values without an effect."""

    def check(value: Any) -> Any:
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless):
            raise PydanticCustomError("not_supported", remedy)
        return value

    check.remedy = remedy  # type: ignore[attr-defined]  # for docs/api.md
    return AfterValidator(check)


LEGACY = only(None, [], remedy="this field is OpenAI's old one; use tools, tool_choice and tool_calls instead")


def type_of(value: Any, default: str | None = None) -> Any:
    """Return the `type` of an object, which may be a dict or a checked model."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return default if kind is None else kind


TextOrList = Annotated[_T, Tag("<text>")] | Annotated[_L, Tag("<list>")]  # see text_or_list_of


def text_or_list_of(what: str) -> Any:
    """Return the discriminator for a text or a list of `what`, with the tags <text> and <list>.

    Tags start with "<" and are left out of field paths."""
    return Discriminator(
        lambda value: "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None,
        custom_error_type="shape",
        custom_error_message=f"it should be a text or a list of {what}",
    )


def has_too_many_values(json: bytes) -> bool:
    """Return whether JSON may have over MAX_VALUES values. A moderate number of marks within texts does not count."""
    if _num_marks(json) <= MAX_VALUES:
        return False
    most = 2 * MAX_VALUES
    parts = json.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', most)
    return len(parts) > most or sum(map(_num_marks, parts[::2])) > MAX_VALUES


def _num_marks(json: bytes) -> int:
    """Return the number of marks: the values are at most one more."""
    return json.count(b",") + json.count(b"[") + json.count(b"{")


def or_default(value: _T | None, default: _T) -> _T:
    """Return a field's value, with null as its absence."""
    return default if value is None else value
