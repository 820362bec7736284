"""The cost of grammars: compiling them, and a mask and an advance for each row in a step, over a schema corpus.

python -m benchmarks.engine.grammar --tokenizer PATH ...            # the lazy engine, and the compiler's child
python -m benchmarks.engine.grammar --tokenizer PATH --eager 40     # automata of 40 schemas of the corpus
python -m benchmarks.engine.grammar --tokenizer PATH --api 100      # and of 100 random types of OpenAI's API
"""

import asyncio
import importlib
import inspect
import json
import pkgutil
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai.types
from pydantic import BaseModel

from benchmarks.library.measure import Results, new_parser, percentiles
from runtime.base.model_info import ModelInfo
from runtime.base.types import Grammar, GrammarSpec
from runtime.child import Child, Overrun
from runtime.output.channel_grammar import channel_grammar, channel_marks
from runtime.output.fields import read_options
from runtime.output.options import ChatOptions
from runtime.structured.compiler import GrammarCompiler
from runtime.structured.grammar import compiled
from runtime.structured.matching.factory import build_loaded, load
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.pattern import GrammarError
from runtime.text.tokenizer import Tokenizer
from runtime.text.vocabulary import Vocabulary

CORPUS = Path(__file__).parents[2] / "tests" / "data" / "structured_corpus.jsonl"


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="JSON lines with a schema and valid instances")
    parser.add_argument("--eager", type=int, default=0, metavar="N", help="build automata of the first N that have one")
    parser.add_argument("--api", type=int, default=0, metavar="N", help="build automata of N types of OpenAI's API")
    args = parser.parse_args()
    cases = [case for line in args.corpus.read_text().splitlines() if "valid" in (case := json.loads(line))]
    results = Results("grammar", args.out)
    grammars, seconds = asyncio.run(compile_all([case["schema"] for case in cases]))
    results.add(what="compile, in a child", schemas=len(grammars), ms=percentiles(seconds), max_ms=max(seconds) * 1e3)
    for path in args.tokenizer:
        tokenizer = Tokenizer.load(path)
        rows = -(-tokenizer.vocab_size // 64) * 64
        info = ModelInfo("", rows, 4096, tokenizer.eos_token_ids, 2, 16, "float32", "cpu")
        vocabulary = Vocabulary.of(tokenizer, info)
        texts = [
            [
                tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
                for value in case["valid"]
            ]
            for case in cases
        ]
        name = {"tokenizer": path.name, "vocabulary": tokenizer.vocab_size}
        if (marks := channel_marks(tokenizer)) is not None:
            results.add(what="turns in channels", **name, **lazy(vocabulary, *turns_in_channels(tokenizer, marks)))
        results.add(what="lazy engine", **name, **lazy(vocabulary, grammars, texts))
        if args.eager:
            results.add(what="eager engine", **name, **eager(vocabulary, grammars[: args.eager]))
        for least in (1, 10) if args.api else ():
            drawn = api_grammars(least, args.api)
            results.add(what=f"API types of {least} to 60 properties", **name, **eager(vocabulary, drawn))


async def compile_all(schemas: list[object]) -> tuple[list[Grammar], list[float]]:
    compiler, grammars, seconds = GrammarCompiler(), [], []
    await compiler.compile(GrammarSpec("regex", "warm"))
    for schema in schemas:
        start = time.perf_counter()
        grammars.append(await compiler.compile(GrammarSpec("json", json.dumps(schema))))
        seconds.append(time.perf_counter() - start)
    compiler.close()
    return grammars, seconds


def turns_in_channels(tokenizer: Tokenizer, marks: dict[str, int]) -> tuple[list[Grammar], list[list[list[int]]]]:
    """The grammars of chats with and without tools, and the README as reasoning and as the answer."""
    source = (CORPUS.parents[2] / "README.md").read_text()
    text = (
        f"<|channel|>analysis<|message|>{source}<|end|><|start|>assistant"
        f"<|channel|>final<|message|># a < b\n<p>{source}</p><|return|>"
    )
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("search", "open_file")]
    options = [read_options(ChatOptions, {"tools": offered}) for offered in (None, tools)]
    asked = [channel_grammar(each, marks, "header", True, None) for each in options]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return [compiled(each.spec) for each in asked], [[tokens], [tokens]]


def lazy(vocabulary: Vocabulary, grammars: list[Grammar], texts: list[list[list[int]]]) -> dict[str, object]:
    start = time.perf_counter()
    engine = LazyEngine(vocabulary)
    ready = time.perf_counter() - start
    mask = np.zeros(vocabulary.num_words, np.int32)
    fresh, copies, fills, advances = [], [], [], []
    for grammar, outputs in zip(grammars, texts, strict=True):
        start = time.perf_counter()
        prototype = engine.matcher(grammar.lark)
        fresh.append(time.perf_counter() - start)
        for output in outputs:
            start = time.perf_counter()
            matcher = prototype.copy()
            copies.append(time.perf_counter() - start)
            for token in output:
                start = time.perf_counter()
                matcher.fill(mask)
                filled = time.perf_counter()
                matcher.advance([token])
                advances.append(time.perf_counter() - filled)
                fills.append(filled - start)
    per_row = np.array(fills) + np.array(advances)
    return {
        "setup_s": ready,
        "new_grammar_ms": percentiles(fresh),
        "known_grammar_us": float(np.median(copies)) * 1e6,
        "steps": len(fills),
        "mask_us": {"mean": float(np.mean(fills)) * 1e6, **_micro(fills)},
        "advance_us": {"mean": float(np.mean(advances)) * 1e6, **_micro(advances)},
        "row_us": {"mean": float(per_row.mean()) * 1e6, **_micro(list(per_row))},
    }


def api_grammars(least: int, num: int) -> list[Grammar]:
    """Types in the openai package, as its client sends them for structured output: closed objects with `least` to 60
    properties, which may have an automaton."""
    schemas: dict[str, str] = {}
    for found in pkgutil.walk_packages(openai.types.__path__, "openai.types."):
        for name, kind in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
            if issubclass(kind, BaseModel) and kind.__module__ == found.name:
                schema = _closed(kind.model_json_schema())
                if least <= _num_properties(schema) <= 60:
                    schemas[json.dumps(schema)] = name
    grammars = []
    for schema in random.Random(0).sample(sorted(schemas), len(schemas)):
        try:
            grammar = compiled(GrammarSpec("json", schema))
        except GrammarError:
            continue
        grammars += [grammar] if grammar.expression else []
        if len(grammars) == num:
            break
    return grammars


def _closed(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _closed(value) for key, value in schema.items() if (key, value) != ("additionalProperties", True)}
    return [_closed(value) for value in schema] if isinstance(schema, list) else schema


def _num_properties(schema: Any) -> int:
    if isinstance(schema, dict):
        own = schema.get("properties")
        return (len(own) if isinstance(own, dict) else 0) + sum(map(_num_properties, schema.values()))
    return sum(map(_num_properties, schema)) if isinstance(schema, list) else 0


def eager(vocabulary: Vocabulary, grammars: list[Grammar]) -> dict[str, object]:
    child, seconds, sizes, ns_per_byte, too_large = None, [], [], [], 0
    for grammar in [g for g in grammars if g.expression]:
        if child is None or not child.is_alive:
            child = Child(4 << 30)
            child.run(60.0, load, vocabulary)
        try:
            automaton, took = child.run(5.0, build_loaded, grammar.expression)
            sizes.append(automaton.nbytes)
            seconds.append(took)
            ns_per_byte.append(took * 1e9 / len(grammar.expression) / len(vocabulary.tokens))
        except (GrammarError, Overrun):
            too_large += 1
    if child is not None:
        child.kill()
    return {
        "built": len(sizes),
        "too_large": too_large,
        "cpu_ms": percentiles(seconds),
        "p90_cpu_ms": float(np.percentile(seconds, 90)) * 1e3,
        "ns_per_byte_and_token": float(np.median(ns_per_byte)),
        "median_bytes": int(np.median(sizes)),
    }


def _micro(seconds: list[float]) -> dict[str, float]:
    return {name: value * 1e3 for name, value in percentiles(seconds).items()}


if __name__ == "__main__":
    main()
