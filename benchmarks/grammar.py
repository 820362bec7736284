"""What grammars cost: compiling them, and a mask and an advance of each row of a step, over a corpus of schemas.

python -m benchmarks.grammar --tokenizer FOLDER_OR_GGUF ...            # the lazy engine, and the compiler's child
python -m benchmarks.grammar --tokenizer FOLDER_OR_GGUF --eager 40     # automata of so many schemas of the corpus
"""

import asyncio
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import Results, new_parser, percentiles
from runtime.core.config import ModelInfo
from runtime.core.types import Grammar, GrammarSpec
from runtime.structured.child import Child
from runtime.structured.compiler import GrammarCompiler
from runtime.structured.engines import build_loaded, load
from runtime.structured.lazy import LazyEngine
from runtime.structured.pattern import GrammarError
from runtime.structured.vocabulary import Vocabulary
from runtime.text.tokenizer import Tokenizer

CORPUS = Path(__file__).parent.parent / "tests" / "data" / "structured_corpus.jsonl"


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="JSON lines with a schema and valid instances")
    parser.add_argument("--eager", type=int, default=0, metavar="N", help="build automata of the first N that have one")
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
        results.add(what="lazy engine", **name, **lazy(vocabulary, grammars, texts))
        if args.eager:
            results.add(what="eager engine", **name, **eager(vocabulary, grammars, args.eager))


async def compile_all(schemas: list[object]) -> tuple[list[Grammar], list[float]]:
    compiler, grammars, seconds = GrammarCompiler(), [], []
    await compiler.compile(GrammarSpec("regex", "warm"))
    for schema in schemas:
        start = time.perf_counter()
        grammars.append(await compiler.compile(GrammarSpec("json", json.dumps(schema))))
        seconds.append(time.perf_counter() - start)
    compiler.close()
    return grammars, seconds


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


def eager(vocabulary: Vocabulary, grammars: list[Grammar], most: int) -> dict[str, object]:
    child, seconds, sizes, too_large = None, [], [], 0
    for grammar in [g for g in grammars if g.expression][:most]:
        if child is None or not child.is_alive:
            child = Child(4 << 30)
            child.run(60.0, load, vocabulary)
        start = time.perf_counter()
        try:
            sizes.append(child.run(5.0, build_loaded, grammar.expression).nbytes)
            seconds.append(time.perf_counter() - start)
        except GrammarError:
            too_large += 1
    if child is not None:
        child.kill()
    return {
        "built": len(sizes),
        "too_large": too_large,
        "ms": percentiles(seconds),
        "median_bytes": int(np.median(sizes)),
    }


def _micro(seconds: list[float]) -> dict[str, float]:
    return {name: value * 1e3 for name, value in percentiles(seconds).items()}


if __name__ == "__main__":
    main()
