"""Chat templates with tools, answers with calls, and chats over HTTP."""

import httpx

from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, chat, client_of, events_of

QWEN = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}|>"
    "{{ m.content if m.content is not none else '' }}"
    "{% for c in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = QWEN.replace("\n<tool_call>\n", "").replace("\n</tool_call>", "").replace('arguments":', 'parameters":')
# Opens the reasoning itself unless the request turns it off.
THINKING = QWEN + (
    "{% if add_generation_prompt %}{{ '<think>\n' if thinking is not defined or thinking else '<think></think>' }}"
    "{% endif %}"
)
PLAIN = (  # without tools
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "About a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("get_weather", "get_time")
]
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TIME_CALL = CALL.replace("weather", "time")


async def send(engine: FakeEngine, template: str, **fields) -> httpx.Response:
    async with client_of(engine, byte_tokenizer(template)) as client:
        return await client.post("/v1/chat/completions", json=chat(**fields))


def engine_of(text: str, group: int = 1) -> FakeEngine:
    return FakeEngine(text, group=group, max_model_len=4096)


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[0].token_ids).decode()


def summed(events: list[dict], index: int = 0) -> tuple[dict, str]:
    """The message that a stream's deltas add up to, and the finish reason."""
    message: dict = {"role": "assistant", "content": None, "refusal": None}
    finish_reason = None
    for choice in (c for e in events for c in e["choices"] if c["index"] == index):
        assert finish_reason is None
        finish_reason = choice["finish_reason"]
        delta = choice["delta"]
        for name in {"content", "reasoning", "reasoning_content"} & delta.keys():
            if delta[name] is not None:
                message[name] = (message.get(name) or "") + delta[name]
        assert len(delta.get("tool_calls", [0])) == 1
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in piece:
                assert piece == {
                    "index": len(calls),
                    "id": piece["id"],
                    "type": "function",
                    "function": {"name": piece["function"]["name"], "arguments": ""},
                }
                calls.append({k: v for k, v in piece.items() if k != "index"})
            else:
                assert piece["index"] == len(calls) - 1
                assert piece.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return message, finish_reason


def without_ids(message: dict) -> dict:
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


async def answers(template: str, text: str, **fields) -> tuple[dict, str]:
    """Message and finish reason of a plain answer. A streamed answer equals it, however the tokens arrive."""
    body = (await send(engine_of(text), template, **fields)).json()
    choice = body["choices"][0]
    for group in (1, 3, 1000):
        stream_options = {"include_usage": True}
        response = await send(engine_of(text, group), template, stream=True, stream_options=stream_options, **fields)
        *events, last = events_of(response)
        message, finish_reason = summed(events)
        assert without_ids(message) == without_ids(choice["message"])
        assert finish_reason == choice["finish_reason"]
        if group == 1:
            assert last["usage"] == body["usage"]
    return choice["message"], choice["finish_reason"]


def called(message: dict) -> list[tuple[str, str]]:
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
