"""Prompts, calls and grammars of templates with the structure of published ones that are not in the tree."""

import json
from typing import Any

import pytest

from runtime.base.model_info import ModelInfo
from runtime.output.chat_prompt import ChatPrompt, ChatPrompter
from runtime.output.fields import FieldError, read_options
from runtime.output.message_parser import MessageParser
from runtime.output.options import ChatOptions
from runtime.structured.grammar import compiled
from runtime.structured.matching.lazy import LazyEngine
from runtime.text.chat import ChatTemplate
from runtime.text.tool_calls import GENERIC
from runtime.text.tool_calls.harmony import with_special
from runtime.text.vocabulary import Vocabulary
from serve_app.apis.chat.messages import ChatMessage
from tests.support.http.fake_engine import EOS
from tests.support.http.own_templates import OWN_TEMPLATES, own_tokenizer

CITY, DAYS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
PLACE = {"type": "object", "properties": {"y": {"type": "number"}, "x": CITY}, "additionalProperties": False}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {
        "name": name,
        "description": f"About {name}.",
        "parameters": parameters | {"additionalProperties": False},
    }
    return {"type": "function", "function": function | {"strict": True}}


TOOLS = [tool("weather", city=CITY, at=PLACE, days=DAYS), tool("weather_now"), tool("weather_of", city=CITY)]
HI, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "More?"}
ANSWER = {"role": "assistant", "content": "Warm."}


def call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": text}}


ARGUMENTS = {"city": "Zürich", "at": {"y": 2.5, "x": "[1]"}, "days": ["Mon, Tue", "Sun"]}
CALL, NOW = call("weather", ARGUMENTS), call("weather_now", {})
RESULT = {"role": "tool", "tool_call_id": "call_weather", "content": "21 °C"}
ON = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}


def calling(*calls: dict[str, Any], **fields: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [*calls], **fields}


class Chat:
    """Prompts, parsed outputs and grammars of one template."""

    def __init__(self, name: str) -> None:
        self.name, self.tokenizer = name, own_tokenizer(name)
        self.prompter = ChatPrompter(self.tokenizer)

    def prompt(self, messages: list[dict[str, Any]], **fields: Any) -> ChatPrompt:
        sent = [ChatMessage.model_validate(message).as_template_sees_it() for message in messages]
        return self.prompter.prompt(sent, read_options(ChatOptions, fields))

    def written(self, messages: list[dict[str, Any]], last: dict[str, Any], **fields: Any) -> str:
        """Return the template's text of a last message after its prompt, without the end of the turn."""
        before = self.prompt(messages, **fields).text
        text = self.prompt([*messages, last], add_generation_prompt=False, **fields).text
        for end in ("</s>", "<turn|>\n", "<|tool_response>", "<｜end▁of▁sentence｜>"):
            text = text.removesuffix(end)
        if not text.startswith(before):  # the prompt opens reasoning, and this message has none
            before = before[: before.rfind("<think>")]
        return text.removeprefix(before)

    def parsed(self, prompt: ChatPrompt, parts: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
        assert prompt.message_format is not None
        parser, content, thoughts, calls = MessageParser(prompt.message_format), "", "", list[list[str]]()
        for i, part in enumerate([*parts, ""]):
            message = parser.push(part, i == len(parts))
            content, thoughts = content + message.content, thoughts + message.reasoning
            for piece in message.calls:
                calls += [[piece.name, ""]] if piece.name else []
                calls[-1][1] += piece.arguments
        return content, thoughts, [(name, json.loads(arguments)) for name, arguments in calls]

    def allows(self, messages: list[dict[str, Any]], text: str, **fields: Any) -> bool:
        grammar = self.prompter.grammar(
            read_options(ChatOptions, fields), self.prompt(messages, **fields).message_format
        )
        assert grammar is not None
        info = ModelInfo("f", self.tokenizer.vocab_size + 1, 4096, (EOS,), 9, 16, "float32", "cpu")
        matcher = LazyEngine(Vocabulary.of(self.tokenizer, info)).matcher(compiled(grammar.spec).lark)
        tokens = self.tokenizer.encode(text, add_special_tokens=False) + [EOS] * (self.name != "gpt-oss")
        return matcher.allowed(tokens) == len(tokens)


WITH_CALLS = [name for name in OWN_TEMPLATES if name not in ("deepseek-v2", "deepseek-r1")]
WITHOUT_REASONING = {"lfm-2", "xlam", "olmo-3", "chatglm-4", "granite-3"}
WITHOUT_SWITCH = {*WITHOUT_REASONING, "lfm-2.5", "seed-oss", "minimax-m2", "cohere", "deepseek-v2", "deepseek-r1"}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_that_the_template_writes_is_read(name: str):
    chat = Chat(name)
    for calls in ([CALL], [NOW], [CALL, NOW]):
        for kwargs in ({}, ON):
            fields = {"tools": TOOLS} | kwargs
            text, prompt = chat.written([HI], calling(*calls), **fields), chat.prompt([HI], **fields)
            if name == "gpt-oss":
                text = with_special(text)
            want = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]
            assert chat.parsed(prompt, [text]) == ("", "", want)
            assert chat.parsed(prompt, [*text]) == ("", "", want)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_grammar_allows_the_call_of_the_template(name: str):
    chat = Chat(name)
    for calls in ([CALL], [NOW], [CALL, NOW][: 1 if name == "gpt-oss" else 2]):  # its calls end a turn in prompts
        for kwargs in ({}, ON):
            fields: dict[str, Any] = {"tools": TOOLS} | kwargs
            text = chat.written([HI], calling(*calls), **fields)
            assert chat.allows([HI], text, **fields)
            forced = chat.prompt([HI], tool_choice="required", **fields).text
            opening = forced[forced.rfind("hi") :]
            rest = chat.prompt([HI, calling(*calls)], add_generation_prompt=False, **fields).text
            rest = rest[rest.rfind("hi") :] if name != "gpt-oss" else opening + text
            for end in ("</s>", "<turn|>\n", "<|tool_response>", "<｜end▁of▁sentence｜>"):
                rest = rest.removesuffix(end)
            if rest.startswith(opening):  # two write empty reasoning first, or none
                assert chat.allows([HI], rest.removeprefix(opening), tool_choice="required", **fields)
            else:
                assert name in ("glm-4.5", "minimax-m2")


@pytest.mark.parametrize("name", sorted({*WITH_CALLS, "deepseek-r1"} - WITHOUT_REASONING - {"cohere"}))
def test_json_may_follow_reasoning(name: str):
    chat, fields = Chat(name), {"response_format": {"type": "json_object"}} | ON
    answer = {"role": "assistant", "content": '{"a": 1}'}
    thinking = answer | {"reasoning_content": "Hm."}
    opened = chat.prompt([HI], **fields).message_format.in_reasoning
    text = chat.written([HI], thinking, **fields)
    if name.startswith("deepseek") and opened:  # these templates leave out past reasoning
        text = f"Hm.</think>{text.rpartition('</think>')[2]}"
    assert text.endswith('{"a": 1}') or name == "gpt-oss"
    assert chat.allows([HI], text, **fields)
    assert not chat.allows([HI], text.replace('"a"', "a"), **fields)


def test_json_comes_at_once_where_reasoning_is_off():
    reasoning = {"glm-4.5": "<think>Hm.</think>", "gemma4": "<|channel>thought\nHm.\n<channel|>"}
    for name, before in reasoning.items():
        chat, fields = Chat(name), {"response_format": {"type": "json_object"}}
        assert chat.allows([HI], before + "{}", **fields)
        for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            assert not chat.allows([HI], before + "{}", **fields, **off)
            assert chat.allows([HI], "{}", **fields, **off)


def test_reasoning_may_come_before_json_or_calls():
    chat, fields = Chat("glm-4.5"), {"response_format": {"type": "json_object"}, "tools": TOOLS}
    for text in (chat.written([HI], calling(NOW), tools=TOOLS), '\n<think>Hm.</think>\n{"a": 1}', "{}"):
        assert chat.allows([HI], text, **fields)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather_of"}}])
def test_a_required_call_closes_reasoning_as_the_template_does(choice: Any):
    prompt = Chat("glm-4.7").prompt([HI], tools=TOOLS, tool_choice=choice).text
    assert prompt.endswith(
        "<|user|>hi<|assistant|></think><tool_call>" + ("" if choice == "required" else "weather_of")
    )


@pytest.mark.parametrize("name", ["glm-4.7", "glm-4.5"])
def test_unbound_arguments_begin_behind_a_whole_name(name: str):
    chat = Chat(name)
    unbound = {"type": "function", "function": {"name": "weather", "parameters": {"minProperties": 1}}}
    fields = {"tools": [TOOLS[2], unbound], "reasoning_effort": "none"}
    text = chat.written([HI], calling(call("weather", {"a": "<b>"})), **fields)
    assert chat.allows([HI], text, **fields)
    assert not chat.allows([HI], text.replace("<tool_call>weather", "<tool_call>weathers"), **fields)


PLACED = {
    "gemma4": "<|channel>thought\nHm.\n<channel|>I look.<|tool_call>",
    "gemma4-revised": "<|channel>thought\nHm.\n\nI look.\n<channel|><|tool_call>",
    "gemma4-release": "I look.<turn|>\n<|turn>model\n<|tool_call>",
}


@pytest.mark.parametrize("name", PLACED)
def test_content_stands_before_its_calls(name: str):
    """These templates write the content of a message with calls behind the results, and then begin no turn."""
    chat = Chat(name)
    plain = chat.prompt([HI, calling(NOW), RESULT | {"tool_call_id": NOW["id"]}]).text
    messages = [HI, calling(NOW, content="I look.", reasoning_content="Hm."), RESULT | {"tool_call_id": NOW["id"]}]
    text = chat.prompt(messages).text
    assert f"<|turn>model\n{PLACED[name]}call:weather_now" in text
    tail = plain[plain.find("call:weather_now") :]
    assert tail.endswith("<tool_response|>")
    assert text.endswith(tail)


def test_gemma_writes_arguments_by_name_and_in_its_notation():
    chat = Chat("gemma4")
    call = 'call:weather{at:{x:<|"|>[1]<|"|>,y:2.5},city:<|"|>Zürich<|"|>,days:[<|"|>Mon, Tue<|"|>,<|"|>Sun<|"|>]}'
    text = f"<|tool_call>{call}<tool_call|>"
    assert chat.written([HI], calling(CALL), tools=TOOLS) == text
    assert chat.allows([HI], text, tools=TOOLS)
    for wrong in (
        ("2.5", '<|"|>'),
        ("[<|", "[1,<|"),
        ('<|"|>Mon, Tue<|"|>', '"Mon"'),
        (",y:", ",z:"),
        ("days:", "day:"),
    ):
        assert not chat.allows([HI], text.replace(*wrong), tools=TOOLS)
    assert chat.allows([HI], '<|tool_call>call:weather{at:{},city:<|"|><|"|>,days:[]}<tool_call|>', tools=TOOLS)
    wide = tool("find", tags={"type": "array", "items": {"type": "string"}, "maxItems": 2})  # only JSON can follow it
    assert chat.allows([HI], '<|tool_call>call:find{tags:["a", "b"]}<tool_call|>', tools=[wide])


def test_no_instructions_are_lost_in_channels():
    """gpt-oss's template shows a system message only at the head."""
    chat = Chat("gpt-oss")
    system, developer = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}
    for messages in ([system, developer, HI], [system, HI, developer], [system, HI, ANSWER, developer, MORE]):
        text = chat.prompt(messages).text
        assert text.count("<|start|>developer<|message|>Be brief.\n\nBe kind.<|end|>") == 1
        assert text.count("Be kind.") == 1
    assert "<|start|>developer<|message|>Be kind.<|end|>" in chat.prompt([HI, developer]).text


@pytest.mark.parametrize("name", ["glm-4.5", "glm-4.7", "gemma4", "gemma4-release", "deepseek-v3.1", "gpt-oss"])
def test_arguments_that_are_no_object_do_not_end_a_chat(name: str):
    """A model may write them, and a client sends them back."""
    chat, result = Chat(name), RESULT | {"tool_call_id": NOW["id"]}
    assert "oops" in chat.prompt([HI, calling(call("weather_now", "oops")), result], tools=TOOLS).text
    empty = chat.prompt([HI, calling(call("weather_now", "")), result], tools=TOOLS).text
    assert empty == chat.prompt([HI, calling(NOW), result], tools=TOOLS).text


def test_tools_are_described_where_only_calls_have_a_format():
    """DeepSeek V3.1's template writes calls and no tools."""
    chat, system = Chat("deepseek-v3.1"), {"role": "system", "content": "Be brief."}
    assert chat.prompter.tool_call_format == "deepseek_v31"
    text = chat.prompt([system, HI], tools=TOOLS).text
    head, _, rest = text.partition("<｜User｜>")
    assert all(each in head for each in ('"name": "weather_now"', "<｜tool▁sep｜>", "Be brief."))
    assert rest == "hi<｜Assistant｜></think>"
    text = chat.prompt([HI, calling(CALL, NOW), RESULT, calling(NOW), RESULT], tools=TOOLS).text
    begin, end = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    assert text.count(begin) == 2 + 2  # two in the description
    assert f"{begin}weather<｜tool▁sep｜>{CALL['function']['arguments']}{end}<｜tool▁call▁begin｜>weather_now" in text
    assert text.endswith("<｜tool▁output▁end｜>")


def test_a_template_needs_a_second_round_for_its_own_calls():
    """DeepSeek R1's template leaves out the marks of later calls."""
    template = ChatTemplate(OWN_TEMPLATES["deepseek-r1"], {"bos_token": "<s>"})
    assert template.tool_format is GENERIC
    chat = Chat("deepseek-r1")
    text = chat.prompt([HI, calling(NOW), RESULT, calling(NOW), RESULT], tools=TOOLS).text
    assert text.count('<tool_call>\n{"name": "weather_now", "arguments": {}}\n</tool_call><｜end▁of▁sentence｜>') == 2
    assert text.endswith("<｜Assistant｜><think>\n")


@pytest.mark.parametrize("name", OWN_TEMPLATES)
def test_efforts_turn_reasoning_on_and_off(name: str):
    chat = Chat(name)
    shown = {}
    for effort in ("none", "high"):
        try:
            shown[effort] = chat.prompt([HI], reasoning_effort=effort).text
        except FieldError:
            assert name in WITHOUT_SWITCH  # always, or never
    if shown and name not in WITHOUT_SWITCH:
        assert shown["none"] != shown["high"]


HISTORIES = {
    "lfm-2": (
        'assistant\n<|tool_call_start|>[weather(city="Zürich"), weather_now()]<|tool_call_end|></s><|im_start|>tool\n'
        "<|tool_response_start|>21 °C<|tool_response_end|></s>"
    ),
    "granite-3": (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Zürich"}}, '
        '{"name": "weather_now", "arguments": {}}]</s>'
        "<|start_of_role|>tool<|end_of_role|>21 °C</s>"
    ),
    "olmo-3": (
        '<function_calls>weather(city="Zürich")\nweather_now()</function_calls></s><|im_start|>environment\n21 °C</s>'
    ),
    "chatglm-4": '<|assistant|>weather\n{"city": "Zürich"}<|assistant|>weather_now\n{}<|observation|>\n21 °C',
    "kimi-k2": (
        '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Zürich"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.weather_now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|></s><|im_tool|>tool<|im_middle|>"
        "## Return of functions.weather:0, functions.weather:0\n21 °C</s>"
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_past_calls_have_the_form_of_the_model(name: str):
    """These templates write no calls, or the ids that a client sends."""
    chat = Chat(name)
    messages = [HI, calling(call("weather", {"city": "Zürich"}), NOW), RESULT, ANSWER, MORE]
    text = chat.prompt(messages, tools=TOOLS).text
    assert HISTORIES[name] in text
    if name == "kimi-k2":
        again = chat.prompt([*messages, calling(NOW)], tools=TOOLS, add_generation_prompt=False).text
        assert "<|tool_call_begin|>functions.weather_now:2<|" in again
    assert chat.prompt([HI, calling(call("weather", "oops")), RESULT]).text.count("oops") == 1
