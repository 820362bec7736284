"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from runtime.core.types import GrammarSpec
from runtime.structured.grammar import Calls
from runtime.text.tool_calls import ToolFormat
from serve_app.errors import invalid
from serve_app.requests.messages import ChatMessage
from serve_app.requests.sampling import SamplingFields
from serve_app.requests.shapes import or_default, shown
from serve_app.requests.tools import ChosenTool, Tool, ToolChoice
from serve_app.response_format import RequestedGrammar

_NOT_KWARGS = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions.

    `tool_choice` "required" or a function makes the model go on from the beginning of a call, whose grammar is that of
    its arguments."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def max_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return or_default(self.top_logprobs, 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "is only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", "begins another message than continue_final_message; send one")
        for name in _NOT_KWARGS & (self.chat_template_kwargs or {}).keys():
            raise invalid(f"chat_template_kwargs.{name}", "is nothing that a request can hand to the template")
        for i, message in enumerate(self.messages):
            message.check(f"messages.{i}")
        if self.tool_choice not in (None, "none"):
            if not self.tools:
                raise invalid("tool_choice", "is only allowed when there are tools")
            if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in self.function_names:
                raise invalid(
                    "tool_choice.function.name", f"is {shown(self.tool_choice.function.name)}, which no tool has"
                )

    @property
    def function_names(self) -> set[str]:
        return {tool.function.name for tool in self.tools or ()}

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as the template sees them; a tool's has the function's name, which Hermes' template wants."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        names = {call.id: call.function.name for call in calls}
        messages = [message.as_template_sees_it() for message in self.messages]
        for message in messages:
            if message.get("tool_call_id") in names:
                message.setdefault("name", names[message["tool_call_id"]])
        return messages

    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    def begun_call(self) -> str | None:
        """The function of a call that the answer must begin with; "" if it may be any, None if none is asked for."""
        match self.tool_choice:
            case ChosenTool(function=function):
                return function.name
            case "required":
                names = self.function_names
                return names.pop() if len(names) == 1 else ""
        return None

    def bound_grammar(
        self, answer: RequestedGrammar | None, form: ToolFormat | None, marks_are_text: bool
    ) -> RequestedGrammar | None:
        """What the output must be, where `answer` is what its content must be; None: nothing is enforced.

        Calls are bound from the opening on with which the prompt ends, or, where the model may choose and some function
        is strict, from any mark on that it writes; beside an answer in JSON, they are all that it may write instead.
        Arguments fit their schema; without `strict` any object will do where the schema is not supported."""
        begun, tools = self.begun_call(), self.offered_tools()
        strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
        if not tools or (begun is None and strict is None and answer is None):
            return answer
        assert form is not None, "tools that the model has no format for are refused before"
        has_marks = marks_are_text and not form.is_bare
        if begun is not None:
            answer = None  # there is no content
        elif answer is not None and not (has_marks and answer.spec.kind == "json"):
            why = "only JSON can be" if has_marks else "this model marks no calls as text"
            raise invalid(
                answer.field, f"cannot be combined with tools that may be called ({why}); set tool_choice to none"
            )
        elif not has_marks:
            raise invalid(
                f"tools.{strict}.function.strict",
                "is supported for this model only where tool_choice is required or names a function",
            )
        functions = [tool.function for tool in tools if (begun or "") in ("", tool.function.name)]
        nothing = {"type": "object", "additionalProperties": False}
        again = ("; " if form.is_bare else "\n") + form.opening(begun or "")
        calls = Calls(
            functions={f.name: nothing if f.parameters is None else f.parameters for f in functions},
            lenient=[f.name for f in functions if not f.strict],
            named=bool(begun),
            to_arguments=f'", "{form.arguments}":',
            end="\n" + form.end_mark if form.end_mark and marks_are_text else "",
            again=again if marks_are_text and self.most_calls() is None else "",
        )
        after, free = "", False
        if answer is not None:
            calls.begin, calls.answer, after = form.opening(""), answer.spec.text, answer.spec.after
        elif begun is None:
            calls.begin, after, free = form.opening("").removeprefix(form.mark).strip(), form.mark, True
        strictness = None if answer is None else answer.spec.strict
        spec = GrammarSpec("calls", msgspec.json.encode(calls).decode(), after, free, strictness)
        return RequestedGrammar(spec, "tools" if answer is None else answer.field)

    def most_calls(self) -> int | None:
        """How many calls the answer may have; None: any number."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, ChosenTool) else None
