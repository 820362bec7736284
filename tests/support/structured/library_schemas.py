"""Schemas as common libraries write them, each with a text that fits and one that does not fit.

pydantic's and msgspec's are made here by the libraries; the others' (TypeScript's, OpenAPI's, ...) are in the form that
their tools print.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import msgspec
from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    NonNegativeInt,
    PositiveFloat,
    RootModel,
    SecretBytes,
    SecretStr,
    TypeAdapter,
    conlist,
    constr,
)
from typing_extensions import TypedDict


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: float


class Movie(TypedDict, total=False):
    title: str
    year: int


@dataclass
class Item:
    """A plain dataclass."""

    name: str
    price: float = 0.0


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", title="Closed one")
    a: int = Field(description="first", examples=[1], json_schema_extra={"order": 1, "example": 3})


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Numbers(RootModel[list[int]]):
    pass


class User(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    tags: set[str] = set()
    parent: "User | None" = None


class Tagged(msgspec.Struct, tag="tagged"):
    n: int


def _pydantic(name: str, type_: Any, fits: str, fails: str) -> tuple[str, dict[str, Any], str, str]:
    return f"pydantic {name}", TypeAdapter(type_).json_schema(), fits, fails


def _msgspec(name: str, type_: Any, fits: str, fails: str) -> tuple[str, dict[str, Any], str, str]:
    return f"msgspec {name}", msgspec.json.schema(type_), fits, fails


_PYDANTIC = [
    _pydantic("bytes", bytes, '"ab"', "1"),
    _pydantic("Path", Path, '"/tmp/a"', "1"),
    _pydantic("SecretStr", SecretStr, '"x"', "1"),
    _pydantic("SecretBytes", SecretBytes, '"x"', "1"),
    _pydantic("Decimal", Decimal, '"1.50"', "true"),
    _pydantic("Decimal of places", Annotated[Decimal, Field(max_digits=5, decimal_places=2)], "1.5", "true"),
    _pydantic("date", date, '"2024-02-29"', '"2023-02-29"'),
    _pydantic("datetime", datetime, '"2024-02-29T10:00:00Z"', '"2024"'),
    _pydantic("time", time, '"10:00:00Z"', '"25:00:00Z"'),
    _pydantic("timedelta", timedelta, '"PT1H30M"', '"1 hour"'),
    _pydantic("UUID", UUID, '"123e4567-e89b-12d3-a456-426614174000"', '"123"'),
    _pydantic("AnyUrl", AnyUrl, '"ftp://a.b/c"', '"a b"'),
    _pydantic("HttpUrl", HttpUrl, '"https://example.com/a"', '"a b"'),
    _pydantic("IPv4Address", IPv4Address, '"10.0.0.1"', '"10.0.0.256"'),
    _pydantic("IPv6Address", IPv6Address, '"::1"', '"::g"'),
    _pydantic("set", set[str], '["a", "b"]', "[1]"),
    _pydantic("set of literals", set[Literal["a", "b"]], '["b", "a"]', '["a", "a"]'),
    _pydantic("frozenset of an enum", frozenset[Color], '["blue"]', '["green"]'),
    _pydantic("tuple", tuple[int, str], '[1, "a"]', "[1]"),
    _pydantic("tuple of any length", tuple[int, ...], "[1,2,3]", '["a"]'),
    _pydantic("NamedTuple", Point, "[1,0.5]", "[0.5,1]"),
    _pydantic("TypedDict", Movie, '{"title": "x"}', '{"year": "x"}'),
    _pydantic("dataclass", Item, '{"name":"a","price":1.5}', "{}"),
    _pydantic("StrEnum", Color, '"red"', '"green"'),
    _pydantic("IntEnum", Level, "2", "3"),
    _pydantic("Literal", Literal["a", 1, None], "null", "2"),
    _pydantic("Optional", int | None, "null", '"a"'),
    _pydantic("union", int | str | list[float], "[0.5]", "[true]"),
    _pydantic("tagged union", Annotated[Cat | Dog, Field(discriminator="kind")], '{"kind":"dog","good":true}',
              '{"kind":"dog","lives":9}'),
    _pydantic("dict", dict[str, int], '{"a": 1, "b": 2}', '{"a": "x"}'),
    _pydantic("dict of literals", dict[Literal["a", "b"], int], '{"b": 2}', '{"c": 1}'),
    _pydantic("dict of constrained names", dict[constr(pattern="^[a-z]+$", max_length=3), int], '{"ab":1}', '{"A":1}'),
    _pydantic("Mapping of Any", Mapping[str, Any], '{"a": [1, {}]}', "[]"),
    _pydantic("Sequence", Sequence[bool], "[true]", "[1]"),
    _pydantic("conlist", conlist(int, min_length=1, max_length=2), "[1,2]", "[]"),
    _pydantic("bounded float", Annotated[float, Field(gt=0, le=1)], "0.5", "0"),
    _pydantic("multiple_of", Annotated[float, Field(multiple_of=0.01, ge=0)], "19.99", "0.001"),
    _pydantic("PositiveFloat and NonNegativeInt", tuple[PositiveFloat, NonNegativeInt], "[0.1,0]", "[0.1,-1]"),
    _pydantic("Json", Json[list[int]], '"[1]"', "[1]"),
    _pydantic("extra forbid", Closed, '{"a":1}', '{"a":1,"b":2}'),
    _pydantic("extra allow", Open, '{"a":1,"b":[2]}', '{"b":1}'),
    _pydantic("recursive model", Tree, '{"value":1,"children":[{"value":2}]}', '{"value":1,"children":[1]}'),
    _pydantic("RootModel", Numbers, "[1,2]", '["a"]'),
    _pydantic("Any", Any, '{"a":null}', "{a}"),
]  # fmt: skip
_MSGSPEC = [
    _msgspec("Struct", User, '{"name":"a","tags":["x"],"parent":null}', '{"name":""}'),
    _msgspec("tagged Structs", Tagged | int, '{"type":"tagged","n":1}', '{"type":"other","n":1}'),
    _msgspec("dict of ints", dict[int, str], '{"1":"a"}', '{"1":2}'),
    _msgspec("bytes and datetime", tuple[bytes, datetime], '["YQ==","2024-01-01T00:00:00Z"]', '["YQ==",1]'),
]

_WRITTEN = [
    (case["name"], case["schema"], case["fits"], case["fails"])
    for case in map(json.loads, (Path(__file__).parents[2] / "data" / "library_schemas.jsonl").read_text().splitlines())
]
SCHEMAS = [*_PYDANTIC, *_MSGSPEC, *_WRITTEN]
