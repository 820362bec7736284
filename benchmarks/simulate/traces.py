"""Requests for the simulator: the public traces of Mooncake and Azure, and generators with published statistics.

A workload is a list of conversations in the order of their starts. The input of a person or a tool in a turn is a part:
a key, which represents its tokens, and a length. Equal keys are equal texts. So prompts share prefixes where they
would.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import accumulate, count
from math import exp, log, sqrt
from pathlib import Path
from random import Random

import numpy as np

_TEXT = array("i", np.random.default_rng(0).integers(2, 1 << 17, 1 << 19).astype(np.int32).tobytes())  # of all parts
_LONGEST_PART = 1 << 18
_MOST_TOKENS = 4096  # limit of an answer in a request; 0 and 1 are the tokens of answers (engine.py)


@dataclass(slots=True)
class Part:
    """Tokens of a prompt: the first `length` of the text of `key`."""

    key: int
    length: int

    def tokens(self) -> array[int]:
        """Equal keys give equal tokens; different keys differ in their first two tokens."""
        at = self.key * 7919 % (len(_TEXT) - _LONGEST_PART)
        tokens = _TEXT[at : at + self.length]
        head = array("i", (2 + self.key % 100_003, 2 + self.key // 100_003 % 100_003))
        tokens[: min(2, self.length)] = head[: self.length]
        return tokens


@dataclass(slots=True)
class Turn:
    """The new parts of a prompt, the length of its answer, and the seconds between the last answer and it."""

    parts: list[Part]
    output_len: int
    pause_s: float = 0.0


@dataclass(slots=True, eq=False)
class Conversation:
    """Turns that follow one another; each prompt contains everything before it. `salt` separates tenants."""

    start: float
    turns: list[Turn]
    salt: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))  # so far, the last answer included
    num_sent: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks of `tokens`

    @property
    def shared_key(self) -> int | None:
        """The key of the part with which other conversations begin, too, or None."""
        parts = self.turns[0].parts if self.turns else []
        return parts[0].key if len(parts) > 1 else None

    def next_job(self, number: int, sent: float) -> Job | None:
        """The next turn's request; None after the last one."""
        if self.num_sent == len(self.turns):
            return None
        turn = self.turns[self.num_sent]
        self.num_sent += 1
        for part in turn.parts:
            self.tokens += part.tokens()
        max_tokens = max(_MOST_TOKENS, turn.output_len)
        return Job(number, self, self.tokens[:], len(self.tokens), turn.output_len, max_tokens, self.salt, sent)

    def answered(self, job: Job, answer: array[int], block_hashes: list[bytes]) -> float | None:
        """Record the job's answer, and the hashes of full blocks of prompt and answer. Returns the pause until the next
        turn, or None after the last one."""
        if self.num_sent == len(self.turns):
            self.tokens, self.block_hashes = array("i"), []  # no later turn needs them
            job.prompt = array("i")
            return None
        self.tokens += answer
        self.block_hashes = block_hashes
        job.prompt = array("i")
        return self.turns[self.num_sent].pause_s


@dataclass(slots=True)
class Job:
    """One request and its outcome; times are seconds of the simulation."""

    number: int
    conversation: Conversation
    prompt: array[int]
    prompt_len: int
    output_len: int
    max_tokens: int
    salt: str
    sent: float
    first_at: float | None = None  # when when its first token left the engine
    last_at: float = 0.0
    num_cached: int = 0
    num_expected: int = 0  # cached tokens that the router expected
    num_moves: int = 0


# ---- public traces ---------------------------------------------------------------------------------------------------

_MOONCAKE_BLOCK = 512


def mooncake(path: Path) -> list[Conversation]:
    """Lines of {"timestamp": ms, "input_length", "output_length", "hash_ids"}, one id for 512 tokens of a prompt."""
    found = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        length, ids = int(entry["input_length"]), entry["hash_ids"]
        sizes = [min(_MOONCAKE_BLOCK, length - i * _MOONCAKE_BLOCK) for i in range(len(ids))]
        parts = [Part(1 + key, size) for key, size in zip(ids, sizes, strict=True) if size > 0]
        found.append(Conversation(entry["timestamp"] / 1e3, [Turn(parts, max(1, int(entry["output_length"])))]))
    return sorted(found, key=lambda c: c.start)


def azure(path: Path) -> list[Conversation]:
    """Rows of TIMESTAMP, ContextTokens, GeneratedTokens. Shared parts of prompts are unknown, so prompts share
    nothing."""
    found: list[Conversation] = []
    with path.open(newline="") as file:
        for key, row in enumerate(csv.DictReader(file), start=1):
            whole, _, fraction = row["TIMESTAMP"].rstrip("Z").partition(".")
            at = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction[:6] or 0}")
            turn = Turn([Part(key, max(1, int(row["ContextTokens"])))], max(1, int(row["GeneratedTokens"])))
            found.append(Conversation(at, [turn]))
    found.sort(key=lambda c: c.start)
    first = found[0].start if found else 0.0
    for conversation in found:
        conversation.start -= first
    return found


# ---- generated -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Log-normal with this median and mean, within bounds: few are long, as in all published traces."""

    median: int
    mean: int
    least: int = 1
    most: int = 8192

    @cached_property
    def _log(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        return log(self.median), sqrt(2 * max(0.0, log(self.mean / self.median)))

    def draw(self, rng: Random) -> int:
        return round(min(max(exp(rng.gauss(*self._log)), self.least), self.most))


@dataclass(frozen=True)
class Sessions:
    """Conversations of several turns that begin with one of `num_prefixes` shared system prompts, of unequal popularity
    (Zipf) where `skew` is above 0."""

    num_prefixes: int
    prefix_len: int
    news: Lengths  # lengths of each turn's input
    answers: Lengths
    turns: tuple[int, int] = (1, 1)
    pauses_s: tuple[float, float] = (0.0, 0.0)
    skew: float = 0.0
    num_questions: int = 0  # for each prefix; first turns take one of them. 0 gives each its own

    def generate(self, rates: Iterable[tuple[float, float]], seed: int = 0) -> Iterator[Conversation]:
        """Starts are Poisson with (seconds, conversations a second) one after another."""
        rng, keys, begin = Random(seed), count(1 + self.num_prefixes), 0.0
        numbers = range(1, 1 + self.num_prefixes)
        weights = list(accumulate(number**-self.skew for number in numbers))
        for seconds, rate in rates:
            at, begin = begin, begin + seconds
            while rate and (at := at + rng.expovariate(rate)) < begin:
                (prefix,) = rng.choices(numbers, cum_weights=weights)
                turns = []
                for i in range(rng.randint(*self.turns)):
                    key, length = next(keys), self.news.draw(rng)
                    if i == 0 and self.num_questions:
                        key, length = -prefix * self.num_questions - rng.randrange(self.num_questions), self.news.mean
                    parts = [Part(key, length)]
                    if i == 0 and self.prefix_len:
                        parts.insert(0, Part(prefix, self.prefix_len))
                    turns.append(Turn(parts, self.answers.draw(rng), rng.uniform(*self.pauses_s) if i else 0.0))
                yield Conversation(at, turns)


GENERATED = {
    # llm-d's benchmark of routing: 150 instructions of 6,000 tokens with 5 questions of 1,200 each, answers of 1,000.
    "shared-prefix": Sessions(150, 6000, Lengths(1200, 1200), Lengths(1000, 1000), num_questions=5),
    "assistants": Sessions(300, 6000, Lengths(200, 300), Lengths(200, 300), turns=(1, 5), pauses_s=(2.0, 20.0)),
    "chat": Sessions(
        2000, 400, Lengths(120, 250), Lengths(129, 160), turns=(1, 3), pauses_s=(2.0, 20.0), skew=0.8
    ),
}  # fmt: skip
