"""Formats of calls with special tokens as marks: grammars write them, and find calls and answers after them."""

import json
from typing import Any

import pytest

from runtime.structured.matching.lazy import LazyEngine
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import FORMATS
from runtime.text.vocabulary import SPECIAL_BYTES
from tests.serve.test_tool_call_formats import tokenizer_of
from tests.support.http.chats import THINKING
from tests.support.http.fake_engine import EOS, MODEL, FakeEngine, client_of
from tests.support.http.grammar_engine import NAMED, TOOLS, GrammarEngine

pytestmark = pytest.mark.usefixtures("shared_compiler")
NAMES = [
    *("hermes", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "qwen3_coder", "glm45", "glm47"),
    *("lfm2", "olmo3", "granite", "phi4_mini", "kimi_k2", "seed_oss", "deepseek_v32", "minimax_m1", "minimax_m2"),
    *("cohere", "apertus", "tool_calls", "nemotron", "functionary_v31"),
]
THINK = ["<think>", "</think>"]
LAZY = LazyEngine(SPECIAL_BYTES)
CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 3}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT = [{"type": "function", "function": {"name": "add", "parameters": CLOSED, "strict": True}}]
CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]',
    "mistral_v11": '[TOOL_CALLS]add[ARGS]{"a": 2}',
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "lfm2": "<|tool_call_start|>[add(a=2)]<|tool_call_end|>",
    "olmo3": '<function_calls>add(a=2, b="x")</function_calls>',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 2}}]',
    "phi4_mini": '<|tool_call|>[{"name": "add", "arguments": {"a": 2}}]<|/tool_call|>',
    "kimi_k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:12<|tool_call_argument_begin|>{"a": 2}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=add>\n<parameter=a>2</parameter>\n<parameter=b>\n<b>\n</parameter>\n</function>\n"
        "</seed:tool_call>"
    ),
    "deepseek_v32": (
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">2'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true"><b></｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 2}}\n]<|END_ACTION|>'
    ),
    "apertus": '<|tools_prefix|>[{"add": {"a": 2}}]<|tools_suffix|>',
    "tool_calls": '<tool_calls>[{"name": "add", "arguments": {"a": 2}}]</tool_calls>',
    "minimax_m1": '<tool_calls>\n{"name": "add", "arguments": {"a": 2}}\n</tool_calls>',
    "gemma4": '<|tool_call>call:add{a:2,b:<|"|><b>}<|"|>}<tool_call|>',
    "glm47": (
        "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value><arg_key>b</arg_key><arg_value><b>\n</arg_value>"
        "</tool_call>"
    ),
    "glm45": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value><b>\n</arg_value>\n</tool_call>"
    ),
}


def special_tokenizer(name: str) -> Tokenizer:
    tokenizer = tokenizer_of(name, [*dict.fromkeys((*THINK, *FORMATS[name].marks))])
    assert max(tokenizer.special_ids) < len(SPECIAL_BYTES.tokens) - 1
    return tokenizer


def fits(engine: FakeEngine, tokenizer: Tokenizer, text: str) -> bool:
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    return LAZY.matcher(grammar.lark).allowed(tokens) == len(tokens)


async def post(engine: FakeEngine, tokenizer: Tokenizer, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    async with client_of(engine, tokenizer) as client:
        return (await client.post("/v1/chat/completions", json=body)).json()


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("name", NAMES)
async def test_forced_calls_have_special_marks(name: str, choice: Any):
    tokenizer, several = special_tokenizer(name), 0
    for seed in range(12):
        engine = GrammarEngine(seed)
        choices = (await post(engine, tokenizer, tools=TOOLS, tool_choice=choice))["choices"]
        calls = [call["function"] for call in choices[0]["message"]["tool_calls"]]
        assert calls
        assert {call["name"] for call in calls} <= ({"add"} if choice is NAMED else {"add", "add_all", "sub"})
        assert all(json.loads(call["arguments"]) in ({"a": 1}, {"a": "}"}) for call in calls)
        several += len(calls) > 1
        prompt = tokenizer.decode(engine.requests[0].token_ids, skip_special_tokens=False)
        assert FORMATS[name].begin in prompt or FORMATS[name].arguments is not None  # these need JSON for "}"
    assert bool(several) == (choice == "required")


@pytest.mark.parametrize("name", CALLS)
async def test_strict_functions_follow_special_marks(name: str):
    tokenizer, engine, call = special_tokenizer(name), FakeEngine("x", max_model_len=4096), CALLS[name]
    assert "choices" in await post(engine, tokenizer, tools=STRICT)
    thoughts = "<think>Hm.</think>"
    for text in ("", "Hi.", call, f"Now.\n{call}", f"{thoughts}Hi.", f"{thoughts}\n\n{call}"):
        assert fits(engine, tokenizer, text), text
    for text in (call.replace("2", "4"), call.replace("add", "sub"), f"{thoughts}{call.replace('2', 'x')}"):
        assert not fits(engine, tokenizer, text), text


@pytest.mark.parametrize("name", CALLS)
async def test_a_json_answer_beside_special_marks(name: str):
    tokenizer, engine = special_tokenizer(name), FakeEngine("x", max_model_len=4096)
    await post(engine, tokenizer, tools=STRICT, response_format={"type": "json_object"})
    for text in ("{}", CALLS[name]):
        assert fits(engine, tokenizer, text), text
    for text in ("Hi.", CALLS[name].replace("2", "4")):
        assert not fits(engine, tokenizer, text), text


async def test_an_answer_follows_a_special_end_of_reasoning():
    tokenizer, engine = special_tokenizer("hermes"), FakeEngine("x", max_model_len=4096)
    tokenizer.chat_template = THINKING
    assert "choices" in await post(engine, tokenizer, response_format={"type": "json_object"})
    assert fits(engine, tokenizer, 'Hm. {</think>\n\n{"a": 1}')
    assert not fits(engine, tokenizer, "Hm.</think>a")
    assert not fits(engine, tokenizer, "{}")
