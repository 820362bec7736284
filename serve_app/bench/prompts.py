"""Random prompts with a given number of tokens, made from words that are one token each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serve_app.bench.images import RandomImages

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea kid body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy process music market sense nation plan college interest death experience
effect use class control field development role effort rate heart drug show leader light voice wife police mind price
"""
WORDS = _COMMON.split()
_FEWEST = 32  # words that prompts are made of, so that no two prompts begin alike

Count = Callable[[str], int | None]


@dataclass(slots=True)
class RandomPrompts:
    """Prompts with `length` words after a prefix that all share."""

    words: list[str]
    prefix: list[str]
    length: int
    images: RandomImages | None = None  # before each prompt

    def draw(self, rng: np.random.Generator) -> str:
        return " ".join([*self.prefix, *_draw(self.words, self.length, rng)])


def prompts_of(length: int, shared: int, count: Count, rng: np.random.Generator) -> tuple[RandomPrompts, bool]:
    """Prompts with `length` tokens after `shared` common ones, and whether a tokenizer has counted them.

    `count` returns a text's tokens, or None without a tokenizer: then a word is taken for a token."""
    words = single_tokens(WORDS, count)
    is_counted = len(words) >= _FEWEST
    if not is_counted:
        words = WORDS
    prompts = RandomPrompts(words, _draw(words, shared, rng), length)
    if is_counted and (total := count(prompts.draw(rng))) is not None:
        prompts.length = max(1, length - (total - length - shared))  # minus a token that begins each prompt
    return prompts, is_counted


def single_tokens(words: list[str], count: Count) -> list[str]:
    """The words that are one token each, at the start of a text and after a space; none without a tokenizer."""
    one, two = count("time"), count("time time")
    if one is None or two is None:
        return []
    extra = 2 * one - two  # tokens that the tokenizer adds to each text
    return _single_tokens(words, lambda text: (count(text) or 0) - extra)


def _single_tokens(words: list[str], count: Callable[[str], int]) -> list[str]:
    """Halves the list until a part has as many tokens as words."""
    if count(" ".join(words)) == len(words):
        return words
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return _single_tokens(words[:middle], count) + _single_tokens(words[middle:], count)


def _draw(words: list[str], length: int, rng: np.random.Generator) -> list[str]:
    return [words[i] for i in rng.integers(0, len(words), length)]
