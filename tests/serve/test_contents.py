"""Contents of messages over HTTP: special tokens that they spell, and parts."""

import pytest
import tokenizers

from runtime.text.tokenizer import Tokenizer
from tests.support.http.fake_engine import EOS, MODEL, FakeEngine, byte_tokenizer, client_of

TEMPLATE = "{% for m in messages %}<eos>{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
TEXT, PARTS = "a<eos>b", [{"type": "text", "text": "a<e"}, {"type": "text", "text": "os>b"}]
BODIES = {
    "/v1/chat/completions": lambda content: {"messages": [{"role": "user", "content": content}], "max_tokens": 2},
    "/v1/messages": lambda content: {"messages": [{"role": "user", "content": content}], "max_tokens": 2},
    "/v1/responses": lambda content: {"input": [{"role": "user", "content": content}], "max_output_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("content", "want"), [(TEXT, b"[a<eos>b]"), (PARTS, b"[a<e][os>b]")])
async def test_contents_are_text_and_parts_stay_parts(path: str, content: object, want: bytes):
    engine = FakeEngine()
    async with client_of(engine, byte_tokenizer(TEMPLATE)) as client:
        response = await client.post(path, json={"model": MODEL, **BODIES[path](content)})
    assert response.status_code == 200, response.text
    assert list(engine.requests[0].token_ids) == [EOS, *want]


async def test_ollamas_chats_are_text():
    engine = FakeEngine()
    body = {"model": MODEL, "stream": False, "messages": [{"role": "user", "content": TEXT}]}
    async with client_of(engine, byte_tokenizer(TEMPLATE)) as client:
        assert (await client.post("/api/chat", json=body)).status_code == 200
    assert list(engine.requests[0].token_ids) == [EOS, *b"[a<eos>b]"]


async def test_counts_and_ids_of_chats_are_those_of_the_prompt():
    engine, chat = FakeEngine(), {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
    async with client_of(engine, byte_tokenizer(TEMPLATE)) as client:
        counted = (await client.post("/v1/messages/count_tokens", json=chat)).json()
        tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
    assert (counted["input_tokens"], tokens) == (10, [EOS, *b"[a<eos>b]"])


async def test_prompts_of_completions_have_special_tokens():
    engine = FakeEngine()
    async with client_of(engine, byte_tokenizer()) as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": TEXT, "max_tokens": 2})
    assert list(engine.requests[0].token_ids) == [*b"a", EOS, *b"b"]


STOPS = {
    "/v1/completions": {"prompt": "a", "stop": ["lo<|x|>"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "stop": ["lo<|x|>"]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "stop_sequences": ["lo<|x|>"], "max_tokens": 20},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "options": {"stop": ["lo<|x|>"]}, "stream": False},
}


@pytest.mark.parametrize("path", STOPS)
@pytest.mark.parametrize("group", [1, 3])
async def test_a_stop_string_that_spells_a_special_token_stops(path: str, group: int):
    backend = byte_tokenizer()._backend
    backend.add_special_tokens([tokenizers.AddedToken("<|x|>", special=True, normalized=False)])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=(EOS,), special_tokens={}, chat_template=template)
    engine = FakeEngine("Hello", group=group)
    engine.script = [*b"Hello", tokenizer.token_to_id("<|x|>"), *b" there", EOS]
    async with client_of(engine, tokenizer) as client:
        answer = (await client.post(path, json={"model": MODEL, **STOPS[path]})).text
    assert "Hel" in answer
    assert "Hello" not in answer
    assert "there" not in answer
