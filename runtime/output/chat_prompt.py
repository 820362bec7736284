"""A chat's prompt, and the grammar and format of the output that follows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.base.types import CallboardError, ThinkingBudget
from runtime.output.call_grammar import with_calls
from runtime.output.channel_grammar import channel_grammar, channel_marks, place_of
from runtime.output.fields import FieldError, invalid, shown
from runtime.output.message_parser import MessageFormat
from runtime.output.options import ChatOptions, Effort
from runtime.output.response_format import RequestedGrammar
from runtime.output.tools import CustomTool
from runtime.structured.channels import Place
from runtime.text.chat import ChatTemplate
from runtime.text.control_tokens import Conversation, without_seams
from runtime.text.reasoning import Marks
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import ForcedCall, ToolFormat, name_of
from runtime.text.tool_calls.harmony import FINAL, HARMONY, HARMONY_TOKENS, START, with_special
from runtime.text.tool_calls.parser import SPECIAL

_SWITCHES = "enable_thinking", "thinking"
_SWITCH = re.compile(r"\benable_thinking\b|\bthinking is\b")  # reasoning switches in a template

# gpt-oss has three efforts. For none, the grammar leaves out the analysis, too.
_EFFORTS_OF_CHANNELS: dict[Effort, str] = {
    **dict.fromkeys(("none", "minimal", "low"), "low"),
    "medium": "medium",
    **dict.fromkeys(("high", "xhigh", "max"), "high"),
}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of one chat."""

    text: str
    message_format: MessageFormat | None  # the output's format; None if all is content
    encode: Callable[[str, bool], list[int]]  # the ids of `source`, with or without the tokens around a text
    source: str  # `text`, or its form for `encode` where a client's texts spell control tokens


class ChatPrompter:
    """Makes the prompts of one model's chats. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises CallboardError if the model lacks a usable chat template."""
        self._template, self._tokenizer = ChatTemplate.of(tokenizer), tokenizer
        self._reasoning = self._template.reasoning_marks
        self._marks = channel_marks(tokenizer) if self._template.has_channels else None

    @property
    def roles(self) -> frozenset[str]:
        """The roles that the template names."""
        return self._template.roles

    @property
    def tool_call_format(self) -> str | None:
        """The tool-call format's name; None if there is none. The first access runs a child process."""
        return name_of(self._template.tool_format)

    @property
    def thinks(self) -> bool:
        """True if the model may write reasoning before its answer."""
        return self._template.thinks or self._template.has_channels

    @property
    def limits_reasoning(self) -> bool:
        """True if `thinking_token_budget` is enforced: in channels, if their marks are special tokens."""
        return not self._template.has_channels or self._marks is not None

    def reads_effort(self, effort: Effort) -> bool:
        """Return whether the template follows an effort; without reasoning, "none" is followed by any."""
        source = self._template.source
        is_off = effort == "none" and self._reasoning.close not in source
        return is_off or "reasoning_effort" in source or _SWITCH.search(source) is not None

    def prompt(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        """Return the prompt of a chat. Raises FieldError for invalid options, or if the template refuses the
        messages."""
        template = self._template
        form = self._call_format(options)
        kwargs = self._effort(options) | (options.chat_template_kwargs or {})
        if template.has_channels and kwargs.get("builtin_tools"):
            raise invalid("chat_template_kwargs.builtin_tools", "names tools that no server here runs; send tools")
        given = self._conversation(messages, options, kwargs)
        text = self._rendered(given, options)
        if form is None and not template.thinks:
            return self._made(text, None, given.seam)
        in_reasoning = template.thinks and _in_reasoning(messages, options, text, self._reasoning)
        special_marks = self._special_marks(form)
        is_held = self._place(options, text) is not None
        forced = None if is_held else options.forced_call()  # a grammar that holds the turn requires the call
        if form is not None and forced is not None:
            form = form.for_call_of(_needs_json(options, form, forced))
            if in_reasoning:
                text = self._closed(text, given, options)
            text += form.opening(forced.name)
        elif template.has_channels and not is_held and _is_final(options):
            text += FINAL  # the grammar binds this message, without a header
        begun = text.rpartition(START)[2] if template.has_channels and forced is None else ""
        tells_special = form is HARMONY and self._marks is not None
        if tells_special:
            form, begun = HARMONY_TOKENS, with_special(begun)
        tools, thinks = options.offered_tools(), template.thinks and forced is None
        message_format = MessageFormat(
            thinks=thinks,
            in_reasoning=in_reasoning,
            reasoning_marks=self._reasoning,
            shows_reasoning=options.include_reasoning,
            tools=form,
            is_held=is_held,
            may_open=thinks and not in_reasoning and self._may_open(text, options, kwargs),
            functions={tool.function.name: tool.function.parameters or {} for tool in tools},
            custom_tools=frozenset(tool.function.name for tool in tools if isinstance(tool, CustomTool)),
            reads_plain_calls=self._reads_plain_calls(options),
            most_calls=_most_calls(options, form),
            forced=forced,
            kept_special_ids=frozenset(special_marks.values()),
            before_special=SPECIAL if tells_special else "",
            begun=begun,
            budget=None if forced is not None else self._budget(options, in_reasoning, begun),
        )
        return self._made(text, message_format, given.seam)

    def _call_format(self, options: ChatOptions) -> ToolFormat | None:
        """Return the format that the output is read by; None without tools and channels. Raises FieldError for tools
        that it cannot write."""
        tools, form = options.offered_tools(), self._template.tool_format if options.offered_tools() else None
        if tools and form is None:
            raise invalid(
                "tools",
                "cannot be used: this model answers in channels, but its chat template does not describe tools; see "
                "--chat-template",
            )
        for i, tool in enumerate(tools):
            if form is not None and not form.can_name(name := tool.function.name):
                problem = f"is {shown(name)}, which this model's format of calls cannot write"
                raise invalid(f"tools.{i}.{tool.type}.name", f"{problem}; use letters, digits, _ and -")
        return HARMONY if self._template.has_channels else form

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, kwargs: dict[str, Any]
    ) -> Conversation:
        """Return what the template renders, with seams where a client's texts spell control tokens."""
        given = Conversation(messages, options.template_tools, kwargs)
        if self._tokenizer.special_tokens_in_contents:
            return given
        try:
            return self._tokenizer.control_tokens.with_seams(given)
        except CallboardError as e:
            raise FieldError("messages", str(e)) from e

    def _made(self, text: str, message_format: MessageFormat | None, seam: str) -> ChatPrompt:
        tokenizer, clean = self._tokenizer, without_seams(text, seam)
        if not seam:
            return ChatPrompt(clean, message_format, tokenizer.encode, clean)
        source = without_seams(tokenizer.control_tokens.with_names(text), seam)
        return ChatPrompt(clean, message_format, tokenizer.encode_named, source)

    def _rendered(self, given: Conversation, options: ChatOptions) -> str:
        begins_turn, is_continued = options.add_generation_prompt is not False, options.continue_final_message
        try:
            return self._template.render(given.messages, begins_turn, given.tools, is_continued, **given.kwargs)
        except CallboardError as e:
            raise FieldError("messages", without_seams(str(e), given.seam)) from e

    def _closed(self, prompt: str, given: Conversation, options: ChatOptions) -> str:
        """Return a prompt that ends within reasoning, with its end: as the template writes a turn without reasoning, if
        the prompt is otherwise the same."""
        opens, close, *_ = self._reasoning
        if _SWITCH.search(self._template.source) and not options.continue_final_message:
            other = self._rendered(given._replace(kwargs={**given.kwargs, **dict.fromkeys(_SWITCHES, False)}), options)
            if other.startswith(prompt[: prompt.rfind(opens)]) and other.rstrip().endswith(close):
                return other
        return f"{prompt.rstrip()}\n\n{close}\n\n"

    def _place(self, options: ChatOptions, prompt: str) -> Place | None:
        """Return the place in a turn where a prompt ends and a grammar goes on; None if no grammar holds the turn."""
        asked = options.channel_grammar
        is_on = self._tokenizer.channel_grammar if asked is None else asked
        return place_of(prompt.rpartition(START)[2]) if is_on and self._marks is not None else None

    def _reads_plain_calls(self, options: ChatOptions) -> bool:
        """Return whether content may hold calls: not if it follows a grammar, or continues a message within a line."""
        is_free = options.forced_call() is None and options.requested_grammar() is None
        may_call = bool(options.offered_tools()) and not options.continue_final_message
        return self._tokenizer.plain_tool_calls and is_free and may_call

    def _may_open(self, prompt: str, options: ChatOptions, kwargs: Mapping[str, Any]) -> bool:
        """Return whether an output after this prompt may begin with reasoning that it opens itself."""
        is_off = options.reasoning_effort == "none" or any(kwargs.get(name) is False for name in _SWITCHES)
        return not (is_off or options.continue_final_message or prompt.rstrip().endswith(self._reasoning.close))

    def _special_marks(self, form: ToolFormat | None) -> dict[str, int]:
        """The marks of reasoning and calls that are special tokens, and their ids."""
        marks = (self._reasoning.open_token, self._reasoning.close, *(() if form is None else form.marks))
        ids = {mark: self._tokenizer.token_to_id(mark) for mark in marks}
        return {mark: i for mark, i in ids.items() if i is not None and i in self._tokenizer.special_ids}

    def _effort(self, options: ChatOptions) -> dict[str, Any]:
        """Return the template arguments for `reasoning_effort`; none if the template reads none."""
        source, effort = self._template.source, options.reasoning_effort
        if effort is None:
            return {}
        if self._template.has_channels and "reasoning_effort" in source:
            return {"reasoning_effort": _EFFORTS_OF_CHANNELS[effort]}
        if "reasoning_effort" in source:
            return {"reasoning_effort": effort}
        if _SWITCH.search(source):
            return dict.fromkeys(_SWITCHES, effort != "none")
        return {}

    def _budget(self, options: ChatOptions, in_reasoning: bool, begun: str) -> ThinkingBudget | None:
        """Return the budget of the output's reasoning; None if it is unlimited."""
        num_tokens = options.thinking_token_budget
        if num_tokens is None or num_tokens < 0 or not (self._template.thinks or self._template.has_channels):
            return None
        if self._template.has_channels:
            if self._marks is None:
                return None
            end, is_open = self._marks["<|end|>"], place_of(begun.replace(SPECIAL, "")) == "analysis"
            ids = self._marks["<|channel|>"], self._marks["<|message|>"], end
            return ThinkingBudget(num_tokens, (end,), None, is_open, ids)
        open_text, close, open_token, _ = self._reasoning
        close_ids = tuple(self._tokenizer.encode(close, add_special_tokens=False))
        open_id = self._tokenizer.token_to_id(open_token)
        return ThinkingBudget(num_tokens, close_ids, open_id, in_reasoning, marks=(open_text, close))

    def grammar(self, options: ChatOptions, form: MessageFormat | None) -> RequestedGrammar | None:
        """Return the grammar of the output after its prompt; None if it is free."""
        if form is not None and form.is_held:
            return self._channel_grammar(options, form)
        grammar = options.requested_grammar()
        if form is None:
            return grammar
        special_marks = self._special_marks(form.tools)
        if grammar is not None and (form.in_reasoning or form.may_open):
            opens, close, open_token, _ = self._reasoning
            marks = (open_token, close) if form.may_open else (close,)
            special = tuple((mark, i) for mark, i in special_marks.items() if mark in marks)
            opens = opens if form.may_open else ""
            grammar = replace(grammar, spec=replace(grammar.spec, after=close, special=special, opens=opens))
        return with_calls(
            grammar, options.offered_tools(), form.tools, form.forced, form.most_calls, special_marks, form.thinks
        )

    def _channel_grammar(self, options: ChatOptions, form: MessageFormat) -> RequestedGrammar:
        place = place_of(form.begun.replace(SPECIAL, ""))
        assert place is not None, "the turn is held"
        assert self._marks is not None
        switches = options.chat_template_kwargs or {}
        reasons = options.reasoning_effort != "none" and switches.get("enable_thinking") is not False
        return channel_grammar(options, self._marks, place, reasons, form.most_calls)


def _most_calls(options: ChatOptions, form: ToolFormat | None) -> int | None:
    """Return the highest number of calls in an answer; None if unlimited.

    A model without training on calls repeats a required call until its output is full. So it writes only one, unless
    the request sets parallel_tool_calls."""
    is_untrained = form is not None and form.is_text and options.forced_call() is not None
    return 1 if is_untrained and options.parallel_tool_calls is None else options.most_calls()


def _needs_json(options: ChatOptions, form: ToolFormat, forced: ForcedCall) -> bool:
    called = [tool for tool in options.offered_tools() if forced.name in (None, tool.function.name)]
    return any(tool.needs_json(form.arguments) for tool in called)


def _is_final(options: ChatOptions) -> bool:
    """True if the output is one message that follows the request's grammar."""
    return options.requested_grammar() is not None and not options.continue_final_message


def _in_reasoning(messages: Sequence[Mapping[str, Any]], options: ChatOptions, prompt: str, marks: Marks) -> bool:
    """True if a prompt ends within reasoning."""
    if options.continue_final_message:
        before = str(messages[-1]["content"])
        return before.rfind(marks.open) > before.rfind(marks.close)
    return prompt.rstrip().endswith(marks.open)
