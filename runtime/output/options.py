"""The options of an answer, the same over HTTP (serve_app) and for `runtime.llm.LLM`."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.base.types import GrammarSpec
from runtime.output.fields import OpenOptions, Options, invalid, shown
from runtime.output.response_format import RequestedGrammar, ResponseFormat, StructuredOutputs, requested_grammar
from runtime.output.tools import (
    AllowedFunctions,
    AllowedTools,
    AnyTool,
    ChosenCustomTool,
    ChosenTool,
    HostedTool,
    OfferedTool,
    ToolChoice,
)
from runtime.text.tool_calls import ForcedCall

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_BadWord = Annotated[str, Field(min_length=1, max_length=100)]
CacheTtl = Literal["5m", "30m", "1h", "12h", "24h"]
TTL_SECONDS: dict[CacheTtl, float] = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}
_NOT_KWARGS = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}


class CacheControl(OpenOptions):
    """Anthropic's mark: the prompt up to here will be sent again within this time."""

    type: Literal["ephemeral"]
    ttl: CacheTtl = "5m"


class OutputOptions(Options):
    """The options of any output."""

    n: Annotated[int, Field(ge=1, le=1024)] | None = None  # choices of each prompt
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_grammar: str | None = None  # vLLM's older name
    ebnf: str | None = None  # SGLang's
    regex: str | None = None  # SGLang's
    grammar: str | None = None  # llama.cpp's
    bad_words: Annotated[list[_BadWord], Field(max_length=64, fail_fast=True)] | None = None  # vLLM's
    cache_control: CacheControl | None = None  # marks the whole prompt

    def cache_ttl_s(self) -> float:
        """Return the time for which a KV tier should keep the prompt; 0 for its own."""
        return 0.0 if self.cache_control is None else TTL_SECONDS[self.cache_control.ttl]

    def requested_grammar(self) -> RequestedGrammar | None:
        """The grammar of the content; None if it is free."""
        texts = {name: getattr(self, name) for name in ("guided_grammar", "ebnf", "grammar")}
        specs = {name: GrammarSpec("grammar", text) for name, text in texts.items() if text}
        if self.regex:
            specs["regex"] = GrammarSpec("regex", self.regex)
        if self.bad_words:
            specs["bad_words"] = GrammarSpec("without", json.dumps(self.bad_words, ensure_ascii=False))
        return requested_grammar(self.response_format, self.structured_outputs, specs)


class ChatOptions(OutputOptions):
    """The options for a chat's answer.

    With `tool_choice` "required" or a function, the prompt ends with a call's beginning, and a grammar binds the
    rest."""

    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    include_reasoning: bool = True
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None  # vLLM's; -1 if unlimited
    reasoning_effort: Effort | None = None
    channel_grammar: bool | None = None  # hold a model with channels to their format; None is the server's setting
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", "begins another message than continue_final_message; send one")
        for name in _NOT_KWARGS & (self.chat_template_kwargs or {}).keys():
            raise invalid(f"chat_template_kwargs.{name}", "is nothing that a request can hand to the template")
        if self.tool_choice in (None, "none") or (self.tool_choice == "auto" and self.tools is not None):
            return
        if not self.own_tools:
            more = ", and this server runs none of these itself; send functions" if self.tools else ""
            raise invalid("tool_choice", f"is only allowed when there are tools{more}")
        known, choice = {(tool.type, tool.function.name) for tool in self.own_tools}, self.tool_choice
        if isinstance(choice, ChosenTool | ChosenCustomTool) and (choice.type, choice.function.name) not in known:
            problem = f"is {shown(choice.function.name)}, which no tool of the type {choice.type} has"
            raise invalid(f"tool_choice.{choice.type}.name", problem)
        if isinstance(choice, AllowedTools) and (unknown := choice.names - known):
            raise invalid("tool_choice.allowed_tools.tools", f"has {shown(min(unknown)[1])}, which no tool has")

    @cached_property
    def own_tools(self) -> list[AnyTool]:
        """The tools without hosted ones."""
        return [tool for tool in self.tools or () if not isinstance(tool, HostedTool)]

    @cached_property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as the template sees them; None if there are none."""
        return [tool.as_template_sees_it() for tool in self.offered_tools()] or None

    def offered_tools(self) -> list[AnyTool]:
        """The tools in the prompt."""
        if isinstance(choice := self.tool_choice, AllowedTools):
            return [tool for tool in self.own_tools if (tool.type, tool.function.name) in choice.names]
        return [] if choice == "none" else self.own_tools

    def forced_call(self) -> ForcedCall | None:
        """The call that the answer must begin with; None if none is required."""
        match self.tool_choice:
            case ChosenTool() | ChosenCustomTool() as chosen:
                return ForcedCall(chosen.function.name)
            case "required" | AllowedTools(allowed_tools=AllowedFunctions(mode="required")):
                names = [tool.function.name for tool in self.offered_tools()]
                return ForcedCall(names[0] if len(names) == 1 else None)
        return None

    def most_calls(self) -> int | None:
        """The highest number of calls in the answer; None if unlimited."""
        names_one = isinstance(self.tool_choice, ChosenTool | ChosenCustomTool)
        return 1 if self.parallel_tool_calls is False or names_one else None
