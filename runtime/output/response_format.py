"""The forms in which a request asks for structured output, all translated to one `GrammarSpec`.

An unknown field is refused here, over HTTP too: it would be meant to constrain the answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.core.types import GrammarSpec
from runtime.output.fields import FieldError, Options, invalid

_Schema = Annotated[dict[str, Any] | bool | None, Field(alias="schema")]


class JsonSchema(Options):
    """OpenAI's nesting. Keywords that cannot be enforced are refused, or with `strict: false` ignored and told."""

    name: str | None = None
    description: str | None = None
    schema_: _Schema = None
    strict: bool | None = None


class ResponseFormat(Options):
    """`response_format`: OpenAI's three types, a schema without the nesting, and a regular expression."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    schema_: _Schema = None
    regex: str | None = None


class StructuredOutputs(Options):
    """`structured_outputs`, vLLM's field; one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar that a request asks for, and the path of the field that does."""

    spec: GrammarSpec
    field: str


ANY_OBJECT = GrammarSpec("json", '{"type":"object"}')


def json_spec(schema: object, strict: bool | None = None) -> GrammarSpec:
    return GrammarSpec("json", json.dumps(schema, ensure_ascii=False, separators=(",", ":")), strict=strict)


def requested_grammar(form: ResponseFormat | None, outputs: StructuredOutputs | None) -> RequestedGrammar | None:
    """None if the output is free; raises FieldError."""
    first = None if form is None else _of_response_format(form)
    second = None if outputs is None else _of_structured_outputs(outputs)
    if first is not None and second is not None:
        raise invalid("structured_outputs", "constrains the output as response_format does; send one of them")
    return first or second


def _of_response_format(form: ResponseFormat) -> RequestedGrammar | None:
    given = {name for name in ("json_schema", "schema_", "regex") if getattr(form, name) is not None}
    allowed = {"json_schema": {"json_schema", "schema_"}, "regex": {"regex"}}.get(form.type, set())
    if unfit := given - allowed:
        raise invalid(f"response_format.{min(unfit).rstrip('_')}", f"has no meaning where the type is {form.type!r}")
    match form.type:
        case "json_object":
            return RequestedGrammar(ANY_OBJECT, "response_format")
        case "regex":
            if form.regex is None:
                raise _missing("response_format.regex", "a regular expression that the whole output matches")
            return RequestedGrammar(GrammarSpec("regex", form.regex), "response_format.regex")
        case "json_schema":
            if len(given) > 1:
                raise invalid("response_format.schema", "is given twice, there and in json_schema; send it once")
            if form.schema_ is not None:
                return RequestedGrammar(json_spec(form.schema_), "response_format.schema")
            field = "response_format.json_schema.schema"
            if form.json_schema is None or form.json_schema.schema_ is None:
                raise _missing(field, "a JSON Schema")
            return RequestedGrammar(json_spec(form.json_schema.schema_, form.json_schema.strict), field)
    return None


def _of_structured_outputs(outputs: StructuredOutputs) -> RequestedGrammar | None:
    given = [name for name, value in outputs if value not in (None, False)]
    if len(given) != 1:
        raise invalid("structured_outputs", f"has {len(given)} of json, regex, choice and json_object; send just one")
    field = f"structured_outputs.{given[0].rstrip('_')}"
    if outputs.json_ is not None:
        spec = GrammarSpec("json", outputs.json_) if isinstance(outputs.json_, str) else json_spec(outputs.json_)
    elif outputs.regex is not None:
        spec = GrammarSpec("regex", outputs.regex)
    elif outputs.choice is not None:
        spec = GrammarSpec("choice", json.dumps(outputs.choice, ensure_ascii=False))
    else:
        spec = ANY_OBJECT
    return RequestedGrammar(spec, field)


def _missing(field: str, what: str) -> FieldError:
    return FieldError(field, f"{field} is missing; it should be {what}.")
