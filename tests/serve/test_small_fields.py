"""The fields of OpenAI, vLLM and SGLang that their clients send now and then, by OpenAI's client."""

import asyncio
import re
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import AddedToken

from runtime.base.types import ThinkingBudget
from runtime.text.tokenizer import Tokenizer
from runtime.text.vocabulary import BYTES
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.serve.test_tool_call_formats import HARMONY
from tests.support.http.chats import CALL, QWEN, THINKING, TOOLS, engine_of
from tests.support.http.fake_engine import EOS, MODEL, FakeEngine, byte_tokenizer, chat, client_of
from tests.support.http.grammar_engine import GrammarEngine
from tests.support.structured.cases import BYTE_ENGINE

EFFORT = QWEN + "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"


def client(engine: FakeEngine, template: str = QWEN) -> openai.AsyncOpenAI:
    http = client_of(engine, byte_tokenizer(template))
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)


def prompts(engine: FakeEngine) -> list[str]:
    return [bytes(request.token_ids).decode() for request in engine.requests]


async def test_prompts_and_limits_by_other_names():
    engine = FakeEngine()
    one: Any = {"prompt_token_ids": [97, 98]}
    for prompt in (one, [one, {"prompt_token_ids": [99]}]):
        answer = await client(engine).completions.create(
            model=MODEL, prompt=prompt, max_tokens=9, extra_body={"max_completion_tokens": 2}
        )
        assert answer.usage.completion_tokens == 2 * len(answer.choices)
    assert prompts(engine) == ["ab", "ab", "c"]
    with pytest.raises(openai.BadRequestError, match=r"prompt\.prompt_token_ids is missing"):
        await client(engine).completions.create(model=MODEL, prompt={"prompt": "a"})


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_as_ids(stream: bool):
    extra = {"return_tokens_as_token_ids": True, "return_prompt_token_ids": True, "prompt_logprobs": None}
    made = await client(FakeEngine("x")).completions.create(
        model=MODEL, prompt="a", logprobs=1, stream=stream, extra_body=extra
    )
    first = await anext(aiter(made)) if stream else made
    logprobs = first.choices[0].logprobs
    assert logprobs.tokens[0] == "token_id:120"
    assert set(logprobs.top_logprobs[0]) == {"token_id:65", "token_id:120"}
    assert first.choices[0].prompt_token_ids == [97]
    assert not hasattr(first.choices[0], "token_ids")
    made = await client(FakeEngine("x")).chat.completions.create(
        **chat(), logprobs=True, stream=stream, extra_body=extra
    )
    chunks = [chunk async for chunk in made] if stream else [made]
    assert bytes(chunks[0].prompt_token_ids).endswith(b"<|assistant|>")
    (entry, *_) = next(c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs)
    assert (entry.token, entry.bytes) == ("token_id:120", [120])


async def test_prompt_logprobs_of_a_chat():
    answer = await client(FakeEngine()).chat.completions.create(**chat(), extra_body={"prompt_logprobs": 1})
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


async def test_allowed_tools_can_be_a_subset():
    engine = engine_of(CALL)
    allowed: dict[str, Any] = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}

    async def answer() -> Any:
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        made = await client(engine).chat.completions.create(**chat(), tools=TOOLS, tool_choice=choice)
        return made.choices[0].message

    assert (await answer()).tool_calls[0].function.name == "get_weather"
    assert "get_weather" in prompts(engine)[0]
    assert "get_time" not in prompts(engine)[0]
    allowed["mode"] = "required"
    await answer()
    assert prompts(engine)[1] == prompts(engine)[0] + '<tool_call>\n{"name": "get_weather", "arguments":'
    allowed["tools"][0]["function"]["name"] = "other"
    with pytest.raises(openai.BadRequestError, match='has "other", which no tool has'):
        await answer()
    plain = await client(FakeEngine()).chat.completions.create(**chat(), tools=[], tool_choice="auto")
    assert plain.choices[0].message.content == "Hello, wörld!"


@pytest.mark.parametrize(
    ("template", "effort", "end"),
    [(EFFORT, "high", "(high)"), (THINKING, "none", "<think></think>"), (QWEN, "none", "<|assistant|>")],
)
async def test_effort_is_passed_to_the_template(template: str, effort: Any, end: str):
    engine = FakeEngine()
    await client(engine, template).chat.completions.create(**chat(), reasoning_effort=effort)
    assert prompts(engine)[0].endswith(end)


async def test_budget_of_reasoning():
    async def budget_of(template: str, **fields: Any) -> ThinkingBudget | None:
        engine = FakeEngine()
        await client(engine, template).chat.completions.create(**chat(), extra_body=fields)
        return engine.requests[-1].params.thinking

    close = tuple(b"</think>")
    assert await budget_of(THINKING, thinking_token_budget=5) == ThinkingBudget(5, close, None, True)
    closed = {"thinking_token_budget": 0, "chat_template_kwargs": {"thinking": False}}
    assert await budget_of(THINKING, **closed) == ThinkingBudget(0, close, None, False)
    for template, number in ((THINKING, -1), (THINKING, None), (QWEN, 5), (HARMONY, 5)):
        assert await budget_of(template, thinking_token_budget=number) is None
    answer = await client(FakeEngine(), HARMONY).chat.completions.with_raw_response.create(
        **chat(), extra_body={"thinking_token_budget": 5}
    )
    assert answer.headers["x-callboard-ignored-fields"] == "thinking_token_budget"
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        await budget_of(THINKING, thinking_token_budget=-2)


async def test_parts_and_reasoning_of_other_apis():
    engine = FakeEngine()
    template = "{% for m in messages %}{{ m.content }}({{ m.reasoning_content }}){% endfor %}"
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}, {"type": "text", "text": "c"}]
    messages: Any = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": "Hm."},
        {"role": "assistant", "reasoning": "Hm.", "reasoning_content": "Ah."},
    ]
    await client(engine, template).chat.completions.create(model=MODEL, messages=messages)
    assert prompts(engine) == ["a\nb\nc()No.(Hm.)(Ah.)"]
    messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    with pytest.raises(openai.BadRequestError, match=re.escape("messages.3.content.0.type")):
        await client(engine, template).chat.completions.create(model=MODEL, messages=messages)


async def test_a_prediction_reaches_the_lookup_of_ngrams():
    engine = FakeEngine()
    for draft in ("ngram", "a-model"):
        app = build_http_app(Service(engine, byte_tokenizer(), MODEL, draft))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        asked = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)
        parts: Any = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]
        answer = await asked.chat.completions.with_raw_response.create(
            **chat(), prediction={"type": "content", "content": parts}
        )
        is_used = draft == "ngram"
        assert bytes(engine.requests[-1].prediction) == (b"Hello!" if is_used else b"")
        assert answer.headers.get("x-callboard-ignored-fields") == (None if is_used else "prediction")


async def test_a_completion_between_two_texts():
    marks = "<fim_prefix>", "<fim_suffix>", "<fim_middle>"
    backend = byte_tokenizer()._backend
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=(EOS,), special_tokens={}, chat_template=None)
    first, second, third = (tokenizer.token_to_id(mark) for mark in marks)
    engine = FakeEngine()
    http = client_of(engine, tokenizer)
    asked = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)
    for prompt in ("ab", [97, 98]):
        await asked.completions.create(model=MODEL, prompt=prompt, suffix="c")
        assert engine.requests[-1].token_ids == [first, 97, 98, second, 99, third]
        assert set(engine.requests[-1].params.stop_token_ids) == {first, second, third}
    with pytest.raises(openai.BadRequestError, match="suffix cannot be combined with echo"):
        await asked.completions.create(model=MODEL, prompt="ab", suffix="c", echo=True)
    with pytest.raises(openai.BadRequestError, match="lacks fill-in-the-middle marks"):
        await client(engine).completions.create(model=MODEL, prompt="ab", suffix="c")


async def test_allowed_token_ids_reach_the_engine():
    engine = FakeEngine()
    await client(engine).chat.completions.create(**chat(), extra_body={"allowed_token_ids": [97, 98]})
    assert engine.requests[0].params.allowed_token_ids == (97, 98)
    for fields, says in (({"allowed_token_ids": [999]}, "999"), ({"allowed_token_ids": [1], "regex": "a"}, "regex")):
        with pytest.raises(openai.BadRequestError, match=rf"allowed_token_ids.*{says}"):
            await client(engine).chat.completions.create(**chat(), extra_body=fields)


async def test_log_probabilities_by_token_id():
    fields = {"logprob_token_ids": [97, 98]}
    asked = {**chat(), "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    answer = await client(FakeEngine()).chat.completions.create(**asked, extra_body=fields)
    top = answer.choices[0].logprobs.content[0].top_logprobs
    assert [(entry.token, entry.logprob) for entry in top] == [("A", -1.5), ("a", -9.5), ("b", -9.5)]
    of_prompt = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    answer = await client(FakeEngine()).completions.create(**of_prompt, logprobs=0, extra_body=fields)
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -9.5, "b": -9.5, "H": -0.5}]
    for wrong, says in (({**fields, "logprobs": None}, "send logprobs"), ({"logprob_token_ids": [999]}, "999")):
        with pytest.raises(openai.BadRequestError, match=f"logprob_token_ids.*{says}"):
            await client(FakeEngine()).completions.create(**of_prompt, logprobs=0, extra_body=wrong)


async def test_bad_words_never_appear():
    engine = GrammarEngine(seed=1)
    answer = await client(engine).completions.create(
        model=MODEL, prompt="a", max_tokens=400, extra_body={"bad_words": ["cat", "e", "ä\n"]}
    )
    assert answer.choices[0].text == engine.text
    assert "e" not in engine.text
    matcher, mask = BYTE_ENGINE.matcher(engine.requests[0].params.grammar.lark), np.zeros(BYTES.num_words, np.int32)
    allowed = []
    for byte in b"cca":
        matcher.advance([byte])
        matcher.fill(mask)
        allowed.append({*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()})
    everything = {*b"abcdfghijklmnopqrstuvwxyz \n", EOS}
    assert [everything - each for each in allowed] == [set(), set(), {ord("t")}]
    form: Any = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="response_format does; send one of them"):
        await client(engine).chat.completions.create(**chat(), response_format=form, extra_body={"bad_words": ["a"]})


async def test_routes_that_watch_a_server():
    engine = FakeEngine(delay_s=60)
    async with client_of(engine) as http:
        assert (await http.get("/load")).json() == {"server_load": 0}
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
        while not engine.num_running:
            await asyncio.sleep(0)
        assert (await http.get("/load")).json() == {"server_load": 1}
        asked.cancel()
        assert [(await http.request(method, "/ping")).status_code for method in ("GET", "POST")] == [200, 200]
        engine.reason = "The engine is away."
        assert (await http.get("/ping")).status_code == 503
        info = (await http.get("/server_info")).json()
        assert (info["model"], info["max_model_len"], info["system_fingerprint"]) == (MODEL, 128, "fp_f")


async def test_a_model_has_a_root_and_permissions():
    (model,) = (await client(FakeEngine()).models.list()).data
    assert (model.root, model.parent) == (MODEL, None)
    assert model.permission[0]["allow_sampling"]
