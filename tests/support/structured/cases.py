"""Helpers of the tests of structured output."""

from runtime.base.types import CallboardError, Grammar, GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.matching.lazy import LazyEngine
from runtime.text.vocabulary import BYTES

BYTE_ENGINE = LazyEngine(BYTES)


def fits(grammar: Grammar, text: str) -> bool:
    """Whether an output may be just this, token by token, with a token for each byte."""
    matcher = BYTE_ENGINE.matcher(grammar.lark)
    try:
        matcher.advance(list(text.encode()))
    except CallboardError:
        return False
    return matcher.is_accepting


def regex(pattern: str) -> Grammar:
    return compiled(GrammarSpec("regex", pattern))
