"""The parts of OpenAI's response objects that several endpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from runtime.core.types import TokenLogprobs, Verified
from runtime.output.processor import Delta
from runtime.text.tokenizer import Tokenizer

encode_json = msgspec.json.Encoder().encode
_PIECE = 256  # positions that are encoded at once: encoding holds Python's lock

_T = TypeVar("_T")


def listed(values: Sequence[_T], entry: Callable[[_T], Any]) -> list[Any] | msgspec.Raw:
    """The entry of each value as a list; a long one as JSON, encoded in pieces, which also takes less memory."""
    if len(values) <= _PIECE:
        return [entry(value) for value in values]
    pieces = [encode_json([entry(v) for v in values[at : at + _PIECE]]) for at in range(0, len(values), _PIECE)]
    return msgspec.Raw(b"[" + b",".join(piece[1:-1] for piece in pieces) + b"]")


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity


def num_scores(deltas: Iterable[Delta]) -> int:
    """Positions with log-probabilities."""
    return sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas)


@dataclass(slots=True)
class Guesses:
    """Counts of a draft's guesses at some choices, and of those that became output."""

    num_guessed: int = 0
    num_accepted: int = 0

    def add(self, verified: Iterable[Verified]) -> None:
        for guesses in verified:
            self.num_guessed += guesses.num_guessed
            self.num_accepted += guesses.num_accepted


def usage(num_prompt: int, num_output: int, num_cached: int, guesses: Guesses | None) -> dict[str, Any]:
    """OpenAI's usage object. Without a draft (None) it has no details of the completion: zeros would look like one that
    guesses badly. Accepted predictions are a part of completion_tokens, rejected ones are not."""
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if guesses is not None:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": guesses.num_accepted,
            "rejected_prediction_tokens": guesses.num_guessed - guesses.num_accepted,
        }
    return counts


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int) -> list[Any] | msgspec.Raw:
    """vLLM's `prompt_logprobs`: for each prompt token, the first excepted, its own and the `num_top` best entries."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        decoded = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": decoded}

    def position(lp: TokenLogprobs | None) -> dict[str, Any] | None:
        if lp is None:  # of the first
            return None
        top = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(lp.top[:num_top], start=1)}
        return top | {str(lp.token_id): entry(lp.token_id, lp.logprob, lp.rank)}

    return listed([None, *logprobs], position)
