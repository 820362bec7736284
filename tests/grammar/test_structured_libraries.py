"""Schemas that common libraries write are taken as they are."""

import json
from typing import Any

import pytest

from runtime.base.types import GrammarSpec
from runtime.structured.grammar import compiled
from tests.support.structured.cases import fits
from tests.support.structured.library_schemas import SCHEMAS


@pytest.mark.parametrize(("schema", "good", "bad"), [case[1:] for case in SCHEMAS], ids=[case[0] for case in SCHEMAS])
def test_a_librarys_schema(schema: dict[str, Any], good: str, bad: str):
    grammar = compiled(GrammarSpec("json", json.dumps(schema)))
    assert fits(grammar, good)
    assert not fits(grammar, bad)


def test_there_are_many_of_them():
    assert len({json.dumps(schema) for _, schema, _, _ in SCHEMAS}) >= 72
