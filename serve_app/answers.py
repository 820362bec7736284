"""OpenAI's response objects, made of what the engine and the detokenizer give."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from runtime.core.types import TokenLogprobs
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import CallDelta


@dataclass(slots=True)
class Reply:
    """What a chat choice says beside its content."""

    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, new: Reply) -> None:
        self.reasoning += new.reasoning
        for call in new.calls:
            if call.name:
                self.calls.append(replace(call))
            else:
                self.calls[-1].arguments += call.arguments

    def fields(self) -> dict[str, Any]:
        """The fields of an OpenAI message; `reasoning_content` is vLLM's."""
        calls = [{"id": c.id, "type": "function", "function": _function(c)} for c in self.calls]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return reasoning | ({"tool_calls": calls} if calls else {})

    def delta_fields(self) -> dict[str, Any]:
        """The fields of an OpenAI delta; there may be several pieces of one call."""
        pieces = [
            {"index": c.index, "id": c.id, "type": "function", "function": _function(c)}
            if c.name
            else {"index": c.index, "function": {"arguments": c.arguments}}
            for c in self.calls
        ]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return reasoning | ({"tool_calls": pieces} if pieces else {})


def _function(call: CallDelta) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


@dataclass(slots=True)
class Delta:
    """What is new of one choice: the unit of streaming, and the sum of a plain response's choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    num_cached: int = 0  # prompt tokens served from the prefix cache
    reply: Reply | None = None  # if the text was read for reasoning or tool calls and has some

    def add(self, new: Delta) -> None:
        self.text += new.text
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs
        self.finish_reason = new.finish_reason
        self.num_cached = max(self.num_cached, new.num_cached)
        if new.reply is not None:
            self.reply = self.reply or Reply()
            self.reply.add(new.reply)


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": min(num_cached, num_prompt)},  # n choices may each hit the cache
    }


def chat_logprobs(logprobs: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.token_bytes(token_id)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    content = [
        {**entry(lp.token_id, lp.logprob), "top_logprobs": [entry(i, value) for i, value in lp.top]} for lp in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: list[TokenLogprobs], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """The `logprobs` object of a completion choice whose first token here stands at character `offset` of the text."""
    tokens = [_token_text(lp.token_id, tokenizer) for lp in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(lp.logprob) for lp in logprobs],
        "top_logprobs": [
            # The sampled token is always among them, as with OpenAI's.
            {_token_text(i, tokenizer): _finite(value) for i, value in (*lp.top, (lp.token_id, lp.logprob))}
            for lp in logprobs
        ],
        "text_offset": offsets,
    }


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as a text of its own; one that is only a part of a character shows its bytes, as OpenAI's do."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity
