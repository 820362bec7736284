"""Objects with listed and free names: every text that a schema allows, with any of its properties left out."""

import json
from itertools import combinations

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.types import GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.pattern import GrammarError
from tests.support.structured.cases import fits

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def grammar_of(schema):
    return compiled(GrammarSpec("json", json.dumps(schema)))


def texts_of(value):
    yield json.dumps(value)
    yield json.dumps(value, separators=(",", ":"))


OBJECTS = [
    {"additionalProperties": TEXT},
    {"additionalProperties": INTEGER},
    {"additionalProperties": True},
    {"additionalProperties": {}},
    {"additionalProperties": False, "patternProperties": {"^x-": INTEGER}},
    {"additionalProperties": TEXT, "patternProperties": {"^x-": INTEGER}},
    {"additionalProperties": True, "maxProperties": 2},
    {"additionalProperties": INTEGER, "minProperties": 1},
    {"additionalProperties": True, "propertyNames": {"maxLength": 3}},
]


@pytest.mark.parametrize("required", [(), ("a",), ("b",), ("c",), ("a", "c")], ids=str)
@pytest.mark.parametrize("of", OBJECTS, ids=json.dumps)
def test_free_names_follow_any_subset_of_the_properties(of, required):
    schema = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": TEXT}, **of, "required": [*required]}
    grammar, validator = grammar_of(schema), jsonschema.Draft202012Validator(schema)
    values = {"a": 1, "b": 2, "c": "t"}
    num_valid = 0
    for some in (names for n in range(4) for names in combinations(values, n)):
        for free in ({}, {"x-1": 7}, {"ab": 8}, {"x-1": 7, "ab": 8}, {"ab": "t"}, {"long": "t", "ab": "t"}):
            value = {name: values[name] for name in some} | free
            num_valid += validator.is_valid(value)
            for text in texts_of(value):
                assert fits(grammar, text) == validator.is_valid(value), text
    assert num_valid


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (
            {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"a": INTEGER, "b": INTEGER},
                        "required": ["a", "b"],
                        "additionalProperties": False,
                    },
                    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": TEXT},
                ]
            },
            [{"a": 1, "c": "t"}, {"a": 1, "b": 2}, {"a": 1, "b": "t"}, {"b": "t", "c": "t"}, {}],
        ),
        ({"anyOf": [{"const": {"a": 1}}, {"type": "object"}]}, [{"a": 1}, {"b": 1}, {"a": "t"}, {"a": 1, "b": 2}, {}]),
        ({"anyOf": [{"const": [1, 2]}, {"type": "array"}]}, [[1, 2], [], ["t"], [1, 3], [1, 2, 3], [12]]),
        (
            {"anyOf": [{"enum": [[True], {"k": [None]}]}, {"type": "array", "items": {"type": ["boolean", "null"]}}]},
            [[True], [False], [None, True], {"k": [None]}],
        ),
        (
            {
                "anyOf": [
                    {"type": "array", "prefixItems": [{"const": "a"}, INTEGER], "items": False},
                    {"type": "array", "items": TEXT},
                ]
            },
            [["a", 1], ["a"], ["a", "b"], ["ab"], []],
        ),
        ({"anyOf": [{"const": "a"}, {"const": "ab"}, {"pattern": "^x"}, TEXT]}, ["a", "ab", "abc", "x", ""]),
        ({"anyOf": [{"const": 1}, {"const": 12}, {"type": "number"}]}, [1, 12, 123, 1.5, -1]),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": [1, 12, "a", None, [1], [1, 2]]}},
            [[1, 12], [12, 1], ["a"], [None, [1]], [[1, 2], [1]], []],
        ),
        (
            {"oneOf": [{"properties": {"k": {"const": "p"}, "v": INTEGER}}, {"properties": {"k": {"const": "pq"}}}]},
            [{"k": "p"}, {"k": "p", "v": 1}, {"k": "pq"}],
        ),
        (
            {
                "type": "object",
                "properties": {"a": INTEGER},
                "dependentRequired": {"a": ["b"]},
                "additionalProperties": True,
            },
            [{"a": 1, "b": 2}, {"b": 2, "c": 3}, {"c": 3}, {}],
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_options_share_a_beginning(schema, values):
    grammar = grammar_of(schema)
    for value in values:
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
        for text in texts_of(value):
            assert fits(grammar, text), text


_LEAVES = [0, 1, 12, -3, "", "a", "ab", "x", True, None, [], {}, [1], {"a": 1}]


def _written(schema, random, depth=4):
    """Return a value that mostly fits a schema: any subset of its names in their order, then free names."""
    if not isinstance(schema, dict) or not schema or depth == 0 or random.random() < 0.05:
        return random.choice(_LEAVES)
    if "anyOf" in schema:
        return _written(random.choice(schema["anyOf"]), random, depth)
    if "enum" in schema or "const" in schema:
        return random.choice(schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        num = random.randrange(len(first) + 3)
        return [_written(first[i] if i < len(first) else items, random, depth - 1) for i in range(num)]
    if schema.get("type") == "object":
        given, required = schema["properties"], schema.get("required", [])
        names = [name for name in given if name in required or random.random() < 0.5]
        names += [name for name in required if name not in given]
        patterns = schema.get("patternProperties", {})
        names += [name for name in random.sample(["x-1", "extra", "ab", "d"], 4) if random.random() < 0.4]
        others = {name: of for name in names for p, of in patterns.items() if name.startswith(p[1:])}
        of = {name: given.get(name, others.get(name, schema.get("additionalProperties", True))) for name in names}
        return {name: _written(each, random, depth - 1) for name, each in of.items()}
    kinds = {"integer": [0, 1, 12, -3], "string": ["", "a", "ab", "x"], "null": [None]}
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return random.choice(kinds[random.choice(types)])


def _schemas(depth):
    leaves = st.sampled_from(
        [True, INTEGER, TEXT, {"enum": ["a", 1, None]}, {"const": "ab"}, {"type": ["integer", "null"]}, {"const": [1]}]
    )
    if not depth:
        return leaves
    inner = _schemas(depth - 1)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), inner, min_size=1)},
        optional={
            "required": st.lists(st.sampled_from("abc"), unique=True, max_size=2),
            "additionalProperties": inner | st.booleans(),
            "patternProperties": st.dictionaries(st.sampled_from(["^x-", "^e"]), inner, min_size=1),
            "maxProperties": st.integers(1, 3),
            "minProperties": st.integers(0, 1),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")}, optional={"items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2)}
    )
    return (
        leaves
        | objects
        | objects
        | arrays
        | st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=2, max_size=3))
    )


def _closed(schema):
    """Return a schema in which listed names are all names unless it allows others, as Callboard reads it."""
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    for key in ("items", "additionalProperties"):
        if key in schema:
            schema[key] = _closed(schema[key])
    for key in ("anyOf", "prefixItems"):
        if key in schema:
            schema[key] = [_closed(each) for each in schema[key]]
    for key in ("properties", "patternProperties"):
        if key in schema:
            schema[key] = {name: _closed(each) for name, each in schema[key].items()}
    if schema.keys() & {"properties", "patternProperties"} and "additionalProperties" not in schema:
        required = dict.fromkeys(schema.get("required", ()), True)  # a required name is allowed, listed or not
        schema |= {"properties": {**schema.get("properties", {}), **(required | schema.get("properties", {}))}}
        schema["additionalProperties"] = False
    return schema


def _in_order(schema, value, rank=0):
    """Whether each object has the names that its schema lists first, in that order; None if anyOf leaves it open."""
    if isinstance(schema, dict) and "anyOf" in schema:
        return any(
            _in_order(each, value) and jsonschema.Draft202012Validator(each).is_valid(value) for each in schema["anyOf"]
        )
    if isinstance(value, list) and isinstance(schema, dict):
        first = schema.get("prefixItems", [])
        return all(
            _in_order(first[i] if i < len(first) else schema.get("items", True), each) for i, each in enumerate(value)
        )
    if not (isinstance(value, dict) and isinstance(schema, dict)):
        return True
    given, names = schema.get("properties", {}), list(value)
    wanted = [*given, *(n for n in schema.get("required", ()) if n not in given)]
    listed = [name for name in wanted if name in value]
    if names[: len(listed)] != listed:
        return False
    for name, each in value.items():
        of_name = [given[name]] if name in given else []
        of_name += [of for p, of in schema.get("patternProperties", {}).items() if name.startswith(p[1:])]
        if not all(_in_order(of, each) for of in of_name or [schema.get("additionalProperties", True)]):
            return False
    return True


@given(_schemas(3), st.randoms(use_true_random=False))
def test_random_schemas_take_what_they_allow(schema, random):
    try:
        grammar = grammar_of(schema)
    except GrammarError:  # free names may not repeat, and such
        return
    exact = _closed(schema)
    validator = jsonschema.Draft202012Validator(exact)
    for value in (_written(schema, random) for _ in range(20)):
        is_valid = validator.is_valid(value)
        if is_valid and not _in_order(exact, value):
            continue
        for text in texts_of(value):
            assert fits(grammar, text) == is_valid, (json.dumps(exact), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "required": []},
        {"properties": {}},
        {"allOf": [{"type": "object", "properties": {}}, {"description": "nothing"}]},
        {"$ref": "#/$defs/none", "$defs": {"none": {"type": "object", "properties": {}}}},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("strict", [None, False, True])
def test_an_empty_list_of_properties_allows_none(schema, strict):
    for of, around in ((schema, "%s"), ({"type": "array", "items": schema}, "[%s]")):
        if of is not schema and "$ref" in schema:
            continue
        grammar = compiled(GrammarSpec("json", json.dumps(of), strict=strict))
        assert fits(grammar, around % "{}")
        assert not fits(grammar, around % '{"a": 1}')


@pytest.mark.parametrize(
    "more", [{"additionalProperties": True}, {"additionalProperties": {}}, {"required": ["a"]}], ids=json.dumps
)
def test_an_empty_list_of_properties_may_be_open(more):
    assert fits(grammar_of({"type": "object", "properties": {}, **more}), '{"a": 1}')


def test_an_excluded_name_leaves_others_free():
    grammar = grammar_of({"type": "object", "properties": {"a": False}})
    assert fits(grammar, '{"b": 1}')
    assert not fits(grammar, '{"a": 1}')
