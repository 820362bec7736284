"""Grammars over tokenizers of both kinds: bytes as characters (GPT-2's table), and bytes as tokens of their own."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from runtime.base.model_info import ModelInfo
from runtime.base.types import Grammar, GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.matching.automaton import EagerMatcher, build
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.matching.matcher import Matcher
from runtime.structured.pattern import GrammarError
from runtime.text.tokenizer import Tokenizer
from runtime.text.vocabulary import Vocabulary
from tests.support.structured.corpus import CASES

INFO = ModelInfo("f", 320, 4096, (1, 2), 9, 16, "float32", "cpu")


def json_grammar(schema: object) -> Grammar:
    return compiled(GrammarSpec("json", json.dumps(schema)))


def allowed(matcher: Matcher, num_words: int) -> set[int]:
    mask = np.full(num_words, -1, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    words = [
        "<s>",
        "</s>",
        "<end>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        '{"',
        '":',
        '▁"',
        "a",
        "é",
        "▁a",
        "}",
        '"',
    ]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<s>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<end>")])
    return Tokenizer(backend, bos_token_id=0, eos_token_ids=(1, 2), special_tokens={}, chat_template=None)


@pytest.mark.parametrize("engine", ["lazy", "eager"])
def test_bytes_as_tokens_of_their_own(byte_fallback: Tokenizer, engine: str):
    vocabulary = Vocabulary.of(byte_fallback, INFO)
    assert len(vocabulary.tokens) == INFO.vocab_size
    assert [vocabulary.tokens[i] for i in (0, 1, 2, 319)] == [b""] * 4
    grammar = json_grammar(
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1}}, "required": ["a"]}
    )
    matcher: Matcher = (
        LazyEngine(vocabulary).matcher(grammar.lark)
        if engine == "lazy"
        else EagerMatcher(build(grammar.expression, vocabulary))
    )
    token = byte_fallback.token_to_id

    def now() -> set[int]:
        return allowed(matcher, vocabulary.num_words)

    assert now() == {token('{"'), token("<0x7B>")}
    matcher.advance([token('{"'), token("a"), token('":')])
    opening = {
        token("▁"),
        token("<0x20>"),
        token('▁"'),
        token('"'),
        token("<0x22>"),
        token('":'),
    }  # the last: with a ":"
    assert now() == opening
    matcher.advance([token('▁"')])
    assert token("▁a") not in now()  # two characters
    assert {token("é"), token("<0xC3>"), token("<0xF0>")} <= now()
    assert not now() & {token("<0x80>"), token("<0xC0>"), token("<0xFF>"), token("<0x0A>"), 0, 1, 2}
    matcher.advance([token("<0xC3>")])
    assert now() == {token(f"<0x{b:02X}>") for b in range(0x80, 0xC0)}
    matcher.advance([token("<0xA9>"), token('"'), token("}")])
    spaces = {i for i, text in enumerate(vocabulary.tokens) if text and not text.strip(b"\t\n\r ")}
    assert now() == {1, 2, *spaces}  # both EOS ids, no padding


@pytest.mark.rotated
def test_a_real_vocabulary(smollm2_path: Path):
    """Valid instances as the model's tokenizer cuts them; both engines' masks at each token; no padding."""
    tokenizer = Tokenizer.load(smollm2_path)
    info = replace(INFO, vocab_size=tokenizer.vocab_size + 100, eos_token_ids=(*tokenizer.eos_token_ids, 0))
    vocabulary = Vocabulary.of(tokenizer, info)
    engine, num_eager = LazyEngine(vocabulary), 0
    never = {i for i, token in enumerate(vocabulary.tokens) if not token} - set(info.eos_token_ids)
    assert len(never) > 100
    for at, (schema, valid, _) in enumerate(CASES):
        grammar = json_grammar(schema)
        automaton = None
        if at % 4 == 0 and 0 < len(grammar.expression) < 400:
            try:
                automaton = build(grammar.expression, vocabulary)
                num_eager += 1
            except GrammarError:
                pass
        for value in valid:
            lazy = engine.matcher(grammar.lark)
            eager = None if automaton is None else EagerMatcher(automaton)
            for token in [*tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False), 0]:
                ids = allowed(lazy, vocabulary.num_words)
                assert token in ids, (schema, value)
                assert not ids & never
                assert eager is None or allowed(eager, vocabulary.num_words) == ids
                lazy.advance([token])
                if eager is not None:
                    eager.advance([token])
    assert num_eager > 10
