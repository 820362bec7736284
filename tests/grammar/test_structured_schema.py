"""Schemas against their own instances: every valid one can be written under the masks, no invalid one can."""

import json
from datetime import date
from decimal import Decimal
from typing import Annotated, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field

from runtime.base.types import GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.matching.automaton import MAX_STATES, EagerMatcher, build
from runtime.structured.pattern import GrammarError
from runtime.text.vocabulary import BYTES
from tests.support.structured.cases import BYTE_ENGINE, fits
from tests.support.structured.corpus import CASES, REFUSED


def grammar_of(schema):
    return compiled(GrammarSpec("json", json.dumps(schema)))


def compact(value) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def named(schema) -> str:
    return compact(schema)[:60]


def test_the_corpus_says_what_json_schema_says():
    assert len(CASES) >= 150
    for schema, valid, invalid in CASES:
        exact, *values = (json.loads(json.dumps(each), parse_float=Decimal) for each in (schema, *valid, *invalid))
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(exact)
        assert all(map(validator.is_valid, values[: len(valid)])), schema
        if "format" not in compact(schema):
            assert not any(map(validator.is_valid, values[len(valid) :])), schema


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=[named(case[0]) for case in CASES])
def test_what_fits_can_be_written_and_nothing_else(schema, valid, invalid):
    grammar = grammar_of(schema)
    for value in valid:
        assert fits(grammar, compact(value)), value
        assert fits(grammar, json.dumps(value, ensure_ascii=False)), value  # a space after each comma and colon
    for value in invalid:
        assert not fits(grammar, compact(value)), value


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=[named(case[0]) for case in REFUSED])
def test_what_is_not_enforced_is_refused_by_name(schema, says):
    with pytest.raises(GrammarError) as caught:
        compiled(GrammarSpec("json", json.dumps(schema), strict=True))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_nullable_type_of_openapi_may_be_null():
    assert fits(grammar_of({"type": "string", "nullable": True}), "null")
    assert not fits(grammar_of({"type": "string", "nullable": False}), "null")
    assert not fits(grammar_of({"type": "string", "enum": ["a"], "nullable": True}), "null")


@pytest.mark.long
@pytest.mark.thorough
def test_the_eager_engine_allows_the_same():
    """Wherever a grammar has a small automaton: the same masks at every byte of every instance."""
    num_small, masks = 0, np.zeros((2, BYTES.num_words), np.int32)
    for schema, valid, invalid in CASES:
        grammar = grammar_of(schema)
        if not grammar.expression or len(grammar.expression) > 1500:
            continue
        try:
            automaton = build(grammar.expression, BYTES)
        except GrammarError:
            continue
        num_small += 1
        for value in (*valid, *invalid):
            lazy, eager = BYTE_ENGINE.matcher(grammar.lark), EagerMatcher(automaton)
            for token in [*compact(value).encode(), BYTES.eos_ids[0]]:
                lazy.fill(masks[0])
                eager.fill(masks[1])
                assert (masks[0] == masks[1]).all(), (schema, value)
                assert (lazy.is_accepting, lazy.is_finished) == (eager.is_accepting, eager.is_finished)
                if not eager.allowed([token]):
                    assert not lazy.allowed([token])
                    break
                lazy.advance([token])
                eager.advance([token])
    assert num_small > 80
    assert MAX_STATES < 1 << 15  # states fit the table's int16


class _Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, ge=1, le=9)


class _Dog(BaseModel):
    kind: Literal["dog"]
    good: bool = True


class _Owner(BaseModel):
    name: str = Field(min_length=1, max_length=50)
    age: int | None = None
    pet: Annotated[_Cat | _Dog, Field(discriminator="kind")]
    born: date
    marks: dict[str, float]
    place: tuple[int, str]
    friends: list["_Owner"] = []


def test_models_of_pydantic():
    grammar = grammar_of(_Owner.model_json_schema())
    friend = _Owner(name="B", pet=_Cat(kind="cat"), born=date(2000, 2, 29), marks={}, place=(1, "x"))
    more = {"age": 3, "marks": {"é": 0.5}, "place": (-1, ""), "friends": [friend]}
    owner = _Owner(name="A", pet=_Dog(kind="dog"), born=date(1, 1, 1), **more)
    for model in (friend, owner):
        assert fits(grammar, model.model_dump_json())
    assert not fits(grammar, owner.model_dump_json().replace('"dog"', '"cat"'))
