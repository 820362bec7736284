"""How many of a folder's JSON Schemas are accepted, how fast, and whether invalid instances are.

python -m benchmarks.engine.grammar_suite FOLDER ...          # each folder's *.json and *.jsonl, with its subfolders
python -m benchmarks.engine.grammar_suite --sample 500 FOLDER # 500 random ones of its schemas

Files are read in the public suites' forms: JSON-Schema-Test-Suite (a list of schemas with tests), MaskBench (a
schema with tests) and plain schemas (JSONSchemaBench). JSON lines with schema, valid and invalid, as in tests/data,
are read too. Each schema is compiled as with `strict: true` by Callboard and by llguidance's own compiler, both in
children that are killed after five seconds.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from runtime.base.types import CallboardError, GrammarSpec
from runtime.child import Child, Overrun
from runtime.structured.grammar import compiled
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.pattern import GrammarError
from runtime.text.vocabulary import BYTES

_DEADLINE_S, _MEMORY = 5.0, 2 << 30


@dataclass(slots=True)
class Case:
    schema: Any
    valid: list[Any] = field(default_factory=list)
    invalid: list[Any] = field(default_factory=list)


def main() -> None:
    from benchmarks.library.measure import Results, new_parser  # imports torch, which the children do not load

    parser = new_parser(__doc__, model=False)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--sample", type=int, metavar="N", help="of each folder")
    args = parser.parse_args()
    results = Results("grammar_suite", args.out)
    for folder in args.folders:
        cases = list(read(folder))
        if args.sample is not None and args.sample < len(cases):
            cases = random.Random(0).sample(cases, args.sample)
        for name, compile_ in (("callboard", by_callboard), ("llguidance", by_llguidance)):
            results.add(what=name, folder=folder.name, **run(cases, compile_))


def read(folder: Path) -> Iterator[Case]:
    """A folder's cases, in the order of file names."""
    for path in sorted(folder.rglob("*.json*")):
        try:
            text = path.read_text("utf-8")
            found = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        except ValueError:
            continue
        for each in found if isinstance(found, list) else [found]:
            if not isinstance(each, dict):
                continue
            if isinstance(each.get("tests"), list) and "schema" in each:
                tests: dict[bool, list[Any]] = {True: [], False: []}
                for test in each["tests"]:
                    tests[bool(test["valid"])].append(test["data"])
                yield Case(each["schema"], tests[True], tests[False])
            elif "schema" in each:
                yield Case(each["schema"], each.get("valid", []), each.get("invalid", []))
            else:
                yield Case(each)


def by_callboard(schema: str) -> tuple[str, float]:
    """The grammar and the seconds that it took."""
    start = time.perf_counter()
    return compiled(GrammarSpec("json", schema, strict=True)).lark, time.perf_counter() - start


def by_llguidance(schema: str) -> tuple[str, float]:
    """The same of llguidance's own compiler."""
    start = time.perf_counter()
    options = {"whitespace_flexible": False, "item_separator": ",\\x20?", "key_separator": ":\\x20?"}
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        _bytes_engine().matcher(grammar)
    except (CallboardError, ValueError) as e:
        raise GrammarError(str(e)) from None
    return grammar, time.perf_counter() - start


@cache
def _bytes_engine() -> LazyEngine:
    return LazyEngine(BYTES)


def run(cases: list[Case], compile_: Callable[[str], tuple[str, float]]) -> dict[str, Any]:
    child, seconds, reasons = Child(_MEMORY), [], Counter[str]()
    taken = {True: 0, False: 0}
    child.run(60.0, compile_, "{}")
    for case in cases:
        if not child.is_alive:
            child.kill()
            child = Child(_MEMORY)
            child.run(60.0, compile_, "{}")
        try:
            grammar, took = child.run(_DEADLINE_S, compile_, json.dumps(case.schema))
        except (GrammarError, Overrun) as e:
            reasons[_reason(str(e))] += 1
            continue
        seconds.append(took)
        for is_valid, values in ((True, case.valid), (False, case.invalid)):
            taken[is_valid] += sum(_fits(grammar, value) for value in values)
    child.kill()
    return {
        "schemas": len(cases),
        "accepted": len(seconds),
        "accepted_share": len(seconds) / max(1, len(cases)),
        "ms": {f"p{p}": float(np.percentile(seconds or [0.0], p)) * 1e3 for p in (50, 90, 99)},
        "valid_taken": taken[True],
        "invalid_taken": taken[False],
        "refused": dict(reasons.most_common(12)),
    }


def _reason(message: str) -> str:
    """A message without the schema's own text."""
    return re.sub(r'^at \S+ |"[^"]*"|\d+', "", message)[:60]


def _fits(grammar: str, value: Any) -> bool:
    output = [*json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace"), *BYTES.eos_ids]
    try:
        return _bytes_engine().matcher(grammar).allowed(output) == len(output)
    except CallboardError:
        return False


if __name__ == "__main__":
    from benchmarks.engine import grammar_suite  # a child finds functions by their module, and this module is __main__

    grammar_suite.main()
