"""Texts near valid ones: whatever a grammar takes is valid, by the jsonschema package."""

import decimal
import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.types import GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.pattern import GrammarError
from runtime.text.vocabulary import BYTES
from tests.grammar.test_structured_walks import CHECKER, SCHEMAS, matchers_of, walk
from tests.support.structured.cases import BYTE_ENGINE
from tests.support.structured.corpus import CASES

_OTHERS = [None, True, False, 0, 1, -1, 7, 2.5, 0.07, 10**19, "", "a", "aa", "é", "2024-01-01", [], [1], {}, {"a": 1}]


def _mutated(value: Any, rng: random.Random) -> Any:
    """A copy with one change somewhere."""
    if isinstance(value, dict | list) and value and rng.random() < 0.7:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key, copy = rng.choice(keys), value.copy()
        match rng.randrange(4):
            case 0:
                copy.pop(key)
            case 1 if isinstance(copy, dict):
                copy = {**copy, rng.choice(["a", "b", "x1", "zz", ""]): rng.choice(_OTHERS)}
            case 1:
                copy.insert(rng.randrange(len(copy) + 1), rng.choice([*_OTHERS, *copy]))
            case _:
                copy[key] = _mutated(value[key], rng)
        return copy
    match value:
        case str() if rng.random() < 0.6:
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice(["", "a", "1", " ", "\\", "\n", "é"]) + value[at + rng.randrange(2) :]
        case int() | Decimal() if not isinstance(value, bool) and rng.random() < 0.6:
            return value + rng.choice([1, -1, Decimal("0.01"), Decimal("0.5"), 1000])
    return rng.choice(_OTHERS)


def _text(value: Any) -> str:
    """JSON; of a Decimal its digits."""
    marks: dict[str, str] = {}

    def mark(number: Decimal) -> str:
        marks[f'"<{len(marks)}>"'] = str(number)
        return f"<{len(marks) - 1}>"

    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=mark)
    for each, number in marks.items():
        text = text.replace(each, number)
    return text


def check(schema: Any, values: list[Any], rng: random.Random) -> int:
    """How many mutants of valid values the grammar takes; all of them are valid."""
    grammar = compiled(GrammarSpec("json", json.dumps(schema), strict=True))
    cls = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = cls(json.loads(json.dumps(schema), parse_float=Decimal), format_checker=CHECKER)
    matcher, taken = BYTE_ENGINE.matcher(grammar.lark), 0
    for value in values:
        for _ in range(6):
            text = _text(_mutated(value, rng))
            output = [*text.encode(), *BYTES.eos_ids]
            if matcher.allowed(output) == len(output):
                taken += 1
                with decimal.localcontext(prec=700):
                    assert validator.is_valid(json.loads(text, parse_float=Decimal)), (schema, text)
    return taken


def test_mutants_of_the_corpus():
    rng, taken = random.Random(0), 0
    for schema, valid, _ in CASES:
        if "nullable" not in str(schema):
            taken += check(schema, json.loads(json.dumps(valid), parse_float=Decimal), rng)
    assert taken > 500


@pytest.mark.long
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1 << 30))
@pytest.mark.thorough
def test_mutants_of_random_answers(schema: dict[str, Any], seed: int):
    try:
        grammar = compiled(GrammarSpec("json", json.dumps(schema), strict=True))
    except GrammarError:
        return
    texts = [walk(matchers_of(grammar)[:1], each) for each in (seed, seed + 1)]
    values = [json.loads(text, parse_float=Decimal) for text in texts if text is not None]
    check(schema, values, random.Random(seed))
