"""The cost of a long text before it is refused or truncated, and the requests that wait for it."""

import threading
import time

import pytest

from runtime.base.model.pooling import Pooling
from runtime.text.tokenizer import Tokenizer
from serve_app.protocol.prompt_ids import prompt_ids
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, chat, client_of, post


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The lengths of all texts that are encoded in the test."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def noted(self, text: str, *args, **kwargs):
        lengths.append(len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    return lengths


LONG = "word " * 400_000


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt.1"),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": LONG}]), "messages"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", chat(messages=[{"role": "user", "content": LONG}]), "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_unencoded(encoded, path: str, body: dict, where: str):
    response = await post(FakeEngine(), body, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", where)
    assert "maximum context length is 128 tokens" in error["message"]
    assert sum(encoded) < 100_000


async def test_a_truncated_text_is_encoded_only_at_its_end(encoded):
    engine = FakeEngine()
    assert (await post(engine, {"prompt": LONG + "end", "truncate_prompt_tokens": 5})).status_code == 200
    assert engine.requests[0].token_ids == list(b"d end")
    assert sum(encoded) < 100_000


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
@pytest.mark.parametrize("pairs", ["plain", "qwen3"])
async def test_query_is_encoded_once_and_not_to_its_end(encoded, path: str, pairs: str):
    engine = FakeEngine(pooling=Pooling("last", num_labels=1, pairs=pairs), max_model_len=1000)
    texts = {"query": LONG, "documents": ["a"] * 20} if "rerank" in path else {"text_1": LONG, "text_2": ["a"] * 20}
    assert (await post(engine, texts | {"truncate_prompt_tokens": -1}, path)).status_code == 200
    assert [len(request.token_ids) for request in engine.requests] == [999] * 20
    assert len([n for n in encoded if n > 1000]) == 1
    assert sum(encoded) < 100_000
    encoded.clear()
    response = await post(engine, texts, path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(texts)))
    assert sum(encoded) < 100_000


async def test_pairs_stop_at_too_many_tokens(encoded):
    engine = FakeEngine(pooling=Pooling("last", num_labels=1), max_model_len=131_072)
    body = {"query": "word " * 100_000, "documents": ["a"] * 1000, "truncate_prompt_tokens": -1}
    response = await post(engine, body, "/v1/rerank")
    assert (response.status_code, engine.requests) == (400, [])
    assert "over 4000000 tokens" in response.json()["error"]["message"]
    assert len(encoded) < 40


@pytest.mark.parametrize("kept", [None, "start", "end"])
def test_a_sparse_text_is_encoded_to_its_end(kept: str | None):
    """Tokens of many characters, as a vocabulary's runs of spaces."""
    tokenizer = byte_tokenizer()
    mark = "<" + "=" * 200 + ">"
    tokenizer._backend.add_special_tokens([mark])
    text = mark * 1000
    for limit in (100, 1000):
        assert prompt_ids(tokenizer.encode, text, True, limit, "prompt", kept) == tokenizer.encode(text)


def test_encoding_does_not_block_other_threads():
    tokenizer, num_turns = byte_tokenizer(), 0
    for work in (tokenizer.encode, tokenizer.offsets):
        thread = threading.Thread(target=work, args=("some words to encode " * 100_000,))
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)
            num_turns += 1
        assert num_turns > 20
        num_turns = 0


async def test_detokenize_limits_the_number_of_ids():
    async with client_of(FakeEngine()) as client:
        response = await client.post("/detokenize", json={"tokens": [1] * ((1 << 20) + 1)})
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]
