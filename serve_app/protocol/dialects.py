"""Each API's limits and words.

All APIs' requests are checked as chats or completions, and errors name a chat's fields. A dialect has the limits that
an API documents, and its own names for these fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from runtime.base.sampling_fields import Effect, table_of
from runtime.base.types import SamplingParams
from serve_app.protocol.field_names import FieldNames

_CONTEXT = "This model's maximum context length is {limit} tokens, but {where} has {prompt} tokens{parts}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API. A limit is None where its documentation has none; then only the limits of engine and settings
    hold."""

    tool_names: re.Pattern[str] | None = None
    max_tools: int | None = None
    max_penalty: float | None = None  # for frequency and presence, on both sides of 0
    names: FieldNames = field(default_factory=FieldNames)
    # errors for too long a prompt, and for output that does not fit after it; programs match their words
    context_exceeded: tuple[str, str] = (
        f"{_CONTEXT} and at least one token of output must fit too; shorten {{where}}.",
        f"{_CONTEXT} and {{output}} tokens of output must fit too; shorten {{where}} or lower {{field}}.",
    )


# metadata in OpenAI's responses and batches
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


def _of_route(route: str, *fields: str) -> dict[str, str]:
    return {f"send {name}": f"send {name} to {route}" for name in fields}


_CHAT = "/v1/chat/completions"
LLAMA_CPP_ROUTES = (
    "/completion", "/completions", "/infill", "/props", "/slots", "/apply-template", "/embedding", "/embeddings",
)  # fmt: skip
_UP_TO_128 = re.compile("[a-zA-Z0-9_-]{1,128}")
_SCHEMA = "response_format.json_schema.schema"
_SCORES = "logprobs", "prompt_logprobs", "return_token_ids", "routed_experts"


def _formats(native: str, schema: str) -> dict[str, str]:
    return {"response_format": native, _SCHEMA: schema, "response_format.schema": schema}


DRAWING = table_of(SamplingParams).names(Effect.DRAW, Effect.FILTER)
_SAMPLING = "seed", "stop", *DRAWING, "presence_penalty", "frequency_penalty"
_OLLAMA_PATHS: Sequence[tuple[str, str]] = (
    (rf"^({'|'.join(_SAMPLING)})\b", r"options.\1"),
    (r"^max_tokens\b", "options.num_predict"),
    (r"^repetition_penalty\b", "options.repeat_penalty"),
    (r"^response_format(\.json_schema\.schema)?\b", "format"),
    (r"^reasoning_effort\b", "think"),
    (r"^(messages\.\d+)\.reasoning_content\b", r"\1.thinking"),
    (r"^(messages\.\d+)\.content\.(\d+)(\.type)?(?=[ :]|$)", r"\1.images.\2"),
)
_OLLAMA_WORDS: Mapping[str, str] = {
    **_of_route(_CHAT, "n", "prompt_logprobs", "return_token_ids", "routed_experts", "thinking_token_budget"),
    **_formats("format", "format"),
    **{name: f"options.{name}" for name in _SAMPLING[2:]},
    **{f"send {name}": f"send options.{name}" for name in _SAMPLING[:2]},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "read usage.prompt_tokens_details": "leave it out",
}

_COMPLETION_WORDS: Mapping[str, str] = {
    "messages or prompt": "prompt",
    "send a message of the role system": "send it within prompt",
    "conversation as messages": "conversation as prompt",
    "use tools, tool_choice and tool_calls instead of OpenAI's old fields": f"send tools to {_CHAT}",
    "send what the model's template knows, such as chat_template_kwargs.enable_thinking": f"send it to {_CHAT}",
    **_of_route(_CHAT, "thinking_token_budget", "chat_template_kwargs.enable_thinking"),
    "send chat_template_kwargs.documents": f"send chat_template_kwargs.documents to {_CHAT}",
}

COMPLETIONS = Dialect(max_penalty=2.0, names=FieldNames(words=_COMPLETION_WORDS))
LLAMA_CPP = Dialect(
    names=FieldNames(
        (r"^max_tokens\b", "n_predict"),
        (r"^n\b", "n_cmpl"),
        (r"^logprobs\b", "n_probs"),
        (r"^repetition_penalty\b", "repeat_penalty"),
        (r"^response_format(\.json_schema\.schema)?\b", "json_schema"),
        words={
            **_COMPLETION_WORDS,
            **_formats("json_schema", "json_schema"),
            "max_tokens": "n_predict",
            "send n": "send n_cmpl",
            "send logprobs": "send n_probs",
            "repetition_penalty": "repeat_penalty",
        },
    )
)
CHAT = Dialect(
    tool_names=re.compile("[a-zA-Z0-9_-]{1,64}"),
    max_tools=128,
    max_penalty=2.0,
    names=FieldNames(words={"messages or prompt": "messages"}),
)
RESPONSES = Dialect(
    tool_names=_UP_TO_128,
    names=FieldNames(
        (r"^messages\b", "input"),
        (r"^reasoning_effort\b(?=.* is |$)", "reasoning.effort"),
        (r"^response_format(\.json_schema)?\b", "text.format"),
        (r"^(tools\.\d+|tool_choice)\.(?:function|custom)\b", r"\1"),
        words={
            **_of_route(_CHAT, "n", "prompt_logprobs", "return_token_ids", "routed_experts", "thinking_token_budget"),
            **_formats("text.format", "text.format.schema"),
            "send logprobs": "send include and top_logprobs",
            "max_tokens": "max_output_tokens",
            "messages or prompt": "input",
            "a message of the role system": "instructions",
            "conversation as messages": "conversation as input, or previous_response_id",
            "tools, tool_choice and tool_calls": "tools and tool_choice",
            "usage.prompt_tokens_details": "usage.input_tokens_details",
        },
    ),
)
MESSAGES = Dialect(
    tool_names=_UP_TO_128,
    context_exceeded=(
        "prompt is too long: {prompt} tokens > {limit} maximum{parts}; shorten the conversation.",
        "input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
        "decrease input length{parts} or `max_tokens` and try again.",
    ),
    names=FieldNames(
        (r"^(tools\.\d+)\.function\.parameters\b", r"\1.input_schema"),
        (r"^(tools\.\d+)\.function\.", r"\1."),
        (r"^tool_choice\.function\.", "tool_choice."),
        (r"^response_format(\.json_schema\.schema)?\b", "output_config.format.schema"),
        (r"^stop\b", "stop_sequences"),
        words={
            **_of_route(_CHAT, "n", *_SCORES),
            **_formats("output_config.format", "output_config.format.schema"),
            "send stop": "send stop_sequences",
            "thinking_token_budget": "thinking.budget_tokens",
            "messages or prompt": "messages",
            "a message of the role system": "system",
            "tools, tool_choice and tool_calls": "tools and tool_choice",
            "tool_choice is required": "tool_choice is any",
            "of the type function or custom": "of the type custom, with an input_schema",
            "usage.prompt_tokens_details": "usage.cache_read_input_tokens",
        },
    ),
)
OLLAMA_CHAT = Dialect(names=FieldNames(*_OLLAMA_PATHS, words={**_OLLAMA_WORDS, "messages or prompt": "messages"}))
OLLAMA_GENERATE = Dialect(
    names=FieldNames(
        *_OLLAMA_PATHS,
        (r"^messages\.\d+\.(?=images\.)", ""),
        (r"^messages(\.\d+(\.content)?)?", "prompt"),
        words={
            **_OLLAMA_WORDS,
            "messages or prompt": "prompt",
            "a message of the role system": "system",
            "conversation as messages": "conversation to /api/chat",
            "use tools, tool_choice and tool_calls instead of OpenAI's old fields": "send tools to /api/chat",
        },
    )
)
_BY_PATH = {
    "/v1/completions": COMPLETIONS,
    _CHAT: CHAT,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
    **dict.fromkeys(LLAMA_CPP_ROUTES[:3], LLAMA_CPP),
}
_OTHER = Dialect()


def dialect_of(path: str) -> Dialect:
    """Return the API of a route."""
    return _BY_PATH.get(path, _OTHER)
