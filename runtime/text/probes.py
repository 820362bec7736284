"""What a chat template does with calls, found by rendering some of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from runtime.spec.types import CallboardError
from runtime.text.tool_calls import FORMATS, CallDelta, ToolFormat

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]  # messages and other values to a prompt
Place = Literal["kept", "own message", "reasoning"]
_NAME, _ARGUMENTS = "callboard_probe", {"n": 1}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "description": "A number."}}}
_CONTENT = "callboard_content"
_USER = {"role": "user", "content": "Go."}
_RESULT = {"role": "tool", "name": _NAME, "tool_call_id": "callboard", "content": "1"}


class CallProbe(NamedTuple):
    """The results of a call rendered on trial."""

    form: ToolFormat | None = None  # None if the template writes no calls, or in an unknown format
    takes_text: bool = False  # the template requires arguments as text
    shows_tools: bool = True  # the template describes the tools


def probe_calls(render: Render) -> CallProbe:
    """Return the format of a template's calls.

    For a template without tools, the format needs `instructions` that describe them. The template then must also write
    the call of a second round. DeepSeek R1's template breaks there."""
    for takes_text in (False, True):
        message = _calling(takes_text)
        try:
            before = _render(render, [_USER], True)
            after = _render(render, [_USER, message], False)
            if not after.startswith(before):  # a new turn begins with reasoning, and this answer has none
                before = _render(render, [_USER], False)
        except CallboardError:
            continue
        written, shows_tools = after.removeprefix(before), _NAME in before
        forms = [form for form in FORMATS.values() if (shows_tools or form.instructions) and _reads(form, written)]
        if not forms:
            return CallProbe(None, takes_text, shows_tools)
        form = next((f for f in forms if f.parser is forms[0].parser and f.opening(_NAME) in written), forms[0])
        if not shows_tools and not _writes_second_round(render, message, form, after):
            return CallProbe(None, takes_text, shows_tools)
        return CallProbe(form, takes_text, shows_tools)
    return CallProbe()


def content_forms(render: Render, role: str) -> frozenset[type]:
    """Return the forms of a role's content that a template writes: str for a text, list for its parts.

    It is empty if the template does not write this role."""
    call = _calling(takes_text=False)
    before = {"tool": [_USER, call], "assistant": [_USER]}.get(role, [])
    own, after = _RESULT if role == "tool" else {"role": role}, [_USER] if role == "system" else []
    parts = [{"type": "text", "text": text} for text in (_CONTENT, _NAME)]
    forms: set[type] = set()
    # A template that writes a list as such shows the word "type" in it.
    for content, seen in ((_CONTENT, _CONTENT), (parts, f"{_CONTENT}((?!type).)*{_NAME}")):
        with contextlib.suppress(CallboardError):
            messages = [*before, {**own, "content": content}, *after]
            if re.search(seen, _render(render, messages, role != "assistant", has_tools=role == "tool"), re.DOTALL):
                forms.add(type(content))
    return frozenset(forms)


def place_of_content(render: Render) -> Place:
    """Return where content beside calls has to stand, so that a template writes it before them.

    Gemma 4's templates write it behind the results, and then do not begin the model's next turn."""
    call = _calling(takes_text=False)
    content = {"role": "assistant", "content": _CONTENT}
    tries: dict[Place, list[dict[str, Any]]] = {
        "kept": [{**call, "content": _CONTENT}],
        "own message": [content, call],
        "reasoning": [{**call, "reasoning_content": _CONTENT}],
    }
    try:
        plain, *found = (
            _render(render, [_USER, *turn, _RESULT], True, has_tools=False) for turn in ([call], *tries.values())
        )
    except CallboardError:
        return "kept"
    texts = dict(zip(tries, found, strict=True))
    tail = plain[plain.find(_NAME) :]
    fitting = [place for place, text in texts.items() if text.endswith(tail) and _CONTENT in text.removesuffix(tail)]
    within_turn = [place for place in fitting if texts[place].replace(_CONTENT, "") == plain]
    order: tuple[Place, ...] = (*within_turn, *(("reasoning",) if "reasoning" in fitting else ()), *fitting, "kept")
    return order[0]


def _calling(takes_text: bool) -> dict[str, Any]:
    called = {"name": _NAME, "arguments": json.dumps(_ARGUMENTS) if takes_text else _ARGUMENTS}
    # Mistral's ids have nine letters.
    call = {"id": "callboard", "type": "function", "function": called}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _render(render: Render, messages: Sequence[Mapping[str, Any]], begins_turn: bool, has_tools: bool = True) -> str:
    function = {"name": _NAME, "description": "Tells the format.", "parameters": _SCHEMA}
    tools = [{"type": "function", "function": function}] if has_tools else None
    return render(messages, {"tools": tools, "add_generation_prompt": begins_turn})


def _writes_second_round(render: Render, message: dict[str, Any], form: ToolFormat, after: str) -> bool:
    try:
        text = _render(render, [_USER, message, _RESULT, message], False)
    except CallboardError:
        return False
    return text.startswith(after) and _reads(form, text.removeprefix(after))


def _reads(form: ToolFormat, written: str) -> bool:
    """Return whether a format reads the call, and no other, in a text."""
    pieces = form.parser(form, {_NAME: _SCHEMA}).push(written)[1]
    return [piece.index for piece in pieces if piece.name] == [0] and _is_json(pieces, _ARGUMENTS)


def _is_json(pieces: Sequence[CallDelta], value: object) -> bool:
    try:
        return bool(json.loads("".join(piece.arguments for piece in pieces)) == value)
    except ValueError:
        return False
