"""The parts of answers that several endpoints share."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from runtime.base.reports import PromptScores, TokenLogprobs, Verified, all_of
from runtime.output.processor import Delta
from runtime.text.tokenizer import Tokenizer

encode_json = msgspec.json.Encoder().encode
_PIECE = 256  # positions that are encoded at once: encoding holds Python's lock

_T = TypeVar("_T")


def listed(values: Sequence[_T], entry: Callable[[_T], Any]) -> list[Any] | msgspec.Raw:
    """Return the entry of each value as a list. A long list is JSON, encoded in pieces, which takes less memory."""
    if len(values) <= _PIECE:
        return [entry(value) for value in values]
    pieces = [encode_json([entry(v) for v in values[at : at + _PIECE]]) for at in range(0, len(values), _PIECE)]
    return msgspec.Raw(b"[" + b",".join(piece[1:-1] for piece in pieces) + b"]")


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON lacks infinity


def token_id_text(token_id: int) -> str:
    """Return a token in the form of vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def logprob_entry(tokenizer: Tokenizer | None, as_ids: bool | None, logprobs: TokenLogprobs) -> dict[str, Any]:
    """Return one position of OpenAI's log-probabilities for chats and responses; without a tokenizer, without text."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        if tokenizer is None:
            return {"token": token_id_text(token_id), "logprob": finite(logprob), "bytes": None}
        piece = tokenizer.token_bytes(token_id)
        text = token_id_text(token_id) if as_ids else piece.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(piece)}

    top = [entry(token_id, value) for token_id, value in logprobs.top]
    found = {**entry(logprobs.token_id, logprobs.logprob), "top_logprobs": top}
    if logprobs.sampling_logprob is not None:
        found["sampling_logprob"] = finite(logprobs.sampling_logprob)
    return found


def routed_experts(found: bytes, shape: tuple[int, int]) -> str:
    """Return vLLM's `routed_experts`: a .npy file with [num_tokens, layers, top_k] expert ids, as base64."""
    file = io.BytesIO()
    np.save(file, np.frombuffer(found, np.int16).reshape(-1, *shape))
    return base64.b64encode(file.getbuffer()).decode()


def num_scores(deltas: Iterable[Delta]) -> int:
    """Return the number of positions with log-probabilities."""
    return sum(len(delta.logprobs) + sum(map(len, all_of(delta.reports, PromptScores))) for delta in deltas)


@dataclass(slots=True)
class ChoiceUsage:
    """The tokens of one choice so far."""

    num_output: int = 0
    num_cached: int = 0  # cached prompt tokens
    num_draft_tokens: int = 0  # verified ones
    num_accepted: int = 0  # accepted draft tokens, which are output

    def add(self, delta: Delta) -> None:
        self.num_output += len(delta.token_ids)
        self.num_cached = max(self.num_cached, delta.num_cached)
        for verified in all_of(delta.reports, Verified):
            self.num_draft_tokens += verified.num_draft_tokens
            self.num_accepted += verified.num_accepted


def usage(
    num_prompt: int, num_cached: int, details: dict[str, int], choices: Sequence[ChoiceUsage], speculates: bool
) -> dict[str, Any]:
    """Return OpenAI's usage object. `details` count prompt tokens, too; zeros are left out.

    Only servers with a draft report details of the completion.
    completion_tokens include accepted predictions but not rejected ones."""
    num_output = sum(choice.num_output for choice in choices)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached} | {name: n for name, n in details.items() if n},
    }
    if speculates:
        num_accepted = sum(choice.num_accepted for choice in choices)
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(choice.num_draft_tokens for choice in choices) - num_accepted,
        }
    return counts


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, num_top: int
) -> list[Any] | msgspec.Raw:
    """Return vLLM's `prompt_logprobs`: an entry for each prompt token after the first, and its `num_top` best ones.

    Without a tokenizer the entries lack the text of their tokens."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        decoded = None if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": decoded}

    def position(lp: TokenLogprobs | None) -> dict[str, Any] | None:
        if lp is None:  # the first token lacks scores
            return None
        top = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(lp.top[:num_top], start=1)}
        return top | {str(lp.token_id): entry(lp.token_id, lp.logprob, lp.rank)}

    return listed([None, *logprobs], position)
