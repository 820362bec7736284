"""JSON Schemas with instances that fit them and instances that do not, for the grammars that are made of them.

(schema, valid, invalid): the valid ones are within what a grammar offers (properties in order, no free names that the
schema does not ask for). Every keyword that is supported is here alone and in company.
"""

from typing import Any

Case = tuple[Any, list[Any], list[Any]]


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def integer(**more: Any) -> dict[str, Any]:
    return {"type": "integer", **more}


def number(**more: Any) -> dict[str, Any]:
    return {"type": "number", **more}


def array(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


def obj(properties: dict[str, Any] | None = None, *required: str, **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", **more}
    if properties is not None:
        schema["properties"] = properties
    if required:
        schema["required"] = list(required)
    return schema


UUID = "123e4567-e89b-12d3-a456-426614174000"
PERSON = obj({"name": string(), "age": integer(minimum=0)}, "name", "age")
NODE = obj({"value": integer(), "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "value")
TREE = {
    "$defs": {"tree": obj({"name": string(), "children": array(items={"$ref": "#/$defs/tree"})}, "name")},
    "$ref": "#/$defs/tree",
}
CIRCLE = obj({"kind": {"const": "circle"}, "radius": number(exclusiveMinimum=0)}, "kind", "radius")
SQUARE = obj({"kind": {"const": "square"}, "side": number(exclusiveMinimum=0)}, "kind", "side")
EXPRESSION = {
    "$defs": {
        "value": {"anyOf": [number(), {"$ref": "#/$defs/sum"}]},
        "sum": obj({"op": {"enum": ["+", "-"]}, "args": array(items={"$ref": "#/$defs/value"}, minItems=2)}, "op", "args"),
    },
    "$ref": "#/$defs/sum",
}

CASES: list[Case] = [
    # ---- types
    ({"type": "null"}, [None], [0, "", False]),
    ({"type": "boolean"}, [True, False], [0, "true", None]),
    (integer(), [0, 7, -12, 10**18], [0.5, "1", None, True]),
    (number(), [0, -1, 0.5, -12.25, 1e300, 1e-7], ["1", None, []]),
    (string(), ["", "a", "é", "😀", 'q"b\\', "\n\t\r\b\f", "\x01\x1f\x7f", "/", "\u2028"], [1, None, ["a"]]),
    (array(), [[], [1], ["a", [None]], [{"b": 1}]], [{}, 1, "[]"]),
    (obj(), [{}, {"a": 1}, {"a": {"b": [1, None, True]}}], [[], "x", 1]),
    ({"type": ["string", "null"]}, ["a", None], [1, False, []]),
    ({"type": ["integer", "string"]}, [1, "1"], [1.5, None]),
    ({"type": ["integer", "number"]}, [1, 1.5], ["1"]),
    ({"type": ["array", "object", "null"]}, [[], {}, None], [1, "a"]),
    (True, [None, 1, "a", [], {"a": [{}]}], []),
    ({}, [None, -0.5, "a", [[]], {"": ""}], []),
    # ---- const and enum
    ({"const": "a"}, ["a"], ["b", "", 1]),
    ({"const": 1}, [1], [2, "1", True]),
    ({"const": 1.5}, [1.5], [1, 1.25]),
    ({"const": None}, [None], [False, 0]),
    ({"const": True}, [True], [False, 1]),
    ({"const": {"a": [1, {"b": None}], "c": "d"}}, [{"a": [1, {"b": None}], "c": "d"}], [{"a": [1]}, {}]),
    ({"const": []}, [[]], [[1], {}]),
    ({"const": 'say "hi"\n'}, ['say "hi"\n'], ["say hi"]),
    ({"const": "naïve 😀"}, ["naïve 😀"], ["naive 😀"]),
    ({"enum": ["red", "green", "blue"]}, ["red", "blue"], ["re", "redd", "yellow"]),
    ({"enum": ["a", "ab", "abc"]}, ["a", "ab", "abc"], ["b", "abcd"]),
    ({"enum": [1, 2.5, "x", None, False, [1], {"a": 1}]}, [1, 2.5, "x", None, False, [1], {"a": 1}], [2, True, []]),
    (string(enum=["a", 1, None]), ["a"], [1, None]),
    (integer(enum=[1, 1.5, 2]), [1, 2], [1.5]),
    ({"enum": [1]}, [1], [11, 0]),
    ({"enum": ["", " "]}, ["", " "], ["  "]),
    ({"enum": [-1, 0, 1]}, [-1, 0, 1], [-2, 2, 10]),
    # ---- strings
    (string(minLength=2), ["ab", "éé", "😀😀", "abc"], ["", "a", "é"]),
    (string(maxLength=2), ["", "a", "😀😀", "\n\\"], ["abc", "ééé"]),
    (string(minLength=2, maxLength=3), ["ab", "abc"], ["a", "abcd"]),
    (string(minLength=3, maxLength=3), ["abc", '"""'], ["ab", "abcd"]),
    (string(maxLength=0), [""], ["a"]),
    (string(maxLength=1000), ["x" * 1000, ""], ["x" * 1001]),
    (string(pattern="^a+$"), ["a", "aaa"], ["", "b", "ab"]),
    (string(pattern="b"), ["b", "abc", 'a\n"b'], ["", "ac"]),
    (string(pattern="^x"), ["x", "xyz"], ["yx", ""]),
    (string(pattern="z$"), ["z", "xyz"], ["zx", ""]),
    (string(pattern="^(?:ab|cd)*$"), ["", "abcd", "cdab"], ["abc", "a"]),
    (string(pattern="^a|b$"), ["ab", "a1", "1b"], ["1a1", "ba"]),
    (string(pattern="^[A-Z]{2,4}-[0-9]+$"), ["AB-1", "ABCD-123"], ["A-1", "ABCDE-1", "AB-"]),
    (string(pattern="^\\d{3}$"), ["123"], ["12", "1234", "abc"]),
    (string(pattern="^\\w+\\s\\w+$"), ["a b", "a_1\tB"], ["ab", "a  b"]),
    (string(pattern="^[^a-z]+$"), ["ABC", "1 é", '"\\'], ["a", "Ab", ""]),
    (string(pattern="^.$"), ["a", "é", '"', "\\"], ["", "ab", "\n"]),
    (string(pattern="^\\S*$"), ["", "ab", "é"], ["a b", "\t"]),
    (string(pattern="^\\D\\W$"), ["é-", "  "], ["1-", "aa", "٣-"]),
    (string(pattern="^[^\\d\\s][^\\D]$"), ["é1", "-0"], ["11", " 1", "aa"]),
    (string(pattern='^"quoted"$'), ['"quoted"'], ["quoted"]),
    (string(pattern="^a\\\\b\\/c$"), ["a\\b/c"], ["a/b/c"]),
    (string(pattern="^\\u00e9\\x41[😀-🙏]$"), ["éA😀"], ["eA😀", "éA"]),
    (string(pattern="^a??b+?c{2}?$"), ["abbcc", "bcc"], ["abbc", "acc"]),
    (string(pattern="^([0-9]{4})(-(?:[0-9]{2}))?$"), ["2024", "2024-05"], ["2024-", "24"]),
    (string(pattern="^[-a\\]^]+$"), ["-a]^"], ["b", ""]),
    (string(pattern="^\\n\\t$"), ["\n\t"], ["nt"]),
    (string(pattern="(a+)+b"), ["aaab", "xab"], ["aaa", ""]),
    (string(pattern="^a*$", maxLength=3), ["", "aaa"], ["aaaa", "b"]),
    (string(pattern="[0-9]", minLength=3), ["ab1", "1ab"], ["1", "abc"]),
    ({"allOf": [string(pattern="a"), string(pattern="b")]}, ["ab", "ba"], ["a", "b", ""]),
    # ---- formats
    (string(format="date"), ["2024-02-29", "1999-12-31", "2000-02-29"], ["2023-02-29", "2024-13-01", "1900-02-29", "24-1-1"]),
    (string(format="time"), ["23:59:59Z", "00:00:00.5+01:00"], ["24:00:00Z", "12:00", "12:60:00Z"]),
    (string(format="date-time"), ["2024-02-29T12:00:00Z", "1985-04-12T23:20:50.52-08:00"], ["2024-02-30T12:00:00Z", "2024-02-29"]),
    (string(format="duration"), ["P1D", "PT1H30M", "P1Y2M3DT4H", "P2W"], ["P", "1D", "P1H", "PT"]),
    (string(format="uuid"), [UUID, UUID.upper()], [UUID[:-1], UUID.replace("-", ""), "x"]),
    (string(format="email"), ["a@b.co", "john.doe+x@mail.example.org"], ["a", "@b.co", "a b@c.de"]),
    (string(format="hostname"), ["a", "example.com", "xn--a-b.org"], ["-a.com", "a..b", ""]),
    (string(format="ipv4"), ["0.0.0.0", "255.10.1.9"], ["256.1.1.1", "1.2.3", "1.2.3.4.5", "01.2.3.4"]),
    (string(format="ipv6"), ["::", "::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8"], ["1::2::3", ":1", "12345::", "1:2"]),
    (string(format="uri"), ["https://example.com/a?b=c#d", "mailto:a@b.c", "urn:x:y"], ["example", "://a", ""]),
    # ---- integers
    (integer(minimum=0), [0, 1, 10**12], [-1, -10]),
    (integer(maximum=0), [0, -1, -(10**12)], [1, 10]),
    (integer(minimum=1, maximum=12), [1, 9, 10, 12], [0, 13, 100, -1]),
    (integer(minimum=-5, maximum=5), [-5, 0, 5], [-6, 6, 55]),
    (integer(minimum=95, maximum=1205), [95, 99, 100, 999, 1000, 1205], [94, 1206, 9, 12050]),
    (integer(exclusiveMinimum=0), [1, 10], [0, -1]),
    (integer(exclusiveMaximum=100), [99, -100], [100, 101]),
    (integer(exclusiveMinimum=-1, exclusiveMaximum=1), [0], [-1, 1]),
    (integer(minimum=0.5, maximum=2.5), [1, 2], [0, 3]),
    (integer(minimum=7, maximum=7), [7], [6, 8, 77]),
    (integer(minimum=-2000, maximum=-15), [-2000, -15, -100], [-14, -2001, 15]),
    (integer(minimum=1000000), [1000000, 2345678901], [999999, 0]),
    (integer(multipleOf=5), [0, 5, -10, 1005], [1, 7, -3]),
    (integer(multipleOf=2), [0, 4, 128, -2], [1, 3, 11]),
    (integer(multipleOf=100), [0, 100, 2500], [10, 150]),
    (integer(multipleOf=7, minimum=0, maximum=50), [0, 7, 49], [1, 50, 56]),
    (integer(multipleOf=3, minimum=-7, maximum=7), [-6, -3, 0, 6], [-7, 1, 9]),
    (number(multipleOf=10), [0, 20, -30], [5, 0.5]),
    # ---- numbers
    (number(minimum=0), [0, 0.5, 3, 12.75, 1e6], [-0.5, -1]),
    (number(maximum=1), [1, 0.999, -5, -0.25], [1.001, 2]),
    (number(minimum=0, maximum=1), [0, 1, 0.5, 0.001], [1.5, -0.1, 2]),
    (number(exclusiveMinimum=0), [0.001, 1, 25.5], [0, -1]),
    (number(exclusiveMinimum=0, exclusiveMaximum=1), [0.5, 0.999], [0, 1, 1.5]),
    (number(minimum=-1.5, maximum=2.25), [-1.5, -0.5, 0, 2.25, 2.2], [-1.51, 2.26, 3]),
    (number(minimum=0.125, maximum=0.375), [0.125, 0.25, 0.375, 0.3], [0.1, 0.376, 0.4]),
    (number(exclusiveMinimum=-0.5, maximum=-0.25), [-0.25, -0.4999], [-0.5, -0.2, 0.3]),
    (number(minimum=99.5), [99.5, 100, 1234.5], [99.4, 9, -100]),
    (number(minimum=-273.15), [-273.15, -1, 0, 20.5], [-273.16, -1000]),
    (number(minimum=18, maximum=18), [18], [18.5, 17]),
    (number(minimum=1e-4, maximum=1e6), [0.0001, 1000000, 3.14], [0, 1000001]),
    (number(minimum=1, exclusiveMinimum=1), [1.5], [1, 0]),
    # ---- arrays
    (array(items=integer()), [[], [1], [1, 2, 3]], [["a"], [1, "a"], [1.5]]),
    (array(items=False), [[]], [[1]]),
    (array(minItems=1), [[1], ["a", 2]], [[]]),
    (array(maxItems=2), [[], [1], [1, "a"]], [[1, 2, 3]]),
    (array(items=integer(), minItems=2, maxItems=3), [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4]]),
    (array(items=string(), minItems=3, maxItems=3), [["a", "b", "c"]], [["a", "b"], ["a"] * 4]),
    (array(maxItems=0), [[]], [[1]]),
    (array(items=integer(), maxItems=1), [[], [1]], [[1, 2]]),
    (array(items=integer(), minItems=1, maxItems=1), [[1]], [[], [1, 2]]),
    (array(items=array(items=integer())), [[], [[]], [[1], [2, 3]]], [[1], [["a"]]]),
    (array(prefixItems=[string(), integer()]), [[], ["a"], ["a", 1], ["a", 1, None]], [[1], ["a", "b"]]),
    (array(prefixItems=[string(), integer()], items=False), [["a", 1], ["a"]], [["a", 1, 2], [1]]),
    (array(prefixItems=[string(), integer()], items=False, minItems=2), [["a", 1]], [["a"], []]),
    (array(prefixItems=[string()], items=integer(), minItems=2), [["a", 1], ["a", 1, 2]], [["a"], ["a", "b"]]),
    (array(prefixItems=[integer(), integer()], maxItems=1), [[], [1]], [[1, 2], ["a"]]),
    (array(prefixItems=[string()], items={"type": "boolean"}, maxItems=3), [["a", True, False]], [["a", True, True, True]]),
    (array(items={"type": ["integer", "null"]}), [[1, None]], [["a"]]),
    (array(items={"enum": ["x", "y"]}, minItems=1), [["x"], ["x", "y", "x"]], [[], ["z"]]),
    (array(uniqueItems=False), [[1, 1]], [1]),
    # ---- objects
    (obj({"a": integer()}), [{}, {"a": 1}], [{"a": "x"}, {"a": None}]),
    (obj({"a": integer()}, "a"), [{"a": 1}], [{}, {"a": "x"}]),
    (obj({"a": integer(), "b": string()}, "b"), [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}, {}]),
    (obj({"a": integer(), "b": string(), "c": {}}, "a", "c"), [{"a": 1, "c": []}, {"a": 1, "b": "", "c": None}], [{"a": 1}, {"c": 1}]),
    (obj({"a": integer(), "b": integer(), "c": integer()}), [{}, {"b": 1}, {"a": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}], [{"c": "x"}]),
    (obj({"a": integer()}, additionalProperties=False), [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    (obj({}, additionalProperties=False), [{}], [{"a": 1}]),
    (obj(additionalProperties=integer()), [{}, {"x": 1}, {"x": 1, "y": 2}], [{"x": "a"}, {"x": 1, "y": None}]),
    (obj({"a": string()}, "a", additionalProperties=integer()), [{"a": "x"}, {"a": "x", "b": 1}], [{"b": 1}, {"a": 1}, {"a": "x", "b": "y"}]),
    (obj({"a": {}}, additionalProperties=True), [{}, {"a": 1}, {"zz": 1}, {"a": 1, "aa": 2}], [[]]),
    (obj(None, "x", "y"), [{"x": 1, "y": "a"}], [{"x": 1}, {}]),
    (obj({"a": {}}, "b", additionalProperties=string()), [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}, {"b": 1}]),
    (obj({"a": False, "b": integer()}), [{}, {"b": 1}], [{"a": 1}, {"a": None, "b": 1}]),
    (obj({'q"uote\n': integer(), "é": string()}, 'q"uote\n'), [{'q"uote\n': 1}, {'q"uote\n': 1, "é": ""}], [{"quote": 1}]),
    (obj({"": integer()}, ""), [{"": 1}], [{}]),
    (obj(minProperties=1), [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    (obj({"a": {}, "b": {}}, minProperties=1), [{"a": 1}, {"b": 1}], [{}]),
    (obj({"a": {}, "b": {}, "c": {}}, minProperties=2, additionalProperties=False), [{"a": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}], [{"a": 1}, {}]),
    (obj({"a": {}, "b": {}, "c": {}}, maxProperties=2), [{}, {"a": 1, "c": 2}], [{"a": 1, "b": 2, "c": 3}]),
    (obj({"a": {}}, additionalProperties=integer(), maxProperties=2), [{"a": 1, "b": 2}, {"x": 1, "y": 2}], [{"a": 1, "b": 2, "c": 3}]),
    (obj(maxProperties=1), [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    (obj({"a": {}, "b": {}}, "a", minProperties=1), [{"a": 1}], [{"b": 1}]),
    (obj(patternProperties={"^s_": string()}), [{}, {"s_a": "x"}, {"s_a": "x", "s_b": ""}], [{"s_a": 1}]),
    (obj(patternProperties={"^s_": string(), "^i_": integer()}), [{"s_a": "x", "i_b": 1}], [{"s_a": 1}, {"i_a": "x"}]),
    (obj(patternProperties={"^s_": string()}, additionalProperties=False), [{"s_a": "x"}], [{"a": 1}, {"s_": 1}]),
    (obj(patternProperties={"^s_": string()}, additionalProperties=integer()), [{"s_a": "x", "b": 1}], [{"b": "x"}, {"s_a": 1}]),
    (obj({"id": integer()}, "id", patternProperties={"^x-": {}}, additionalProperties=False), [{"id": 1, "x-a": None}], [{"id": 1, "y": 1}]),
    (obj({"s_a": {}}, patternProperties={"^s_": string()}), [{"s_a": "x"}], [{"s_a": 1}]),
    (obj({"a": obj({"b": obj({"c": integer()}, "c")}, "b")}, "a"), [{"a": {"b": {"c": 1}}}], [{"a": {"b": {}}}, {"a": {}}]),
    (PERSON, [{"name": "John", "age": 30}, {"name": "", "age": 0}], [{"name": "John"}, {"name": "John", "age": -1}]),
    # ---- anyOf, oneOf, allOf
    ({"anyOf": [string(), integer()]}, ["a", 1], [1.5, None]),
    ({"anyOf": [integer(maximum=3), integer(minimum=7)]}, [1, 3, 7, 10], [4, 6]),
    ({"anyOf": [obj({"a": integer()}, "a"), obj({"b": integer()}, "b")]}, [{"a": 1}, {"b": 1}], [{}, {"a": "x"}]),
    ({"anyOf": [{"const": "a"}, {"const": "ab"}, {"type": "null"}]}, ["a", "ab", None], ["b"]),
    ({"anyOf": [False, string()]}, ["a"], [1]),
    ({"anyOf": [array(items=integer()), array(items=string())]}, [[1, 2], ["a"], []], [[1, "a"]]),
    ({"type": "string", "anyOf": [{"minLength": 3}, {"const": "x"}]}, ["abc", "x"], ["ab", 3]),
    ({"anyOf": [{"anyOf": [string(), {"type": "null"}]}, integer()]}, ["a", None, 1], [True]),
    ({"oneOf": [string(), integer()]}, ["a", 1], [None]),
    ({"oneOf": [CIRCLE, SQUARE]}, [{"kind": "circle", "radius": 1}, {"kind": "square", "side": 0.5}], [{"kind": "circle", "side": 1}, {"kind": "x"}]),
    ({"oneOf": [{"const": 1}, {"const": 2}, {"enum": ["a", "b"]}]}, [1, 2, "b"], [3, "c"]),
    ({"oneOf": [{"type": "null"}, PERSON]}, [None, {"name": "a", "age": 1}], [{}, 1]),
    ({"oneOf": [obj({"a": {}}, "a", additionalProperties=False), obj({"b": {}}, "b", additionalProperties=False)]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"allOf": [integer(minimum=3), integer(maximum=5)]}, [3, 5], [2, 6]),
    ({"allOf": [obj({"a": integer()}, "a"), obj({"b": string()}, "b")]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}]),
    ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "integer"]}]}, [None], ["a", 1]),
    ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, [2, 3], [1, 4]),
    ({"allOf": [obj({"a": integer(minimum=0)}), {"properties": {"a": {"maximum": 9}}}]}, [{"a": 5}, {}], [{"a": 10}, {"a": -1}]),
    ({"allOf": [array(items=integer()), array(minItems=2)]}, [[1, 2]], [[1], ["a", "b"]]),
    ({"allOf": [number(), integer()]}, [1], [1.5]),
    ({"allOf": [integer(multipleOf=2), integer(multipleOf=5)]}, [0, 10, -20], [2, 5]),
    ({"allOf": [{"anyOf": [string(), integer()]}, {"anyOf": [integer(), {"type": "null"}]}]}, [1], ["a", None]),
    ({**obj({"a": integer()}, "a"), "allOf": [{"required": ["b"], "properties": {"b": {}}}]}, [{"a": 1, "b": None}], [{"a": 1}]),
    ({"allOf": [obj({"a": {}}, additionalProperties=integer()), obj({"b": {}}, "b")]}, [{"b": 1}, {"a": "x", "b": 2}], [{"b": "x"}]),
    ({"allOf": [array(prefixItems=[string()]), array(prefixItems=[{}, integer()], minItems=2)]}, [["a", 1]], [["a", "b"], [1, 1]]),
    # ---- references and recursion
    ({"$defs": {"n": integer()}, "$ref": "#/$defs/n"}, [1], ["a"]),
    ({"definitions": {"a/b~c": string()}, "$ref": "#/definitions/a~1b~0c"}, ["x"], [1]),
    (obj({"a": {"$ref": "#/$defs/s"}, "b": {"$ref": "#/$defs/s"}}, "a", **{"$defs": {"s": string(maxLength=1)}}), [{"a": "x", "b": ""}], [{"a": "xy"}]),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": integer()}, "$ref": "#/$defs/a"}, [1], [None]),
    ({"$defs": {"p": PERSON}, "$ref": "#/$defs/p", "required": ["age"], "description": "one"}, [{"name": "a", "age": 1}], [{"name": "a"}]),
    (obj({"a": integer(), "b": {"$ref": "#/properties/a"}}, "b"), [{"b": 1}], [{"b": "x"}]),
    (NODE, [{"value": 1}, {"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": {"value": 3}}}], [{}, {"value": 1, "next": {}}]),
    (TREE, [{"name": "a"}, {"name": "a", "children": [{"name": "b", "children": []}, {"name": "c"}]}], [{"children": []}, {"name": "a", "children": [1]}]),
    (array(items={"$ref": "#"}), [[], [[]], [[], [[[]]]]], [[1], {}]),
    (EXPRESSION, [{"op": "+", "args": [1, {"op": "-", "args": [2, 3.5]}]}], [{"op": "+", "args": [1]}, {"op": "*", "args": [1, 2]}]),
    ({"anyOf": [{"type": "null"}, array(items={"$ref": "#"}, maxItems=2)]}, [None, [None, [None]]], [[None, None, None], 1]),
    # ---- annotations
    (string(title="T", description="d", default=3, examples=["e"], deprecated=True, readOnly=True), ["a"], [3]),
    ({"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "$comment": "c", "type": "integer"}, [1], ["a"]),
    (integer(**{"x-order": 1}, nullable=False), [1], [None]),
    # ---- as they come
    (
        obj({"title": string(minLength=1), "tags": array(items=string(pattern="^[a-z]+$"), maxItems=3), "score": number(minimum=0, maximum=10)}, "title", "score", additionalProperties=False),
        [{"title": "a", "score": 7.5}, {"title": "a", "tags": ["x", "y"], "score": 10}],
        [{"title": "", "score": 1}, {"title": "a", "tags": ["X"], "score": 1}, {"title": "a", "score": 11}],
    ),
    (
        obj({"steps": array(items=obj({"explanation": string(), "output": string()}, "explanation", "output", additionalProperties=False)), "final_answer": string()}, "steps", "final_answer", additionalProperties=False),
        [{"steps": [{"explanation": "a", "output": "b"}], "final_answer": "c"}, {"steps": [], "final_answer": ""}],
        [{"steps": [{"explanation": "a"}], "final_answer": "c"}, {"final_answer": ""}],
    ),
    (
        obj({"location": string(description="City"), "unit": {"anyOf": [{"enum": ["celsius", "fahrenheit"]}, {"type": "null"}], "default": None}}, "location"),
        [{"location": "Oslo"}, {"location": "Oslo", "unit": "celsius"}, {"location": "Oslo", "unit": None}],
        [{"unit": None}, {"location": "Oslo", "unit": "kelvin"}],
    ),
    (
        obj({"id": string(format="uuid"), "at": string(format="date-time"), "from": string(format="email"), "ip": string(format="ipv4")}, "id", "at"),
        [{"id": UUID, "at": "2024-01-01T00:00:00Z", "from": "a@b.c", "ip": "1.1.1.1"}, {"id": UUID, "at": "2024-01-01T00:00:00Z"}],
        [{"id": UUID}, {"id": "x", "at": "2024-01-01T00:00:00Z"}],
    ),
    (
        {"$defs": {"Color": {"enum": ["r", "g"], "type": "string"}, "Item": obj({"color": {"$ref": "#/$defs/Color"}, "count": integer(exclusiveMinimum=0)}, "color")}, **obj({"items": array(items={"$ref": "#/$defs/Item"}, minItems=1)}, "items")},
        [{"items": [{"color": "r"}, {"color": "g", "count": 2}]}],
        [{"items": []}, {"items": [{"color": "b"}]}, {"items": [{"color": "r", "count": 0}]}],
    ),
    (
        obj({"type": {"const": "Point"}, "coordinates": array(prefixItems=[number(minimum=-180, maximum=180), number(minimum=-90, maximum=90)], items=False, minItems=2)}, "type", "coordinates"),
        [{"type": "Point", "coordinates": [12.5, -45]}],
        [{"type": "Point", "coordinates": [181, 0]}, {"type": "Point", "coordinates": [1]}, {"type": "Line", "coordinates": [1, 1]}],
    ),
]  # fmt: skip

# What is refused, with the keyword or the limit that its message must name.
REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": {}}, "if"),
    (array(contains=integer()), "contains"),
    (array(uniqueItems=True), "uniqueItems"),
    (array(items=[integer()]), "items"),
    (array(items=integer(), additionalItems=False), "additionalItems"),
    (array(unevaluatedItems=False), "unevaluatedItems"),
    (obj(propertyNames={"maxLength": 2}), "propertyNames"),
    (obj(dependentRequired={"a": ["b"]}), "dependentRequired"),
    (obj(dependentSchemas={"a": {}}), "dependentSchemas"),
    (obj(unevaluatedProperties=False), "unevaluatedProperties"),
    (obj(minProperties=3), "minProperties"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"$ref": "https://example.com/schema.json"}, "example.com"),
    ({"$ref": "#/$defs/missing"}, "nowhere"),
    ({"$ref": "#anchor"}, "nowhere"),
    ({"$ref": "#"}, "itself"),
    (string(format="idn-email"), "format"),
    (string(pattern="(?=a)b"), "looks ahead"),
    (string(pattern="(a)\\1"), "refers back"),
    (string(pattern="\\bword\\b"), "\\\\b"),
    (string(pattern="a^b"), "^"),
    (string(pattern="(?i)a"), "flags"),
    (string(pattern="a{2,1}"), "at least 2"),
    (string(pattern="("), "open"),
    (string(pattern="[a"), "too early"),
    (string(pattern="*a"), "nothing to repeat"),
    (string(pattern="a{1,100000}"), "10000 repetitions"),
    (string(pattern="((a{1,99}){1,99}){1,99}"), "50000 states"),
    (string(maxlength=3), "maxlength"),
    (string(maxLength=3.5), "maxLength"),
    (string(maxLength=100_000), "10000 repetitions"),
    (string(nullable=True), "nullable"),
    (string(minLength=3, maxLength=2), "minLength"),
    (integer(minimum="3"), "minimum"),
    (integer(minimum=1e30), "minimum"),
    (integer(multipleOf=0.5), "multipleOf"),
    (number(multipleOf=0.01), "multipleOf"),
    (integer(multipleOf=7), "multipleOf"),
    ({"type": "float"}, "type"),
    ({"type": "integer", "enum": [1, 2], "minimum": 2}, "minimum"),
    ({"oneOf": [integer(), number()]}, "oneOf"),
    ({"oneOf": [obj({"a": {}}), obj({"b": {}})]}, "oneOf"),
    ({"oneOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}]}, "oneOf"),
    ({"allOf": [string(format="date"), string(format="time")]}, "format"),
    ({"allOf": [{"anyOf": [integer(minimum=i) for i in range(30)]}] * 2}, "anyOf"),
    ({"anyOf": []}, "anyOf"),
    (obj({"a": "string"}), "properties"),
    ({"enum": ["x" * 70_000]}, "65536 bytes"),
    ("string", "schema"),
    (obj({f"p{i}": {} for i in range(501)}), "500"),
    (obj({f"p{i}": {} for i in range(200)}, maxProperties=100), "10000 rules"),
    # Nothing fits:
    (False, "no text"),
    (integer(minimum=5, maximum=4), "no text"),
    (number(exclusiveMinimum=1, maximum=1), "no text"),
    (string(pattern="^a{3}$", maxLength=2), "no text"),
    ({"allOf": [string(), integer()]}, "no text"),
    (obj({"a": {"$ref": "#"}}, "a"), "no text"),
    (obj({"a": False}, "a"), "no text"),
    ({"enum": []}, "no text"),
    (array(items=False, minItems=1), "no text"),
]
