"""Whatever is chosen under the masks, by whatever weights: what comes out parses and fits its schema."""

import contextlib
import decimal
import json
import re
from decimal import Decimal

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

from runtime.base.types import Grammar, GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.matching.automaton import EagerMatcher, build
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.matching.matcher import Matcher
from runtime.structured.pattern import GrammarError
from runtime.structured.schema.formats import FORMATS
from runtime.structured.schema.keywords import KEYWORDS
from runtime.text.vocabulary import Vocabulary
from tests.support.structured.cases import fits
from tests.support.structured.corpus import CASES

_PIECES = '{" ":" ": ", " "," }, "}] ]] [{ "a "b ": null true false 10 -1 0.5 e+ \\" \\\\ \\n aa ab zz 2024 -01 é😀 T1'
_SPACED = [b" ", b", ", b'": ', b'", "', b': "']
# Bytes, pieces of JSON, halves of characters, a token without text; then two ids of EOS.
TOKENS = [*(bytes((i,)) for i in range(256)), *_PIECES.encode().split(b" "), *_SPACED, b"\xf0\x9f", b"\x98\x80", b""]
SMALL = Vocabulary((*TOKENS, b"", b""), (len(TOKENS), len(TOKENS) + 1))
ENGINE = LazyEngine(SMALL)
decimal.getcontext().prec = 700  # for jsonschema's remainders of numbers like 1e300
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def allowed(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(matchers: list[Matcher], seed: int, most: int = 300) -> str | None:
    """A random model's answer; None if it is cut off. All matchers must allow the same all along."""
    random = np.random.default_rng(seed)
    weights = random.normal(0, 2, len(SMALL.tokens))
    closes = np.array([any(c in b'"]}' for c in token) for token in SMALL.tokens]) * 0.05
    closes[list(SMALL.eos_ids)] = 0.1
    masks = np.zeros((len(matchers), SMALL.num_words), np.int32)
    text = b""
    for step in range(most):
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.fill(mask)
        assert (masks == masks[0]).all()
        ids = allowed(masks[0])
        assert ids.size, text
        noise = random.gumbel(0, 1.5, ids.size)
        token = int(ids[np.argmax(weights[ids] + noise + step * closes[ids])])
        for matcher in matchers:
            matcher.advance([token])
        if token in SMALL.eos_ids:
            return text.decode()
        assert SMALL.tokens[token]
        text += SMALL.tokens[token]
    return None


def matchers_of(grammar: Grammar) -> list[Matcher]:
    """Both engines' where the eager one has it cheaply."""
    matchers: list[Matcher] = [ENGINE.matcher(grammar.lark)]
    if grammar.expression and len(grammar.expression) < 500 and not re.search(r"\d{3}\}", grammar.expression):
        matchers.append(EagerMatcher(build(grammar.expression, SMALL)))
    return matchers


def check_walks(schema: object, seeds: list[int]) -> int:
    """How many answers were finished; all of them fit."""
    grammar = compiled(GrammarSpec("json", json.dumps(schema), strict=True))
    exact = json.loads(json.dumps(schema), parse_float=Decimal)  # 0.07 is a multiple of 0.01
    of_draft = jsonschema.validators.validator_for(exact, jsonschema.Draft202012Validator)
    texts = [walk(matchers_of(grammar), seed) for seed in seeds]
    finished = [text for text in texts if text is not None]
    for text in finished:
        value = json.loads(text, parse_float=Decimal)
        of_draft(exact, format_checker=CHECKER).validate(value)
    return len(finished)


# ---- random schemas --------------------------------------------------------------------------------------------------

_NAMES = st.sampled_from(["a", "b", "c", "name", 'q"', "é", ""])
_SMALL_NUMBERS = st.integers(-50, 50) | st.decimals(-50, 50, places=2, allow_nan=False).map(float)


def _bounds(draw, least: str, most: str, values) -> dict:
    low, high = sorted((draw(values), draw(values)))
    return {k: v for k, v in ((least, low), (most, high)) if draw(st.booleans())}


def _multiples(of: list[float]):
    return st.sampled_from([{}, {}, *({"multipleOf": each} for each in of)])


@st.composite
def scalars(draw) -> dict:
    kind = draw(st.sampled_from(["string", "integer", "number", "boolean", "null", "enum", "pattern", "format"]))
    match kind:
        case "string":
            return {"type": kind, **_bounds(draw, "minLength", "maxLength", st.integers(0, 12))}
        case "integer":
            ends = draw(st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]))
            return {"type": kind, **_bounds(draw, *ends, st.integers(-2000, 2000)), **draw(_multiples([2, 7, 25, 60]))}
        case "number":
            ends = draw(st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "maximum")]))
            return {
                "type": kind,
                **_bounds(draw, *ends, _SMALL_NUMBERS),
                **draw(_multiples([0.01, 0.5, 2.5, 3, 0.125])),
            }
        case "enum":
            values = (
                st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
            )
            beside = st.sampled_from([{}, {}, {"type": ["string", "integer"]}, {"minLength": 2}, {"minimum": 0}])
            return {"enum": draw(st.lists(values, min_size=1, max_size=4)), **draw(beside)}
        case "pattern":
            parts = st.sampled_from(
                ["a", "[a-f0-9]", "\\d+", ".", "(?:x|yy){1,3}", "[^a]*", '"?', "\\\\", "é|😀", "\\w\\s?"]
            )
            body = "".join(draw(st.lists(parts, max_size=4)))
            return {"type": "string", "pattern": draw(st.sampled_from(["^(?:{})$", "^(?:{})", "(?:{})"])).format(body)}
        case "format":
            return {"type": "string", "format": draw(st.sampled_from(sorted(FORMATS)))}
    return {"type": kind}


@st.composite
def arrays(draw, items) -> dict:
    schema = {"type": "array", "items": draw(items), **_bounds(draw, "minItems", "maxItems", st.integers(0, 4))}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(items, min_size=1, max_size=2))
    elif draw(st.booleans()):
        schema["items"] = {"enum": draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))}
        schema["uniqueItems"] = True
    return schema


@st.composite
def objects(draw, values) -> dict:
    properties = draw(st.dictionaries(_NAMES, values, max_size=4))
    schema = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if draw(st.booleans())]
    match draw(st.integers(0, 4)):
        case 0:
            schema["additionalProperties"] = draw(values)
        case 1:
            schema["patternProperties"] = draw(
                st.dictionaries(st.sampled_from(["^x", "y$", "[0-9]"]), values, max_size=2)
            )
        case 2:
            schema["maxProperties"] = draw(st.integers(len(schema["required"]), 5))
        case 3:
            schema["minProperties"] = 1 if properties else 0
        case 4:
            schema["additionalProperties"] = True
            names = [{"enum": ["a", "b", "x"]}, {"pattern": "^[a-c]"}, {"maxLength": 2}]
            schema["propertyNames"] = draw(st.sampled_from(names))
    match draw(st.integers(0, 5)):
        case 0:
            schema["dependentRequired"] = {draw(_NAMES): draw(st.lists(_NAMES, max_size=2, unique=True))}
        case 1:
            schema["dependentSchemas"] = {draw(_NAMES): {"properties": {draw(_NAMES): draw(values)}}}
        case 2:
            schema["oneOf"] = [
                {"required": [name]} for name in draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
            ]
        case 3:
            schema["unevaluatedProperties"] = draw(values)
    return schema


def _combined(schemas):
    pairs = st.lists(schemas, min_size=1, max_size=3)
    return pairs.map(lambda s: {"anyOf": s}) | pairs.map(lambda s: {"oneOf": s}) | pairs.map(lambda s: {"allOf": s})


SCHEMAS = st.recursive(scalars(), lambda s: arrays(s) | objects(s) | _combined(s), max_leaves=8)


def check_random(schema: dict, seed: int, seen: list[int]) -> None:
    try:
        num_finished = check_walks(schema, [seed, seed + 1])
    except GrammarError:  # nothing fits, or options of oneOf overlap
        return
    seen[0] += num_finished


def test_random_schemas_and_weights():
    seen = [0]

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS, st.integers(0, 1 << 30))
    def run(schema: dict, seed: int) -> None:
        check_random(schema, seed, seen)

    run()
    assert seen[0] > 30


@pytest.mark.long
@pytest.mark.thorough
def test_many_random_schemas_and_weights():
    seen = [0]

    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS, st.integers(0, 1 << 30))
    def run(schema: dict, seed: int) -> None:
        check_random(schema, seed, seen)

    run()
    assert seen[0] > 160


@pytest.mark.long
@pytest.mark.thorough
def test_the_corpus_under_random_weights():
    schemas = [schema for schema, _, _ in CASES if "nullable" not in str(schema)]  # which is OpenAPI's alone
    finished = sum(check_walks(schema, [at, at + 1000]) for at, schema in enumerate(schemas))
    assert finished > len(CASES)


_WORDS = sorted(KEYWORDS | {"#", "#/$defs/a", "a", "^a", "object", "array", "string", "number", "integer", "$defs"})
_ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(_WORDS) | st.floats(-2, 2),
    lambda j: st.lists(j, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), j, max_size=4),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(_ANY_JSON)
def test_whatever_comes_is_compiled_or_refused(schema: object):
    with contextlib.suppress(GrammarError):
        assert compiled(GrammarSpec("json", json.dumps(schema))).lark


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_instances_of_others_can_be_written(data: st.DataObject):
    """hypothesis-jsonschema draws valid values. The grammar accepts all scalars among them, and lists of scalars."""
    plain = scalars().filter(lambda s: s.get("type") not in ("number",) and not s.keys() & {"pattern", "format"})
    schema = data.draw(plain | plain.map(lambda s: {"type": "array", "items": s, "maxItems": 5}))
    value = data.draw(from_schema(schema))
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    digits = 16 if "multipleOf" in str(schema) else 20  # integers have up to 19 digits, multiples up to 15
    if re.search(rf"\d{{{digits}}}|\d\.|e[+-]", text) or "\U0010ffff" in text:  # or are floats
        return
    assert fits(compiled(GrammarSpec("json", json.dumps(schema))), text)
