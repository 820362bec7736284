"""The forms of structured output in requests, all translated to one `GrammarSpec`.

Unknown fields are refused, over HTTP too, because they may be constraints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from runtime.base.types import GrammarSpec
from runtime.output.fields import FieldError, Options, fault_of, invalid, path_of

_Schema = Annotated[dict[str, Any] | bool | None, Field(alias="schema")]


class JsonSchema(Options):
    """OpenAI's nesting. Unsupported keywords are refused, or with `strict: false` ignored and reported."""

    name: str | None = None
    description: str | None = None
    schema_: _Schema = None
    strict: bool | None = None


class Structure(Options):
    """A region in XGrammar's older form."""

    begin: str
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    end: str


class ResponseFormat(Options):
    """`response_format`: OpenAI's three types, a schema without the nesting, a regular expression, and structural tags
    in XGrammar's two forms."""

    type: Literal["text", "json_object", "json_schema", "regex", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: _Schema = None
    regex: str | None = None
    structures: list[Structure] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Options):
    """`structured_outputs`, vLLM's field, with exactly one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar from a request, and the path of its field."""

    spec: GrammarSpec
    field: str


ANY_OBJECT = GrammarSpec("json", '{"type":"object"}')


def json_spec(schema: object, strict: bool | None = None) -> GrammarSpec:
    return GrammarSpec("json", json.dumps(schema, ensure_ascii=False, separators=(",", ":")), strict=strict)


def requested_grammar(
    form: ResponseFormat | None, outputs: StructuredOutputs | None, specs: Mapping[str, GrammarSpec]
) -> RequestedGrammar | None:
    """Return the one grammar of a request; None if the output is free. Raises FieldError.

    `specs` are the grammars from single-purpose fields."""
    asked = [] if form is None else [_of_response_format(form)]
    asked += [] if outputs is None else [_of_structured_outputs(outputs)]
    found = [each for each in asked if each is not None]
    found += [RequestedGrammar(spec, field) for field, spec in specs.items()]
    found = list({each.spec: each for each in reversed(found)}.values())[::-1]  # equal ones are one
    if len(found) > 1:
        first = found[0].field.partition(".")[0]
        raise invalid(found[1].field.partition(".")[0], f"constrains the output as {first} does; send one of them")
    return found[0] if found else None


def _of_response_format(form: ResponseFormat) -> RequestedGrammar | None:
    given = {name for name, value in form if name != "type" and value is not None}
    allowed = _FIELDS_OF_TYPES.get(form.type, set())
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
        case "structural_tag":
            return RequestedGrammar(_tags_spec(_as_one_format(form)), "response_format")
    return None


_FIELDS_OF_TYPES = {
    "json_schema": {"json_schema", "schema_"},
    "regex": {"regex"},
    "structural_tag": {"structures", "triggers", "format"},
}


def _as_one_format(form: ResponseFormat) -> object:
    """Return the format of structural tags; the older form is translated to the newer one."""
    if form.format is not None:
        if form.structures is not None or form.triggers is not None:
            raise invalid("response_format.format", "says what structures and triggers do; send one form of the two")
        return form.format
    if form.structures is None or form.triggers is None:
        missing = "structures" if form.structures is None else "triggers"
        raise _missing(f"response_format.{missing}", "a list, unless there is a format")
    return {
        "type": "triggered_tags",
        "triggers": form.triggers,
        "tags": [
            {"begin": s.begin, "content": {"type": "json_schema", "json_schema": s.schema_}, "end": s.end}
            for s in form.structures
        ],
    }


def _tags_spec(form: object) -> GrammarSpec:
    return GrammarSpec("tags", json.dumps(form, ensure_ascii=False))


def _of_structural_tag(value: dict[str, Any] | str, field: str) -> GrammarSpec:
    """Return the grammar of vLLM's field, a `response_format` as an object or as JSON."""
    try:
        form = ResponseFormat.model_validate_json(value) if isinstance(value, str) else ResponseFormat(**value)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise fault_of(".".join(filter(None, (field, path_of(first)))), first) from None
    if form.type != "structural_tag":
        raise invalid(f"{field}.type", "should be 'structural_tag'")
    return _tags_spec(_as_one_format(form))


def _of_structured_outputs(outputs: StructuredOutputs) -> RequestedGrammar | None:
    given = [name for name, value in outputs if value not in (None, False)]
    if len(given) != 1:
        names = "json, regex, choice, json_object, grammar and structural_tag"
        raise invalid("structured_outputs", f"has {len(given)} of {names}; send just one")
    field = f"structured_outputs.{given[0].rstrip('_')}"
    if outputs.json_ is not None:
        spec = GrammarSpec("json", outputs.json_) if isinstance(outputs.json_, str) else json_spec(outputs.json_)
    elif outputs.regex is not None:
        spec = GrammarSpec("regex", outputs.regex)
    elif outputs.choice is not None:
        spec = GrammarSpec("choice", json.dumps(outputs.choice, ensure_ascii=False))
    elif outputs.grammar is not None:
        spec = GrammarSpec("grammar", outputs.grammar)
    elif outputs.structural_tag is not None:
        spec = _of_structural_tag(outputs.structural_tag, field)
    else:
        spec = ANY_OBJECT
    return RequestedGrammar(spec, field)


def _missing(field: str, what: str) -> FieldError:
    return FieldError(field, f"{field} is missing; it should be {what}.")
