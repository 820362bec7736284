"""What a chat template does with calls, found by rendering some of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from runtime.base.types import CallboardError
from runtime.text.reasoning import TOKENS
from runtime.text.tool_calls import FORMATS, CallDelta, ToolFormat

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]  # messages and other values to a prompt
Place = Literal["kept", "own message", "reasoning"]
_NAME, _ARGUMENTS = "callboard_probe", {"n": 1}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "description": "A number."}}}
_CONTENT = "callboard_content"
_IDS = "callboard", f"functions.{_NAME}:0"  # Mistral's ids have nine letters. Kimi's templates write the id alone.
_MARK = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_USER = {"role": "user", "content": "Go."}
_RESULT = {"role": "tool", "name": _NAME, "tool_call_id": "callboard", "content": "1"}


class CallProbe(NamedTuple):
    """The results of a call rendered on trial."""

    form: ToolFormat | None = None  # None if the template writes no calls, or in an unknown format
    takes_text: bool = False  # the template requires arguments as text
    shows_tools: bool = True  # the template describes the tools
    writes_calls: bool = True  # the template writes the calls in messages


def probe_calls(render: Render, source: str = "") -> CallProbe:
    """Return the format that reads a call which the template writes.

    For a template without tools, the format needs `instructions` that describe them. The template then must also write
    a second round's call. DeepSeek R1's template breaks there. A template that writes no calls may show a format
    by its `sign` in `source`."""
    probe: CallProbe | None = None
    for takes_text, call_id in itertools.product((False, True), _IDS):
        message = _calling(takes_text, call_id)
        try:
            before = _render(render, [_USER], True)
            after = _render(render, [_USER, message], False)
            if not after.startswith(before):  # a new turn begins with reasoning, and this answer has none
                before = _render(render, [_USER], False)
        except CallboardError:
            continue
        written, shows_tools = after.removeprefix(before), _NAME in before
        plain = _plain_answer(render, before)
        forms = [
            form for form in FORMATS.values() if (shows_tools or form.instructions) and _reads(form, written, plain)
        ]
        probe = probe or CallProbe(None, takes_text, shows_tools)
        if forms:
            form = max((each for each in forms if each.parser is forms[0].parser), key=partial(_likeness, written))
            if shows_tools or _writes_second_round(render, message, form, after):
                return CallProbe(form, takes_text, shows_tools)
            return CallProbe(None, takes_text, shows_tools)
    signed = next((form for form in FORMATS.values() if form.sign and re.search(form.sign, source, re.DOTALL)), None)
    if signed is None:
        return probe or CallProbe()
    return CallProbe(signed, shows_tools=probe is not None and probe.shows_tools, writes_calls=False)


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


def writes_images_of_results(render: Render) -> bool:
    """Return whether a template writes a picture in the result of a tool."""
    text, image = {"type": "text", "text": _CONTENT}, {"type": "image"}
    try:
        without, written = (
            _render(render, [_USER, _calling(takes_text=False), {**_RESULT, "content": content}], True)
            for content in ([text, text], [text, image, text])
        )
    except CallboardError:
        return False
    before, found, after = written.partition(_CONTENT)[0], written.count(_CONTENT), written.rpartition(_CONTENT)[2]
    is_kept = found == 2 and without.startswith(before) and without.endswith(after)
    return is_kept and len(written) > len(without) and "'type'" not in written and '"type": "image"' not in written


def place_of_content(render: Render) -> Place:
    """Return where content next to calls has to stand, so that a template writes it before them.

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


def _calling(takes_text: bool, call_id: str = _IDS[0]) -> dict[str, Any]:
    called = {"name": _NAME, "arguments": json.dumps(_ARGUMENTS) if takes_text else _ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": called}
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
    return text.startswith(after) and _reads(form, text.removeprefix(after), None)


def _likeness(written: str, form: ToolFormat) -> tuple[bool, int]:
    """Return how much of a written call a format would write itself."""
    return form.opening(_NAME) in written, len(form.close) if form.close in written else -1


def _plain_answer(render: Render, before: str) -> str | None:
    """Return the text around the content of an answer without calls; None if the template refuses it."""
    try:
        text = _render(render, [_USER, {"role": "assistant", "content": _CONTENT}], False)
    except CallboardError:
        return None
    return text.removeprefix(before).replace(_CONTENT, " ")


def _reads(form: ToolFormat, written: str, plain: str | None) -> bool:
    """Return whether a format reads exactly this call in a text, and leaves none of it behind.

    What may remain is the text around an answer without calls (`plain`), or another mark for the end of the turn."""
    parser, before, rest, pieces = form.parser(form, {_NAME: _SCHEMA}), "", "", list[CallDelta]()
    for i, char in enumerate(written, 1):
        content, new = parser.push(char, i == len(written))
        pieces += new
        if pieces:
            rest += content
        else:
            before += content
    if [piece.index for piece in pieces if piece.name] != [0] or not _is_json(pieces, _ARGUMENTS):
        return False
    if plain is None or not form.mark:
        return True
    frame, before, rest = (_bare(text) for text in (plain, before, rest))
    return before in frame and (rest in frame or _MARK.fullmatch(rest) is not None)


def _bare(text: str) -> str:
    """Return a text without white space and marks of reasoning."""
    for mark in TOKENS:
        text = text.replace(mark, "")
    return "".join(text.split())


def _is_json(pieces: Sequence[CallDelta], value: object) -> bool:
    try:
        return bool(json.loads("".join(piece.arguments for piece in pieces)) == value)
    except ValueError:
        return False
