"""Run llama.cpp's parser cases through Callboard's prompts and parsers.

    python -m tests.support.suites.llama_cpp FOLDER                   passed of run, by template
    python -m tests.support.suites.llama_cpp FOLDER --show LFM2       the differences of these templates

FOLDER is llama.cpp's source, for example `vendor/llama.cpp` of the source package of llama-cpp-python. Each case runs
whole, by characters and in random splittings. It passes if content, reasoning and calls are equal, apart from white
space at the ends of content and reasoning.
"""

import argparse
import json
import random
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from runtime.base.types import CallboardError
from runtime.output.chat_prompt import ChatPrompter
from runtime.output.fields import FieldError, read_options
from runtime.output.message_parser import MessageFormat, MessageParser
from runtime.output.options import ChatOptions
from runtime.text.chat import ChatTemplate
from runtime.text.tokenizer import Tokenizer
from serve_app.apis.chat.messages import ChatMessage
from tests.support.http.fake_engine import EOS, byte_tokenizer
from tests.support.suites.llama_cpp_cases import LlamaCase, cases_of

_SPLITTINGS = 24
_ANSWER = "An answer."
_RAW_REASONING = 0  # llama.cpp's reasoning format that leaves reasoning in the content


class Parsed(NamedTuple):
    """One output's parts."""

    content: str
    reasoning: str
    calls: list[tuple[str, Any]]


class LeftOut(Exception):
    """A case that does not test a parser of Callboard."""


def prompter_of(path: Path) -> ChatPrompter:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    backend = byte_tokenizer()._backend
    template = path.read_text("utf-8")
    return ChatPrompter(
        Tokenizer(backend, bos_token_id=None, eos_token_ids=(EOS,), special_tokens=special, chat_template=template)
    )


def parsed(form: MessageFormat | None, parts: list[str]) -> Parsed:
    if form is None:
        return Parsed("".join(parts).strip(), "", [])
    parser, content, reasoning, calls = MessageParser(form), "", "", list[list[str]]()
    for i, part in enumerate([*parts, ""]):
        message = parser.push(part, i == len(parts))
        content, reasoning = content + message.content, reasoning + message.reasoning
        for piece in message.calls:
            calls += [[piece.name, ""]] if piece.name else []
            calls[-1][1] += piece.arguments
    return Parsed(content.strip(), reasoning.strip(), [(name, _value(arguments)) for name, arguments in calls])


def run(case: LlamaCase, prompter: ChatPrompter) -> tuple[Parsed, Parsed]:
    """Return what was parsed and what llama.cpp expects. Raises LeftOut."""
    fields = case.fields
    if fields["continues"]:
        raise LeftOut("continues an answer that llama.cpp's own renderer began")
    form = _format_of(fields, prompter)
    # An engine stops at the token that ends a turn, and sends no text of it.
    text, expected = fields["input"].removesuffix(end_of_turn(case.template)), fields["expect"]
    whole = parsed(form, [text])
    for parts in (list(text), *(_random_parts(text, seed) for seed in range(_SPLITTINGS))):
        assert parsed(form, parts) == whole, f"case {case.number} depends on the cut"
    reasoning, content = expected["reasoning_content"].strip(), expected["content"].strip()
    if (
        fields["reasoning_format"] == _RAW_REASONING
        and not reasoning
        and whole.reasoning
        and whole.reasoning in content
    ):
        raise LeftOut("wants reasoning within the content")
    calls = [(call["name"], _value(call["arguments"])) for call in expected["tool_calls"]]
    return whole, Parsed(content, reasoning, calls)


def _format_of(fields: dict[str, Any], prompter: ChatPrompter) -> MessageFormat | None:
    tools = [
        {"name": tool["name"], "description": tool["description"], "parameters": json.loads(tool["parameters"] or "{}")}
        for tool in fields["tools"]
    ]
    options: dict[str, Any] = {
        "chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), fields["thinking"]),
        "add_generation_prompt": fields["begins_turn"],
    }
    if tools:
        options["tools"] = [{"type": "function", "function": tool} for tool in tools]
    try:
        messages = [_message(each) for each in fields["messages"]] or [{"role": "user", "content": "Hey there!"}]
        sent = [ChatMessage.model_validate(message).as_template_sees_it() for message in messages]
        return prompter.prompt(sent, read_options(ChatOptions, options)).message_format
    except (FieldError, CallboardError, ValueError) as e:
        raise LeftOut(f"cannot be asked: {str(e).splitlines()[0]}") from e


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    message = {"role": fields["role"], "content": fields["content"] or "\n".join(fields["parts"])}
    if fields["reasoning_content"]:
        message["reasoning_content"] = fields["reasoning_content"]
    if fields["tool_calls"]:
        message["tool_calls"] = [
            {
                "id": call["id"] or "call00000",
                "type": "function",
                "function": {k: call[k] for k in ("name", "arguments")},
            }
            for call in fields["tool_calls"]
        ]
    if fields["role"] == "tool":
        message["tool_call_id"] = fields["tool_call_id"] or "call00000"
    return message


@cache
def end_of_turn(path: Path) -> str:
    """Return the text that a template writes behind an answer; empty if the template refuses the conversation."""
    turns = [{"role": "user", "content": "Hey there!"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = ChatTemplate(path.read_text("utf-8"), {}).render(turns, add_generation_prompt=False)
    except CallboardError:
        return ""
    return text.rpartition(_ANSWER)[2].strip()


def _random_parts(text: str, seed: int) -> list[str]:
    at, parts, draw = 0, list[str](), random.Random(seed)
    while at < len(text):
        end = at + draw.randint(1, 12)
        parts.append(text[at:end])
        at = end
    return parts


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--show", help="print the differences of templates with this in their name")
    options = arguments.parse_args()
    prompters: dict[Path, ChatPrompter] = {}
    passed, run_of, left_out = Counter[str](), Counter[str](), defaultdict[str, list[int]](list)
    for case in cases_of(options.folder):
        name = case.template.stem
        prompter = prompters.setdefault(case.template, prompter_of(case.template))
        try:
            found, expected = run(case, prompter)
        except LeftOut as e:
            left_out[str(e)].append(case.number)
            continue
        run_of[name] += 1
        passed[name] += found == expected
        if found != expected and options.show is not None and options.show.lower() in name.lower():
            print(
                f"{name} {case.number}\n  output   {case.fields['input']!r}\n  expected {expected}\n  found    {found}"
            )
    forms = {path.stem: prompter.tool_call_format for path, prompter in prompters.items()}
    for name in sorted(forms):
        print(f"{name:52} {forms[name]!s:16} {passed[name]:3} of {run_of[name]:3}")
    print(f"{'together':69} {passed.total():3} of {run_of.total():3}")
    for why, numbers in left_out.items():
        print(f"left out, {len(numbers)}: {why}: {', '.join(map(str, numbers))}")


if __name__ == "__main__":
    main()
