"""Chats in channels over HTTP: what a grammar holds, streams of the three APIs, efforts, and past reasoning."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.library.channel_model import harmony_tokenizer, problem_of, read_turn
from runtime.base.model_info import ModelInfo
from runtime.base.types import FinishReason, Request
from runtime.structured.matching.lazy import LazyEngine
from runtime.text.vocabulary import Vocabulary
from tests.support.http.fake_engine import MODEL, FakeEngine, client_of, events_of

pytestmark = pytest.mark.usefixtures("shared_compiler")
TOKENIZER = harmony_tokenizer()
INFO = ModelInfo("f", 320, 4096, TOKENIZER.eos_token_ids, 9, 16, "float32", "cpu")
VOCABULARY = Vocabulary.of(TOKENIZER, INFO)
LAZY = LazyEngine(VOCABULARY)
HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Zürich", "<|call|>"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "About a city.", "parameters": CITY}}
    for name in ("weather", "weather_of", "now")
]


class Channels(FakeEngine):
    """Writes `text`, or random tokens within the grammar of a request. `fits` compares the text with the grammar."""

    def __init__(self, text: str = "", seed: int = 0, most: int = 300, group: int = 1) -> None:
        super().__init__(max_model_len=4096, group=group)
        self.info = INFO
        self._text, self._random, self._most = text, np.random.default_rng(seed), most
        self.fits = False

    def _outputs(self, request: Request):
        script = TOKENIZER.encode(self._text, add_special_tokens=False)
        self.fits = request.params.grammar is None
        if request.params.grammar is not None:
            matcher = LAZY.matcher(request.params.grammar.lark)
            self.fits = matcher.allowed(script) == len(script)
            script = script if self._text else self._drawn(matcher)
        self.script = script
        for output in super()._outputs(request):
            if output.finish_reason and output.token_ids[-1] in TOKENIZER.eos_token_ids:
                output = replace(output, finish_reason=FinishReason.STOP)
            yield output

    def _drawn(self, matcher) -> list[int]:
        script: list[int] = []
        while len(script) < self._most and not matcher.is_finished:
            mask = np.zeros(VOCABULARY.num_words, np.int32)
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            special = [i for i in allowed if i in TOKENIZER.special_ids]
            script.append(int(self._random.choice(special if special and self._random.random() < 0.2 else allowed)))
            matcher.advance(script[-1:])
        return script


def prompt_of(engine: FakeEngine, at: int = -1) -> str:
    return TOKENIZER.decode(engine.requests[at].token_ids, skip_special_tokens=False)


async def post(engine: FakeEngine, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {"model": MODEL, "messages": HI} | fields
    async with client_of(engine, TOKENIZER) as client:
        return await client.post(path, json={k: v for k, v in body.items() if v is not None})


async def fits(text: str, **fields: Any) -> bool:
    engine = Channels(text)
    response = await post(engine, **fields)
    assert response.status_code == 200, response.text
    return engine.fits


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hi!<|return|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Zürich"}<|call|>'
OTHER = ' to=functions.weather_of<|channel|>commentary json<|message|>{"city":"<|call|>"}<|call|>'.replace(
    "<|call|>" + '"}', 'Zürich"}'
)
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
SEVERAL = CALL.replace("<|call|>", "<|end|><|start|>assistant") + OTHER


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({}, [FINAL, ANALYSIS + FINAL, ANALYSIS * 2 + FINAL], [CALL, PREAMBLE + FINAL, "Hi!", ANALYSIS + CALL]),
        (
            {"tools": TOOLS},
            [FINAL, CALL, OTHER, ANALYSIS + OTHER, ANALYSIS + PREAMBLE + CALL, SEVERAL, ANALYSIS + PREAMBLE + FINAL],
            [CALL.replace("weather", "other"), CALL.replace('"Zürich"', "1"), SEVERAL.replace(OTHER, FINAL)],
        ),
        ({"tools": TOOLS, "tool_choice": "none"}, [FINAL, ANALYSIS + FINAL], [CALL]),
        ({"tools": TOOLS, "tool_choice": "required"}, [CALL, ANALYSIS + OTHER, SEVERAL], [FINAL, ANALYSIS + FINAL]),
        ({"tools": TOOLS, "parallel_tool_calls": False}, [CALL, FINAL], [SEVERAL]),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather_of"}}},
            [OTHER, ANALYSIS + OTHER],
            [CALL, FINAL, SEVERAL],
        ),
        ({"response_format": {"type": "json_object"}}, [ANALYSIS + FINAL.replace("Hi!", "{}")], [FINAL, CALL]),
        (
            {"structured_outputs": {"regex": "H.!"}, "tools": TOOLS},
            [ANALYSIS + FINAL, CALL],
            [FINAL.replace("!", "?"), "<|channel|>final<|message|>Hi!"[:-1] + "<|return|>"],
        ),
        ({"reasoning_effort": "none"}, [FINAL], [ANALYSIS + FINAL]),
        ({"chat_template_kwargs": {"enable_thinking": False}}, [FINAL], [ANALYSIS + FINAL]),
    ],
)
async def test_a_grammar_holds_the_format(fields: dict, yes: list[str], no: list[str]):
    for text in yes:
        assert await fits(text, **fields), text
    for text in (*no, "<|start|>", FINAL + "x", FINAL.replace("<|return|>", "<|call|>"), FINAL + "<|endoftext|>x"):
        assert not await fits(text, **fields), text


async def test_marks_in_texts_are_not_marks():
    spelled = [*b"<|end|>"]
    engine = Channels("x")
    await post(engine, response_format={"type": "json_object"})
    matcher = LAZY.matcher(engine.requests[0].params.grammar.lark)
    before = TOKENIZER.encode("<|channel|>analysis<|message|>")
    assert matcher.allowed([*before, *spelled]) == len(before) + len(spelled) - 1
    answer = FakeEngine(max_model_len=4096)
    answer.info = INFO
    body = [*TOKENIZER.encode('<|channel|>final<|message|>{"a": "'), *spelled, *TOKENIZER.encode('"}<|return|>')]
    assert matcher.allowed(body) == len(body)
    answer.script = body
    message = (await post(answer, response_format={"type": "json_object"})).json()["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": "<|end|>"}


@pytest.mark.parametrize("choice", ["auto", "required", None])
async def test_streams_of_all_apis_say_the_same(choice: str | None):
    for seed in range(6):
        tools = {"tools": TOOLS, "tool_choice": choice} if choice else {}
        engine = Channels(seed=seed, group=1 + seed % 3)
        chat = (await post(engine, **tools)).json()["choices"][0]
        turn, script = read_turn(engine.script, TOKENIZER), engine.script
        assert not problem_of(turn, choice == "required", {"weather", "weather_of", "now"})
        reasoning, content, calls = turn.texts("analysis"), turn.texts("commentary", "final"), turn.calls
        message = chat["message"]
        assert (message.get("reasoning", ""), message["content"] or "") == (reasoning, content)
        called = [call["function"] for call in message.get("tool_calls", ())]
        assert [(call["name"], call["arguments"]) for call in called] == calls
        assert chat["finish_reason"] == ("length" if not turn.is_complete else "tool_calls" if calls else "stop")
        events = events_of(await post(Channels(seed=seed, group=2), **tools, stream=True))
        deltas = [each["delta"] for event in events for each in event["choices"]]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == reasoning
        assert "".join(delta.get("content") or "" for delta in deltas) == content
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(piece["arguments"] for piece in pieces) == "".join(arguments for _, arguments in calls)

        functions = [tool["function"] for tool in TOOLS]
        own = {"tools": [{"type": "function", **f, "strict": False} for f in functions], "tool_choice": choice}
        fields = {"messages": None, "input": "hi", **(own if choice else {})}
        again = Channels(seed=seed)
        items = (await post(again, "/v1/responses", **fields)).json()["output"]
        assert again.script == script
        texts = [part["text"] for item in items for part in item.get("content", ())]
        assert sorted("".join(texts)) == sorted(reasoning + content)
        assert [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"] == calls
        streamed = await post(Channels(seed=seed), "/v1/responses", **fields, stream=True)
        assert streamed.text.count("event: response.function_call_arguments.done") == len(calls)

        own = {"tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]}
        own |= {"tool_choice": {"type": {"auto": "auto", "required": "any"}[choice]}} if choice else {}
        again = Channels(seed=seed)
        blocks = (await post(again, "/v1/messages", max_tokens=2000, **(own if choice else {}))).json()["content"]
        assert again.script == script
        assert "".join(b.get("thinking", "") for b in blocks) == reasoning
        assert "".join(b.get("text", "") for b in blocks) == content
        used = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        assert used == [(name, json.loads(arguments)) for name, arguments in calls] or not turn.is_complete


async def test_a_request_or_the_server_turns_the_grammar_off():
    assert await fits("Hi!", channel_grammar=False)
    try:
        TOKENIZER.channel_grammar = False
        assert await fits("Hi!")
        assert not await fits("Hi!", channel_grammar=True)
    finally:
        TOKENIZER.channel_grammar = True


@pytest.mark.parametrize(
    ("effort", "shown"), [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("high", "high"), ("max", "high")]
)
async def test_efforts_reach_the_system_message(effort: str, shown: str):
    engine = Channels(FINAL)
    await post(engine, reasoning_effort=effort)
    await post(engine, "/v1/responses", messages=None, input="hi", reasoning={"effort": effort})
    assert [f"Reasoning: {shown}\n" in prompt_of(engine, at) for at in (0, 1)] == [True, True]
    await post(engine)
    assert "Reasoning: medium\n" in prompt_of(engine)


async def test_builtin_tools_are_refused():
    response = await post(Channels(FINAL), chat_template_kwargs={"builtin_tools": ["browser"]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template_kwargs.builtin_tools")


def call_of(number: int, name: str = "weather") -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": '{"city": "Bern"}'}}


TURN = [
    *HI,
    {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call_of(1), call_of(2, "now")]},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
WRITTEN = (
    "<|start|>assistant<|channel|>analysis<|message|>Hm.{}<|end|>"
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{{"city": "Bern"}}<|call|>'
    '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
    '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{"city": "Bern"}}<|call|>'
    '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
)


async def test_reasoning_before_calls_returns_until_a_final_answer():
    engine = Channels(FINAL)
    await post(engine, messages=TURN, tools=TOOLS)
    assert prompt_of(engine).endswith(WRITTEN.format("\n\nI look.") + "<|start|>assistant")
    answered = [*TURN, {"role": "assistant", "content": "Rain.", "reasoning_content": "So."}, *HI]
    await post(engine, messages=answered, tools=TOOLS)
    assert "Hm." not in prompt_of(engine)
    assert "So." not in prompt_of(engine)
    assert "<|channel|>final<|message|>Rain.<|end|>" in prompt_of(engine)


async def test_past_reasoning_of_the_other_apis():
    engine = Channels(FINAL)
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in (call_of(1), call_of(2, "now"))
    ]
    results = [{"type": "function_call_output", "call_id": i, "output": o} for i, o in (("c2", "noon"), ("c1", "rain"))]
    thoughts = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    items = [{"role": "user", "content": "hi"}, thoughts, *calls, *results]
    await post(engine, "/v1/responses", messages=None, input=items)
    uses = [
        {"type": "tool_use", "id": f"c{i}", "name": name, "input": {"city": "Bern"}}
        for i, name in ((1, "weather"), (2, "now"))
    ]
    back = [{"type": "tool_result", "tool_use_id": i, "content": o} for i, o in (("c2", "noon"), ("c1", "rain"))]
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages = [*HI, {"role": "assistant", "content": [thinking, *uses]}, {"role": "user", "content": back}]
    tools = [{"name": "weather", "input_schema": CITY}]
    await post(engine, "/v1/messages", max_tokens=9, messages=messages, tools=tools)
    for at in (0, 1):
        assert prompt_of(engine, at).endswith(WRITTEN.format("") + "<|start|>assistant")


async def test_a_begun_message_goes_on():
    begun = [*HI, {"role": "assistant", "content": "Hel", "reasoning": "Hm."}]
    engine = Channels("lo.<|return|>")
    answer = await post(engine, messages=begun, continue_final_message=True)
    assert engine.fits
    assert answer.json()["choices"][0]["message"]["content"] == "lo."
    assert prompt_of(engine).endswith("Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hel")
    engine = Channels("<|start|>assistant" + FINAL)
    answer = await post(engine, add_generation_prompt=False)
    assert engine.fits
    assert answer.json()["choices"][0]["message"]["content"] == "Hi!"
