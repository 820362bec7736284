"""The benchmark over public suites reads their formats. A sample in the tree has known counts."""

import json
from pathlib import Path

from benchmarks.engine.grammar_suite import Case, by_callboard, by_llguidance, read, run

DATA = Path(__file__).parents[1] / "data"


def test_each_form_of_the_public_suites_is_read(tmp_path: Path):
    schema = {"type": "integer", "minimum": 3}
    tests = [{"description": "d", "data": 3, "valid": True}, {"data": 2, "valid": False}]
    (tmp_path / "a.json").write_text(json.dumps([{"description": "suite", "schema": schema, "tests": tests}]))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.json").write_text(json.dumps({"schema": schema, "tests": tests, "meta": {}}))
    (tmp_path / "c.json").write_text(json.dumps(schema))
    (tmp_path / "d.jsonl").write_text(json.dumps({"schema": schema, "valid": [3], "invalid": [2]}) + "\n")
    (tmp_path / "e.json").write_text("no JSON")
    full = Case(schema, [3], [2])
    assert list(read(tmp_path)) == [full, Case(schema), full, full]


def test_a_sample_of_our_own_in_their_style():
    """Schemas as SchemaStore, GitHub and Snowplow have them: accepted, and no invalid instance is."""
    cases = list(read(DATA / "schema_suite"))
    found = run(cases, by_callboard)
    assert len(cases) >= 12
    assert found["accepted"] == len(cases), found["refused"]
    assert found["invalid_taken"] == 0
    assert found["valid_taken"] == sum(len(case.valid) for case in cases)


def test_the_other_compiler_is_measured_beside():
    found = run([Case({"type": "integer"}, [1], ["a"]), Case({"type": "array", "uniqueItems": True})], by_llguidance)
    assert (found["accepted"], found["valid_taken"], found["invalid_taken"]) == (1, 1, 0)
    assert len(found["refused"]) == 1
