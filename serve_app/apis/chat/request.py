"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from runtime.output.fields import invalid, shown
from runtime.output.options import ChatOptions
from runtime.output.tools import HostedTool
from serve_app.apis.chat.messages import ChatMessage, Content, ImagePart, check_new_parts, unread
from serve_app.protocol.dialects import CHAT
from serve_app.protocol.sampling import SamplingFields
from serve_app.protocol.shapes import RequestModel, hosted, or_default


class Prediction(RequestModel):
    """A text that the answer may largely repeat."""

    type: Literal["content"]
    content: Content

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(SamplingFields, ChatOptions):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow")
    dialect = CHAT

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[
        Annotated[int, Field(ge=1, lt=1 << 31)] | None, BeforeValidator(lambda value: None if value == -1 else value)
    ] = None  # llama.cpp writes None as -1
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    prediction: Prediction | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def max_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return or_default(self.top_logprobs, 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "is only allowed when logprobs is true")
        if self.detokenize is False and self.own_tools:
            raise invalid("detokenize", "is false, but calls of tools are read from the text; leave one of both out")
        if (most := self.dialect.max_tools) is not None and len(self.tools or ()) > most:
            raise invalid("tools", f"has {len(self.tools or ())} tools; this API allows {most}")
        if (allowed := self.dialect.tool_names) is not None:
            for i, tool in enumerate(self.tools or ()):
                if not isinstance(tool, HostedTool) and not allowed.fullmatch(tool.function.name):
                    problem = f"is {shown(tool.function.name)}; this API allows names of the pattern {allowed.pattern}"
                    raise invalid(f"tools.{i}.{tool.type}.name", problem)
        for i, message in enumerate(self.messages):
            message.check_at(f"messages.{i}")
        check_new_parts("messages", [(message.role, message.content) for message in self.messages])

    def ignored_fields(self) -> list[str]:
        parts = unread("messages", (message.content for message in self.messages))
        return super().ignored_fields() + hosted(self.tools) + parts

    def contents(self) -> Iterable[Any]:
        return (message.content for message in self.messages)

    def images(self) -> list[ImagePart]:
        """The pictures in the messages, in order."""
        return [part for message in self.messages for part in message.images()]

    def template_messages(self, takes_images: bool = False) -> list[dict[str, Any]]:
        """Return the messages for the template. A tool's message has its function's name, which Hermes needs."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        names = {call.id: call.function.name for call in calls}
        messages = [message.as_template_sees_it(takes_images) for message in self.messages]
        for message in messages:
            if message.get("tool_call_id") in names:
                message.setdefault("name", names[message["tool_call_id"]])
        return messages
