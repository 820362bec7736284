"""JSON Schemas with instances that fit them and instances that do not fit, for tests of their grammars.

The valid ones are within what a grammar offers: properties in order, and only names that the schema requests. Every
supported keyword is there alone and with others. `REFUSED` are schemas that cannot be enforced, with the name that the
message must contain."""

import json
from pathlib import Path
from typing import Any

_LINES = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "structured_corpus.jsonl").read_text().splitlines()
]
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (case["schema"], case["valid"], case["invalid"]) for case in _LINES if "valid" in case
]
_MANY = {f"p{i}": {} for i in range(1001)}
REFUSED: list[tuple[Any, str]] = [
    *((case["schema"], case["refused"]) for case in _LINES if "refused" in case),
    ({"allOf": [{"anyOf": [{"type": "integer", "minimum": i} for i in range(30)]}] * 2}, "anyOf"),
    ({"enum": ["x" * 70_000]}, "65536 bytes"),
    ({"properties": _MANY}, "1000"),
    ({"properties": dict(list(_MANY.items())[:200]), "maxProperties": 100}, "10000 rules"),
]
