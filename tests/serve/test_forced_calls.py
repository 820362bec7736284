"""Calls that a request requires, from an engine that writes any text of their grammar: every call arrives."""

import json
import re
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.support.http.chats import LLAMA, PLAIN, QWEN, prompt_of
from tests.support.http.fake_engine import MODEL, byte_tokenizer, client_of
from tests.support.http.grammar_engine import NAMED, TOOLS, GrammarEngine

pytestmark = pytest.mark.usefixtures("shared_compiler")


def written(engine: GrammarEngine, template: str) -> list[tuple[str, Any]]:
    """The calls in the prompt's last turn and the answer together. They have to be the whole text."""
    text = prompt_of(engine).rpartition("<|assistant|>")[2] + engine.text
    if template == LLAMA:
        bodies = text.split("; ")
    else:
        text = text.strip().removesuffix("\n</tool_call>") + "\n</tool_call>"  # the last mark is optional
        bodies = re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)
        calls = re.split(r"(?<=</tool_call>)\s*", text)
        assert calls == [*(f"<tool_call>\n{body}\n</tool_call>" for body in bodies), ""]
    key = "parameters" if template == LLAMA else "arguments"
    return [(call["name"], call[key]) for call in map(json.loads, bodies)]


async def answered(engine: GrammarEngine, template: str, stream: bool, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        http_client=client_of(engine, byte_tokenizer(template)),
        _strict_response_validation=True,
    )
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, stream=stream, **fields)
    if not stream:
        return answer.choices[0]
    state = ChatCompletionStreamState()
    async for chunk in answer:
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0]


@pytest.mark.parametrize("parallel", [None, True, False])
@pytest.mark.parametrize("num_tools", [1, 3])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("template", [QWEN, LLAMA, PLAIN], ids=["hermes", "llama3", "generic"])
async def test_every_call_arrives(template: str, choice: Any, num_tools: int, parallel: bool | None):
    fields: dict[str, Any] = {"tools": TOOLS[:num_tools], "tool_choice": choice}
    fields |= {} if parallel is None else {"parallel_tool_calls": parallel}
    names, most = set(), 0
    for seed in range(16):
        engine = GrammarEngine(seed)
        answer = await answered(engine, template, stream=seed % 2 == 1, **fields)
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
        assert calls == written(engine, template)
        assert answer.message.content is None
        assert answer.finish_reason == "tool_calls"
        assert all(arguments in ({"a": 1}, {"a": "}"}) for _, arguments in calls)
        names |= {name for name, _ in calls}
        most = max(most, len(calls))
    only_one = parallel is False or choice is NAMED or (template is PLAIN and parallel is None)
    assert (most == 1) == only_one
    assert names <= ({"add"} if num_tools == 1 or choice is NAMED else {tool["function"]["name"] for tool in TOOLS})
