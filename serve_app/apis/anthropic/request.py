"""The requests of /v1/messages and /v1/messages/count_tokens, and their translation to chats.

The chat's model checks the values.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from runtime.output.fields import invalid, read_options
from runtime.output.tools import KIND_OR_HOSTED, HostedTool
from serve_app.apis.chat.request import ChatRequest
from serve_app.protocol.dialects import MESSAGES
from serve_app.protocol.shapes import RequestModel, check_absent, text_or_list_of, type_of

# ---- content ---------------------------------------------------------------------------------------------------------


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer; the template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(RequestModel):
    """Reasoning that only another server can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(RequestModel):
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
_Text = Annotated[Annotated[str, Tag("<text>")] | Annotated[_TextBlocks, Tag("<list>")], _CONTENT_SHAPE]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Text | None = None
    is_error: bool | None = None

    def parts(self) -> list[dict[str, str]]:
        first, *others = _parts(self.content or "") or _parts("")
        return [{**first, "text": f"Error: {first['text']}"} if self.is_error else first, *others]


_BLOCK_KINDS = "text", "thinking", "redacted_thinking", "tool_use", "tool_result"
_Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        lambda value: tag if (tag := _tag_of(value)) in {f"<{kind}>" for kind in _BLOCK_KINDS} else None,
        custom_error_type="block_kind",
        custom_error_message=f"only blocks of the types {', '.join(_BLOCK_KINDS)} are supported; images, documents and "
        "what Anthropic's own tools write are not",
    ),
]
_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_Block], Field(fail_fast=True), Tag("<list>")], _CONTENT_SHAPE
]
_KINDS_OF_ROLE: dict[str, tuple[type[RequestModel], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
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

    def as_chat(self) -> list[dict[str, Any]]:
        """Return the messages of a chat: one for an answer, and one for each tool result or text of a user."""
        if isinstance(self.content, str) or self.role == "system":
            return [{"role": self.role, "content": _parts(self.content)}]
        if self.role == "assistant":
            return [_answer(self.content)]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.parts()})
            elif isinstance(block, TextBlock):
                messages.append({"role": "user", "content": _parts([block])})
        return messages


def _parts(content: str | list[Any]) -> list[dict[str, str]]:
    """Return text as the parts of a chat's message."""
    texts = [content] if isinstance(content, str) else [b.text for b in content if isinstance(b, TextBlock)]
    return [{"type": "text", "text": text} for text in texts]


def _answer(blocks: list[Any]) -> dict[str, Any]:
    calls = [
        {"id": b.id, "function": {"name": b.name, "arguments": json.dumps(b.input, ensure_ascii=False)}}
        for b in blocks
        if isinstance(b, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return {"role": "assistant", "content": _parts(blocks), "tool_calls": calls, "reasoning_content": thoughts}


# ---- requests --------------------------------------------------------------------------------------------------------


class MessageTool(RequestModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        strictness = {} if self.strict is None else {"strict": self.strict}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None} | strictness}


_AnyTool = Annotated[
    Annotated[MessageTool, Tag("<function>")]
    | Annotated[MessageTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    KIND_OR_HOSTED,
]


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


# Fields of a chat that have another name in Anthropic's requests, or no place in Anthropic's answers.
_FIELDS_OF_CHATS = """
    n stop logprobs top_logprobs prompt_logprobs sampling_logprobs logprob_token_ids return_token_ids detokenize
    routed_experts return_prompt_token_ids return_tokens_as_token_ids stream_options response_format
    include_reasoning max_completion_tokens parallel_tool_calls continue_final_message add_generation_prompt
    thinking_token_budget"""
FIELDS_OF_CHATS = frozenset(_FIELDS_OF_CHATS.split())


class MessagesChat(ChatRequest):
    """The chat of a request of Anthropic's clients."""

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
    tools: Annotated[list[_AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format

    def check(self) -> None:
        for i, message in enumerate(self.messages):
            message.check_at(f"messages.{i}")
        last = self.messages[-1].content
        if isinstance(last, list) and any(isinstance(block, ToolUseBlock) for block in last):
            raise invalid(f"messages.{len(self.messages) - 1}", "is a tool_use without its tool_result after it")

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
        output = self.output_config
        form = self.output_format if output is None or output.format is None else output.format
        if form is not None:
            json_schema = {"name": "output", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        if output is not None and output.effort is not None:
            fields["output_config.effort"] = output.effort  # unknown to chats, so it is reported as ignored
        return fields

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
            if len(each.get("content", ())) == 1:
                each["content"] = each["content"][0]["text"]
            if thoughts := each.pop("reasoning_content", None):
                each["reasoning_content"] = "\n".join(thoughts)
            if not each.get("tool_calls"):
                each.pop("tool_calls", None)
        return messages


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None

    def chat_fields(self) -> dict[str, Any]:
        names = "max_tokens", "stream", "temperature", "top_p", "top_k"
        fields = super().chat_fields() | {name: getattr(self, name) for name in names}
        user = None if self.metadata is None else self.metadata.user_id
        return fields | {"stop": self.stop_sequences, "user": user}
