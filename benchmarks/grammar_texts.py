"""How many texts of real EBNF grammars may be written, by Callboard's reader and by llguidance's converter of GBNF.

python -m benchmarks.grammar_texts --tokenizer FOLDER GRAMMAR ...

Each grammar's texts are drawn at random from its rules, so a reader that loses one rejects a valid output. `ms` is the
time to compile the grammar, `us` the time of a mask along the texts, at the tokenizer's vocabulary.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import llguidance.gbnf_to_lark
import numpy as np

from benchmarks.library.measure import Results, new_parser, percentiles
from runtime.base.config import ModelInfo
from runtime.base.types import CallboardError, GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.matching.vocabulary import BYTES, Vocabulary
from runtime.structured.pattern import (
    Alternation,
    CharacterClass,
    Concatenation,
    GrammarError,
    Pattern,
    Reference,
    Repetition,
)
from runtime.structured.readers.ebnf import START, read_ebnf
from runtime.text.tokenizer import Tokenizer

_MAX_BYTES = 400  # of a text


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=40, help="of each grammar, at most")
    parser.add_argument("grammars", type=Path, nargs="+")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)
    rows = -(-tokenizer.vocab_size // 64) * 64
    info = ModelInfo("", rows, 4096, tokenizer.eos_token_ids, 2, 16, "float32", "cpu")
    engine, bytes_engine = LazyEngine(Vocabulary.of(tokenizer, info)), LazyEngine(BYTES)
    results = Results("grammar_texts", args.out)
    for path in args.grammars:
        text = path.read_text("utf-8")
        texts = draw(read_ebnf(text), args.texts)
        for name, compile_ in (("callboard", by_callboard), ("llguidance", by_llguidance)):
            found: dict[str, Any] = {"what": name, "grammar": path.stem, "texts": len(texts)}
            try:
                start = time.perf_counter()
                lark = compile_(text)
                bytes_engine.matcher(lark)
                found["ms"] = (time.perf_counter() - start) * 1e3
                found["accepted"] = sum(fits(bytes_engine, lark, each) for each in texts)
                found |= masks(engine, lark, [tokenizer.encode(each, add_special_tokens=False) for each in texts])
            except (GrammarError, CallboardError) as e:
                found["refused"] = str(e)[:100]
            results.add(**found)


def by_callboard(text: str) -> str:
    return compiled(GrammarSpec("grammar", text)).lark


def by_llguidance(text: str) -> str:
    lark: str = llguidance.gbnf_to_lark.gbnf_to_lark(text)
    return '%llguidance {"no_forcing": true}\n' + lark.replace("%llguidance {}", "")


def fits(engine: LazyEngine, lark: str, text: str) -> bool:
    output = [*text.encode(), BYTES.eos_ids[0]]
    try:
        return engine.matcher(lark).allowed(output) == len(output)
    except CallboardError:
        return False


def masks(engine: LazyEngine, lark: str, outputs: list[list[int]]) -> dict[str, Any]:
    """Return the times of the masks along outputs, each up to the first token that is not allowed."""
    prototype, mask, seconds, at_limit = engine.matcher(lark), np.zeros(engine.vocabulary.num_words, np.int32), [], 0
    for output in outputs:
        matcher = prototype.copy()
        try:
            for token in output:
                start = time.perf_counter()
                matcher.fill(mask)
                seconds.append(time.perf_counter() - start)
                if matcher.allowed([token]):
                    matcher.advance([token])
        except CallboardError:
            at_limit += 1
    micro = {name: value * 1e3 for name, value in percentiles(seconds).items()}
    return {"us": {"mean": float(np.mean(seconds)) * 1e6, **micro}, "at_limit": at_limit}


def draw(rules: dict[str, Pattern], num: int) -> list[str]:
    """Return different texts of a grammar."""
    drawing = _Drawing(rules)
    texts = {drawing.draw(depth) for depth in (4, 8, 12, 16, 20, 30) for _ in range(num)}
    found = sorted(text for text in texts if len(text.encode()) <= _MAX_BYTES)
    return random.Random(0).sample(found, min(num, len(found)))


class _Drawing:
    def __init__(self, rules: dict[str, Pattern]) -> None:
        self._rules, self._random, self._left = rules, random.Random(0), 0
        self._heights = dict.fromkeys(rules, len(rules) + 1)  # nested references of a rule's flattest text
        for _ in rules:
            self._heights = {name: self._height(body) for name, body in rules.items()}

    def _height(self, pattern: Pattern) -> int:
        match pattern:
            case Reference(name):
                return 1 + self._heights[name]
            case Concatenation(parts):
                return max(map(self._height, parts), default=0)
            case Alternation(parts):
                return min(map(self._height, parts))
            case Repetition(part, least):
                return self._height(part) if least else 0
        return 0

    def draw(self, depth: int) -> str:
        self._left = _MAX_BYTES  # characters up to which rules are expanded at will
        return self.text(Reference(START), depth)

    def text(self, pattern: Pattern, depth: int) -> str:
        depth = depth if self._left > 0 else 0
        match pattern:
            case CharacterClass(ranges):
                self._left -= 1
                low, high = self._random.choice(ranges)
                return chr(self._random.randint(low, min(high, low + 94)))
            case Reference(name):
                return self.text(self._rules[name], depth - 1)
            case Concatenation(parts):
                return "".join([self.text(part, depth) for part in parts])
            case Alternation(parts):
                flat = [part for part in parts if self._height(part) <= depth] or [min(parts, key=self._height)]
                return self.text(self._random.choice(flat), depth)
            case Repetition(part, least, most):
                drawn = least + int(self._random.expovariate(0.5)) if self._height(part) <= depth else least
                return "".join([self.text(part, depth) for _ in range(drawn if most is None else min(drawn, most))])
        raise AssertionError(pattern)


if __name__ == "__main__":
    main()
