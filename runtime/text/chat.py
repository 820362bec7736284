"""Chat templates: a model's own Jinja program that turns messages into its prompt.

`transformers`' chat_template_utils.py is the de facto specification of what a template sees. A
template's output shows the model's formats, so `tool_format` and `thinks` are derived from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.child import ChildPool, Overrun
from runtime.text import reasoning, sandbox
from runtime.text.call_messages import with_content_placed, with_named_ids, with_objects, with_texts
from runtime.text.channel_messages import channel_messages, described
from runtime.text.probes import CallProbe, Place, content_forms, place_of_content, probe_calls, writes_images_of_results
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import FORMATS, GENERIC, ToolFormat
from runtime.text.tool_calls.generic import with_tools, with_tools_as_text, with_tools_of_system, with_written_calls
from runtime.text.tool_calls.harmony import HARMONY, START
from runtime.text.tool_responses import has_images, with_images_after_results, with_tool_responses

MAX_PROMPT_CHARS = 4 << 20
MAX_SECONDS = 1.0  # CPU time for one rendering; a long conversation takes milliseconds
_MEMORY = 512 << 20  # address space of a rendering process; idle, it uses a twentieth
_DEADLINE_S = 5.0  # until a process that ignores interrupts is killed
_MAX_CHILDREN = 8  # prompts that are rendered at the same time
_T = TypeVar("_T")
# The text, or list of texts, that a template compares a message's role with.
_COMPARED_ROLE = re.compile(r"""\brole['")\]]*\s*(?:[!=]=|(?:not\s+)?in\b)\s*('[^']*'|"[^"]*"|[\[(][^\[(\])]*[\])])""")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")

# Ends the message to continue. Its trailing space shows whether the template trims messages.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One model's chat template, compiled once (in sandbox.py). Threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """Args:
        special_tokens: texts that the template sees by name.
        tool_source: a separate template for conversations with tools, as some models have.

        Raises CallboardError if a source is not a valid template."""
        self.source, self._tool_source = source, source if tool_source is None else tool_source
        self._special_tokens = dict(special_tokens)
        self._forms: dict[str, frozenset[type]] = {}  # content types that the template writes, by role
        for text in (source, self._tool_source):
            _run(sandbox.check, text, self._special_tokens, MAX_SECONDS)
        self.reasoning_marks = reasoning.marks_of(source)
        self.thinks = self.reasoning_marks.close in source  # the model may write reasoning before its answer
        self.has_channels = START in source  # the model writes messages in channels (harmony.py)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template of a tokenizer. Raises CallboardError if it has none."""
        if tokenizer.chat_template is None:
            raise CallboardError("This model has no chat template; use /v1/completions with a plain prompt instead.")
        template = cls(tokenizer.chat_template, tokenizer.special_tokens, tokenizer.tool_template)
        template.thinks = template.thinks or tokenizer.token_to_id(template.reasoning_marks.close) is not None
        if tokenizer.tool_call_parser != "auto":
            template.tool_format = FORMATS[tokenizer.tool_call_parser]
            template.has_channels = template.tool_format is HARMONY
        return template

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles that the template names. It may accept others."""
        compared = _COMPARED_ROLE.findall(self.source) + _COMPARED_ROLE.findall(self._tool_source)
        return frozenset(one or other for texts in compared for one, other in _QUOTED.findall(texts))

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls: the one that parses its template's calls.

        GENERIC if the template ignores tools or writes calls in an unknown format; None if it then has channels,
        because only HARMONY parses these."""
        own = self._probed.form
        return GENERIC if own is None and not self.has_channels else own

    @cached_property
    def _has_system(self) -> bool:
        """True if a system message stays at the head of a conversation with several turns."""
        turns = ("system", "callboard_probe"), ("user", "first_turn"), ("assistant", "an_answer"), ("user", "last_turn")
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            prompt = self._rendered(messages, {"tools": None, "add_generation_prompt": True})
        except CallboardError:
            return False
        return "callboard_probe" in prompt.partition("first_turn")[0]

    @cached_property
    def _needs_tools(self) -> bool:
        """True if the template cannot be rendered without tools."""
        try:
            self._output([{"role": "user", "content": "Go."}], {"tools": None}, with_lists=False)
        except sandbox.MissingValue:
            return True
        except CallboardError:
            pass
        return False

    @cached_property
    def _probed(self) -> CallProbe:
        return probe_calls(self._rendered, self._tool_source)

    @cached_property
    def _place_of_content(self) -> Place:
        """Where a template expects text next to tool calls. Only templates with results among the calls misplace it."""
        has_responses = "tool_responses" in self._tool_source
        return place_of_content(self._with_responses) if has_responses else "kept"

    @cached_property
    def _writes_images_of_results(self) -> bool:
        return writes_images_of_results(self._with_responses)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # a request may send the keyword "self"
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation. It has special tokens: encode it with `add_special_tokens=False`.

        Args:
        messages, tools, kwargs: plain JSON values, because the sandbox guards only these. Arguments of past tool calls
            are objects, not texts.
        continue_final_message: end the prompt within the last message instead of a new turn.

        Raises CallboardError if the template refuses the messages (with its own words), if the prompt exceeds 4 Mi
        characters, or after 1 second of CPU time."""
        messages = [self._as_read(message) for message in messages]
        has_calls = any(message.get("tool_calls") for message in messages)
        is_called = has_calls or any(message.get("role") == "tool" for message in messages)
        form = self.tool_format if tools or is_called else None
        if has_calls:
            messages = with_objects(messages, are_written=form is not None and form.arguments is not None)
        if form is GENERIC and tools and self._needs_tools:
            form = None
        has_pictures = any(message.get("role") == "tool" and has_images(message) for message in messages)
        if has_pictures and (form is GENERIC or not self._writes_images_of_results):
            messages = with_images_after_results(messages)
        if form is GENERIC:
            messages, tools = with_tools_as_text(messages, tools, bool(tools) and self._has_system), None
        elif tools and form is not None and form.instructions and not self._probed.shows_tools:
            messages, tools = with_tools(messages, tools, self._has_system, form.instructions), None
        elif form is not None and not self._probed.writes_calls:
            messages = with_written_calls(messages, form, self.roles)
            if tools and not self._probed.shows_tools:
                messages, tools = with_tools_of_system(messages, tools), None
        if form is not None and form.has_named_ids:
            messages = with_named_ids(messages)
        if continue_final_message:
            add_generation_prompt = False
            messages = _with_end_marked(messages)
        if has_calls and self._probed.takes_text:
            messages = with_texts(messages)
        if self.has_channels:
            messages, tools = channel_messages(messages), described(tools)
        if has_calls:
            messages = with_content_placed(messages, self._place_of_content)
        own = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        text = self._with_responses(messages, {**kwargs, **own})
        return _cut_at_mark(text) if continue_final_message else text

    def _with_responses(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        if "tool_responses" in self._tool_source and "tool" not in self.roles:
            messages = with_tool_responses(messages)
        return self._rendered(messages, values)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        return self._output([self._as_read(message) for message in messages], values)

    def _as_read(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its content as the template reads it: a text, or the parts of one."""
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [str(p["text"]) for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
        if len(texts) < len(parts) or not texts:
            return message
        forms = self._content_forms(str(message.get("role")))
        if content is parts and (list not in forms or (message.get("tool_calls") and str in forms)):
            return {**message, "content": "\n".join(texts)}
        return {**message, "content": parts} if forms == {list} else message

    def _content_forms(self, role: str) -> frozenset[type]:
        if role not in {"system", "assistant", "tool"} | self.roles:
            role = "user"
        if role not in self._forms:
            found = content_forms(self._output, role)
            self._forms[role] = found or (frozenset({str}) if role == "user" else self._content_forms("user"))
        return self._forms[role]

    def _output(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], with_lists: bool = True) -> str:
        source = self._tool_source if values["tools"] else self.source
        values = {"documents": None, **values, "messages": messages}
        try:
            return _run(sandbox.render, source, self._special_tokens, values, MAX_SECONDS, MAX_PROMPT_CHARS)
        except sandbox.MissingValue:
            absent: dict[str, Any] = {name: [] for name in ("tools", "documents") if values[name] is None}
            if not (with_lists and absent):
                raise
        # Some templates loop over tools and documents that are not there.
        return _run(sandbox.render, source, self._special_tokens, {**values, **absent}, MAX_SECONDS, MAX_PROMPT_CHARS)


def load_tokenizer(path: Path, config: EngineConfig | None = None) -> Tokenizer:
    """Load the tokenizer of a model folder or a .gguf file, with the settings for texts; None for the defaults.

    Raises CallboardError if the tokenizer is missing or unknown, or if the template is not usable."""
    tokenizer, config = Tokenizer.load(path), config or EngineConfig()
    tokenizer.tool_call_parser, tokenizer.channel_grammar = config.tool_call_parser, config.channel_grammar
    tokenizer.plain_tool_calls = config.plain_tool_calls
    tokenizer.special_tokens_in_contents = config.special_tokens_in_contents
    if (template_file := config.chat_template) is not None:
        try:
            tokenizer.chat_template, tokenizer.tool_template = Path(template_file).read_text("utf-8"), None
        except (OSError, UnicodeDecodeError) as e:
            raise CallboardError(f"The chat template {template_file!r} cannot be read: {e}.") from e
        try:
            ChatTemplate.of(tokenizer)
        except CallboardError as e:
            raise CallboardError(f"The chat template {template_file!r} cannot be used: {e}") from e
    return tokenizer


def _with_end_marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    match messages:
        case [*before, {"content": str(text)} as last]:
            return [*before, {**last, "content": text + _CONTINUE_MARK}]
        case [*before, {"content": [*parts, {"text": str(text)} as part]} as last]:
            return [*before, {**last, "content": [*parts, {**part, "text": text + _CONTINUE_MARK}]}]
    raise CallboardError("continue_final_message is set, but the last message has no text to continue.")


def _cut_at_mark(prompt: str) -> str:
    at = prompt.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise CallboardError("The model's chat template leaves out the last message, so it cannot be continued.")
    trimmed = not prompt.startswith(_CONTINUE_MARK, at)
    return prompt[:at].rstrip() if trimmed else prompt[:at]


_CHILDREN = ChildPool(_MAX_CHILDREN, _MEMORY, 0, sandbox.check, "", {}, MAX_SECONDS)


def _run(function: Callable[..., _T], *args: Any) -> _T:
    """Run a function of the sandbox in a child process."""
    try:
        return _CHILDREN.run(_DEADLINE_S, function, *args)
    except Overrun as e:
        raise CallboardError(f"The model's chat template cannot be run: it {e}.") from None
