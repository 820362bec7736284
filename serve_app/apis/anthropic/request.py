"""The requests of /v1/messages and /v1/messages/count_tokens, and their translation to chats.

The chat's model checks the values."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from runtime.output.fields import FieldError, invalid, read_options, shown
from runtime.output.options import TTL_SECONDS, CacheControl
from runtime.output.tools import HostedTool, OrHosted
from serve_app.apis.chat.messages import ImagePart, OtherPart, check_new_parts, unread
from serve_app.apis.chat.request import ChatRequest
from serve_app.protocol.dialects import MESSAGES
from serve_app.protocol.errors import NO_THREADS, ApiError
from serve_app.protocol.sampling import MAX_SESSION_CHARS
from serve_app.protocol.shapes import (
    CacheBreakpoint,
    CacheOptions,
    MarkedModel,
    RequestModel,
    TextOrList,
    cache_marks,
    check_absent,
    text_or_list_of,
    type_of,
)

_MAX_MARKS = 4  # cache breakpoints that this API allows

# ---- content ---------------------------------------------------------------------------------------------------------


class TextBlock(MarkedModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer; the template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(RequestModel):
    """Reasoning that only another server can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(MarkedModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _tag_of(value: Any) -> str | None:
    kind = type_of(value)
    return f"<{kind}>" if isinstance(kind, str) else None


_ONLY_TEXT: Any = Discriminator(
    lambda value: "<text>" if _tag_of(value) == "<text>" else None,
    custom_error_type="block_kind",
    custom_error_message="only blocks of the type text are supported here; images and documents are not",
)
_TextBlocks = Annotated[list[Annotated[Annotated[TextBlock, Tag("<text>")], _ONLY_TEXT]], Field(fail_fast=True)]
_CONTENT_SHAPE: Any = text_or_list_of("blocks")
_Text = Annotated[TextOrList[str, _TextBlocks], _CONTENT_SHAPE]


_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")] | Annotated[OtherPart, Tag("<other>")],
    Discriminator(lambda value: f"<{kind}>" if (kind := type_of(value, "text")) in ("text", "image") else "<other>"),
]
_Result = Annotated[TextOrList[str, Annotated[list[_ResultBlock], Field(fail_fast=True)]], _CONTENT_SHAPE]


class ToolResultBlock(MarkedModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Result | None = None
    is_error: bool | None = None

    def parts(self) -> list[Any]:
        content = self.content or ""
        parts = [_text_part(content)] if isinstance(content, str) else [_part(block) for block in content]
        if self.is_error:
            first = parts[0]["text"] if isinstance(parts[0], dict) else ""
            parts[: bool(first)] = [_text_part(f"Error: {first}")]
        return parts


_BLOCK_KINDS = "text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"


def _kind_of_block(value: Any) -> str | None:
    kind = _tag_of(value)
    return kind if kind is None or kind[1:-1] in _BLOCK_KINDS else "<other>"


_Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[OtherPart, Tag("<other>")],
    Discriminator(
        _kind_of_block,
        custom_error_type="block_kind",
        custom_error_message="a block should have a type, such as text, tool_use or tool_result",
    ),
]
_Content = Annotated[TextOrList[str, Annotated[list[_Block], Field(fail_fast=True)]], _CONTENT_SHAPE]
_KINDS_OF_ROLE: dict[str, tuple[type[RequestModel], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock, OtherPart),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, OtherPart),
}


class Message(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: _Content

    def check_at(self, where: str) -> None:
        """Rules between fields; raises FieldError."""
        if isinstance(self.content, list):
            for i, block in enumerate(self.content):
                if not isinstance(block, _KINDS_OF_ROLE[self.role]):
                    raise invalid(f"{where}.content.{i}", f"is a {block.type}, which no message of {self.role!r} has")

    def turn(self) -> tuple[str, Any]:
        """Return the role and the content, with the role of a tool for results."""
        has_results = any(isinstance(block, ToolResultBlock) for block in self.content)
        return "tool" if has_results else self.role, self.content

    def as_chat(self) -> list[dict[str, Any]]:
        """Return chat messages: one for an answer, and one for each tool result or user text."""
        if isinstance(self.content, str) or self.role == "system":
            return [{"role": self.role, "content": _parts(self.content)}]
        if self.role == "assistant":
            return [_answer(self.content)]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.parts()})
            elif isinstance(block, TextBlock | OtherPart):
                messages.append({"role": "user", "content": [_part(block)]})
        return messages


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _part(block: TextBlock | OtherPart) -> Any:
    """Return a block as a part of a chat's message: a picture as it is, others as texts."""
    return block if isinstance(block, ImagePart) else _text_part(block.text)


def _parts(content: str | list[Any]) -> list[dict[str, str]]:
    """Return text as the parts of a chat's message. What Anthropic's own tools wrote is left out."""
    texts = [content] if isinstance(content, str) else [text for b in content if (text := _written(b)) is not None]
    return [_text_part(text) for text in texts]


def _written(block: Any) -> str | None:
    return block.readable if isinstance(block, OtherPart) else block.text if isinstance(block, TextBlock) else None


def _answer(blocks: list[Any]) -> dict[str, Any]:
    calls = [
        {"id": b.id, "function": {"name": b.name, "arguments": json.dumps(b.input, ensure_ascii=False)}}
        for b in blocks
        if isinstance(b, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return {"role": "assistant", "content": _parts(blocks), "tool_calls": calls, "reasoning_content": thoughts}


# ---- requests --------------------------------------------------------------------------------------------------------


class MessageTool(MarkedModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        strictness = {} if self.strict is None else {"strict": self.strict}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None} | strictness}


class MessageToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def as_chat(self) -> dict[str, Any]:
        choice: Any = "required" if self.type == "any" else self.type
        if self.type == "tool":
            if self.name is None:
                raise invalid("tool_choice.name", "is missing; it is the name of the tool to use")
            choice = {"type": "function", "function": {"name": self.name}}
        return {"tool_choice": choice, "parallel_tool_calls": False if self.disable_parallel_tool_use else None}


class Thinking(RequestModel):
    """Whether the model reasons, if its template has a switch for it. Reasoning counts as output."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def as_chat(self) -> dict[str, Any]:
        thinks = self.type == "enabled"
        fields: dict[str, Any] = {"include_reasoning": self.type != "disabled" and self.display != "omitted"}
        if self.type != "adaptive":  # model families have two names for the switch
            fields["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            fields["thinking_token_budget"] = self.budget_tokens
        return fields


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(RequestModel):
    user_id: str | None = None


# Chat fields that have another name in Anthropic's requests, or no place in Anthropic's answers.
_FIELDS_OF_CHATS = """
    n stop logprobs top_logprobs prompt_logprobs sampling_logprobs logprob_token_ids return_token_ids detokenize
    routed_experts return_prompt_token_ids return_tokens_as_token_ids stream_options response_format
    include_reasoning max_completion_tokens parallel_tool_calls continue_final_message add_generation_prompt
    thinking_token_budget"""
FIELDS_OF_CHATS = frozenset(_FIELDS_OF_CHATS.split())


class MessagesChat(ChatRequest):
    """The chat that an Anthropic client requests."""

    dialect = MESSAGES

    def ignored_fields(self) -> list[str]:
        keeps_all = _keeps_all((self.model_extra or {}).get("context_management"))
        return [name for name in super().ignored_fields() if name != "context_management" or not keeps_all]


def _keeps_all(context_management: Any) -> bool:
    """Return whether edits of the context clear nothing."""
    match context_management:
        case {"edits": [*edits]}:
            kept = [edit.get("keep") for edit in edits if isinstance(edit, dict) and "keep" in edit]
            return len(kept) == len(edits) and all(keep in ("all", {"type": "all"}) for keep in kept)
    return False


class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens. Sampling fields are ignored."""

    model_config = ConfigDict(extra="allow")  # the chat reads, refuses or reports the other fields

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: _Text | None = None
    tools: Annotated[list[OrHosted[MessageTool, MessageTool]], Field(fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # older name for output_config.format
    cache_control: CacheControl | None = None  # marks the whole prompt

    def check(self) -> None:
        if (self.model_extra or {}).get("thread") is not None:  # the SDK then goes on without threads
            text = "thread is not supported: this server keeps no messages; send the whole conversation as messages."
            raise ApiError(400, text, param="thread", code=NO_THREADS)
        for i, message in enumerate(self.messages):
            message.check_at(f"messages.{i}")
        self._check_results()
        if (num_marks := len(self._marks)) > _MAX_MARKS:
            raise invalid("cache_control", f"marks {num_marks} blocks; send it with at most {_MAX_MARKS}")
        check_new_parts("messages", [message.turn() for message in self.messages])
        last = self.messages[-1].content
        if isinstance(last, list) and any(isinstance(block, ToolUseBlock) for block in last):
            raise invalid(f"messages.{len(self.messages) - 1}", "is a tool_use without its tool_result after it")

    @cached_property
    def _marks(self) -> list[CacheControl | CacheBreakpoint]:
        """The cache breakpoints."""
        marked = [self.tools, self.system, *(message.content for message in self.messages)]
        return [*cache_marks(marked), *([] if self.cache_control is None else [self.cache_control])]

    def _check_results(self) -> None:
        """Raise FieldError for the result of a tool without a call before it."""
        called: set[str] = set()
        for i, message in enumerate(self.messages):
            for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
                if isinstance(block, ToolUseBlock):
                    called.add(block.id)
                elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                    problem = f"unexpected `tool_use_id` found in `tool_result` blocks: {shown(block.tool_use_id)}"
                    remedy = "each `tool_result` block must have a corresponding `tool_use` block in an earlier message"
                    raise FieldError(f"messages.{i}.content.{j}", f"messages.{i}.content.{j}: {problem}; {remedy}.")

    def _unread(self) -> list[str]:
        """Return the kinds of blocks that the model does not see."""
        contents = [message.content for message in self.messages]
        results = (b.content for content in contents for b in content if isinstance(b, ToolResultBlock))
        return unread("messages", [*contents, *results])

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat; raises FieldError."""
        chat = read_options(MessagesChat, self.chat_fields())
        chat.check()
        return chat

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat; raises FieldError."""
        fields = dict(self.model_extra or {})
        check_absent(FIELDS_OF_CHATS, fields, "Anthropic")
        own_kwargs = fields.pop("chat_template_kwargs", None)
        fields |= {"model": self.model, "messages": self._chat_messages()}
        fields["continue_final_message"] = self.messages[-1].role == "assistant"
        if self.tools is not None:
            fields["tools"] = [t if isinstance(t, HostedTool) else t.as_chat() for t in self.tools]
        if self.tool_choice is not None:
            fields |= self.tool_choice.as_chat()
        if self.thinking is not None:
            fields |= self.thinking.as_chat()
        if own_kwargs is not None:
            both = isinstance(own_kwargs, dict) and "chat_template_kwargs" in fields
            fields["chat_template_kwargs"] = fields["chat_template_kwargs"] | own_kwargs if both else own_kwargs
        if self._marks:
            longest = max((mark.ttl or CacheOptions().ttl for mark in self._marks), key=TTL_SECONDS.__getitem__)
            fields["cache_control"] = {"type": "ephemeral", "ttl": longest}
        output = self.output_config
        form = self.output_format if output is None or output.format is None else output.format
        if form is not None:
            json_schema = {"name": "output", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        if output is not None and output.effort is not None:
            fields["output_config.effort"] = output.effort  # unknown to chats, so it is reported as ignored
        return fields | dict.fromkeys(self._unread(), True)  # unknown to chats, too

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": _parts(self.system)})
        for message in self.messages:
            for each in message.as_chat():
                if messages and messages[-1]["role"] == each["role"] != "tool":  # one side's messages form one turn
                    for name in each.keys() - {"role"}:
                        messages[-1].setdefault(name, []).extend(each[name])
                else:
                    messages.append(each)
        for each in messages:
            if len(each.get("content", ())) == 1 and isinstance(each["content"][0], dict):
                each["content"] = each["content"][0]["text"]
            if thoughts := each.pop("reasoning_content", None):
                each["reasoning_content"] = "\n".join(thoughts)
            if not each.get("tool_calls"):
                each.pop("tool_calls", None)
        return messages


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)]  # 0 only computes and caches the prompt
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None

    def chat_fields(self) -> dict[str, Any]:
        names = "max_tokens", "stream", "temperature", "top_p", "top_k"
        fields = super().chat_fields() | {name: getattr(self, name) for name in names}
        if not self.max_tokens:
            fields |= {"max_tokens": None, "prompt_cache_options": {"mode": "explicit", "prewarm": True}}
        user = None if self.metadata is None else self.metadata.user_id
        session = {} if user is None else {"prompt_cache_key": user[:MAX_SESSION_CHARS]}
        return fields | {"stop": self.stop_sequences, "user": user} | session
