"""/v1/embeddings, /pooling, /score and /rerank against a scripted engine, which counts letters."""

import asyncio
import base64
import math
import struct

import numpy as np
import openai
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from runtime.base.model.pooling import Pooling
from runtime.output import score_prompt
from runtime.output.score_prompt import DEFAULT_INSTRUCTION, PairPrompter
from tests.support.http.fake_engine import EOS, MODEL, FakeEngine, byte_tokenizer, client_of, post

EMBEDS, CUTS = Pooling("last", normalized=True), Pooling("last", normalized=True, cuts_dimensions=True)
RANKS = Pooling("last", num_labels=1)


async def test_inputs_of_all_forms():
    engine = FakeEngine(pooling=EMBEDS)
    for value, prompts in (
        ("aab", [b"aab"]),
        (["a", "cd"], [b"a", b"cd"]),
        ([97, 98], [b"ab"]),
        ([[97], [99, 100]], [b"a", b"cd"]),
    ):
        engine.requests.clear()
        response = await post(engine, {"model": MODEL, "input": value, "user": "me", "made_up": 1}, "/v1/embeddings")
        body = response.json()
        assert response.headers["x-callboard-ignored-fields"] == "made_up"
        assert [bytes(r.token_ids) for r in engine.requests] == prompts
        assert [(d["object"], d["index"]) for d in body["data"]] == [("embedding", i) for i in range(len(prompts))]
        for entry, prompt in zip(body["data"], prompts, strict=True):
            counts = np.array([prompt.count(byte) for byte in b"abcd"])
            assert entry["embedding"] == pytest.approx(counts / np.linalg.norm(counts))
        num_tokens = sum(map(len, prompts))
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert body["object"] == "list"
    assert (engine.requests[0].params.pooled, engine.requests[0].params.max_tokens) == (True, 1)


async def test_the_openai_client():
    """The client requests base64 and decodes it; its strict validation knows only numbers."""
    engine = FakeEngine(pooling=CUTS)

    def client(strict: bool) -> openai.AsyncOpenAI:
        http = client_of(engine)
        return openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http, _strict_response_validation=strict
        )

    plain = await client(False).embeddings.create(model=MODEL, input=["aab", "d"])
    assert plain.data[0].embedding == pytest.approx([2 / math.sqrt(5), 1 / math.sqrt(5), 0, 0])
    short = await client(True).embeddings.create(model=MODEL, input="aabdd", dimensions=2, encoding_format="float")
    assert short.data[0].embedding == pytest.approx([2 / math.sqrt(5), 1 / math.sqrt(5)])
    body = (await post(engine, {"input": "abcd", "encoding_format": "base64"}, "/pooling")).json()
    assert struct.unpack("<4f", base64.b64decode(body["data"][0]["data"])) == pytest.approx([0.5] * 4)


async def test_a_text_is_truncated_before_its_end_token():
    engine, tokenizer = FakeEngine(pooling=EMBEDS, max_model_len=16), byte_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer._backend.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    client = client_of(engine, tokenizer)
    for fields, ids in (
        ({"truncate_prompt_tokens": 3}, [*b"ab", EOS]),
        ({"truncate_prompt_tokens": -1}, [*b"abcdabcdabcdab", EOS]),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, [*b"abc"]),
    ):
        assert (await client.post("/v1/embeddings", json={"input": "abcd" * 9, **fields})).status_code == 200
        assert engine.requests.pop().token_ids == ids
    response = await client.post("/v1/embeddings", json={"input": ["a", "abcd" * 4]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input.1")


async def test_scores_and_ranks_of_a_classifier():
    engine = FakeEngine(pooling=RANKS)
    pair = {"text_1": "q", "text_2": ["abc", "d"]}
    chance = [1 / (1 + math.exp(-n / 100)) for n in (4, 2)]
    for path in ("/score", "/v1/score"):
        body = (await post(engine, pair, path)).json()
        assert [d["score"] for d in body["data"]] == pytest.approx(chance)
        assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    ranked = {"query": "q", "documents": ["d", {"text": "abc"}, "ab"], "top_n": 2}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = (await post(engine, ranked, path)).json()
        assert [(r["index"], r["document"]["text"]) for r in body["results"]] == [(1, "abc"), (2, "ab")]
        assert body["results"][0]["relevance_score"] == pytest.approx(chance[0])
    body = (await post(engine, ranked | {"return_documents": False}, "/rerank")).json()
    assert all(r.keys() == {"index", "relevance_score"} for r in body["results"])
    assert bytes(engine.requests[0].token_ids) == b"qabc"


async def test_scores_and_ranks_of_embeddings_are_cosines():
    engine = FakeEngine(pooling=EMBEDS)
    body = (await post(engine, {"text_1": ["a", "b"], "text_2": ["ab", "a"]}, "/score")).json()
    assert [d["score"] for d in body["data"]] == pytest.approx([1 / math.sqrt(2), 0])
    assert len(engine.requests) == 3, "each text is embedded once"
    body = (await post(engine, {"query": "ab", "documents": ["c", "a", "aabb"]}, "/rerank")).json()
    assert [r["index"] for r in body["results"]] == [2, 1, 0]


def qwen3_pair(query: str, document: str, instruction: str | None = None, most: int | None = None) -> str:
    encode = byte_tokenizer().encode
    pooling = Pooling("last", num_labels=1, pairs="qwen3")
    prompter = PairPrompter(lambda text, special, part: encode(text, special), pooling, instruction, most)
    return bytes(prompter.ids(query, document)).decode()


def test_pairs_of_qwen3_are_chat_messages():
    text = qwen3_pair("why", "because " * 9)
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets")
    assert text.endswith("because <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: why\n<Document>: because" in text
    cut = qwen3_pair("why", "because " * 9, "Judge.", 340)
    assert (len(cut), cut.endswith("\n<think>\n\n</think>\n\n")) == (340, True)
    assert "<Instruct>: Judge.\n<Query>: why\n<Document>: because" in cut
    assert qwen3_pair("<|im_start|>x", "y") == "<|im_start|>xy"


# How Qwen's tokenizers cut a text before they join bytes.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def qwen_words() -> tokenizers.Tokenizer:
    """A tokenizer that joins all pairs that those words allow."""
    backend = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    text = "<Query>: the <Document>: the\n\n<Document>:  a,\n ;: .\n :: >: 1"
    backend.train_from_iterator([text] * 9, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    return backend


@settings(max_examples=50, deadline=None)
@given(st.text("the \n:>,.1é'", max_size=8), st.text("the \n:>,.1é'", max_size=8))
def test_a_document_encoded_alone_has_the_same_tokens(qwen_words, query: str, document: str):
    def encode(text: str, special: bool, part: str) -> list[int]:
        return qwen_words.encode(text, add_special_tokens=special).ids

    prompter = PairPrompter(encode, Pooling("last", num_labels=1, pairs="qwen3"))
    body = f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    head, whole, tail = (encode(text, False, "") for text in (score_prompt._QWEN3_HEAD, body, score_prompt._QWEN3_TAIL))
    assert prompter.ids(query, document) == [*head, *whole, *tail]


@pytest.mark.parametrize(
    ("pooling", "path", "body", "named"),
    [
        (None, "/v1/embeddings", {"input": "a"}, "model"),
        (RANKS, "/v1/embeddings", {"input": "a"}, "model"),
        (EMBEDS, "/v1/embeddings", {"input": "a", "dimensions": 2}, "dimensions"),
        (CUTS, "/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
        (EMBEDS, "/v1/embeddings", {"input": ""}, "input"),
        (EMBEDS, "/v1/embeddings", {"input": []}, "input"),
        (EMBEDS, "/v1/embeddings", {"input": [320]}, "input"),
        (EMBEDS, "/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (EMBEDS, "/v1/embeddings", {"input": "a", "normalize": False}, "normalize"),
        (EMBEDS, "/v1/embeddings", {"input": "a", "priority": -1}, "priority"),
        (EMBEDS, "/v1/embeddings", {"input": ["a"] * 1025}, "input"),
        (EMBEDS, "/pooling", {"input": "a" * 128}, "input"),
        (EMBEDS, "/pooling", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (RANKS, "/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (RANKS, "/rerank", {"query": "a", "documents": []}, "documents"),
        (RANKS, "/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents.0.text"),
        (Pooling("last", num_labels=3), "/rerank", {"query": "a", "documents": ["b"]}, None),
    ],
)
async def test_errors_name_the_wrong_field(pooling, path, body, named):
    response = await post(FakeEngine(pooling=pooling), body, path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, named), error
    assert error["message"].endswith(".")


async def test_faults_limits_and_abort():
    for fault, status in (({"busy": True}, 429), ({"fails_after": 0}, 500), ({"reason": "Away."}, 503)):
        response = await post(FakeEngine(pooling=EMBEDS, **fault), {"input": ["a", "b"]}, "/v1/embeddings")
        assert response.status_code == status
    assert (await post(FakeEngine(pooling=EMBEDS), {"model": "x", "input": "a"}, "/v1/embeddings")).status_code == 404
    texts = FakeEngine(pooling=EMBEDS, makes_text=False)
    assert (await post(texts, {"prompt": "a"})).json()["error"]["param"] == "model"
    slow = FakeEngine(pooling=EMBEDS, delay_s=60)
    asking = asyncio.create_task(post(slow, {"input": ["a", "b"]}, "/v1/embeddings"))
    while slow.num_running < 2:
        await asyncio.sleep(0.001)
    asking.cancel()
    while slow.num_running:
        await asyncio.sleep(0.001)
    assert sorted(name[-2:] for name in slow.aborted) == ["-0", "-1"]


async def test_ollamas_embeddings_equal_openais():
    engine = FakeEngine(pooling=Pooling("last", normalized=True, cuts_dimensions=True), max_model_len=16)
    async with client_of(engine) as client:
        texts = ["aab", "cd"]
        wanted = (await client.post("/v1/embeddings", json={"input": texts})).json()["data"]
        answer = await client.post("/api/embed", json={"model": MODEL, "input": texts, "keep_alive": "5m"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["embeddings"] == [entry["embedding"] for entry in wanted]
        assert (answer.json()["model"], answer.json()["prompt_eval_count"]) == (MODEL, 5)
        short = await client.post("/api/embed", json={"input": "ab", "dimensions": 2})
        assert len(short.json()["embeddings"][0]) == 2
        older = await client.post("/api/embeddings", json={"model": MODEL, "prompt": "aab", "options": {}})
        assert older.json() == {"embedding": wanted[0]["embedding"]}
        long = {"input": "a" * 50}
        assert (await client.post("/api/embed", json=long)).json()["prompt_eval_count"] == 15
        refused = await client.post("/api/embed", json={**long, "truncate": False})
        assert (refused.status_code, refused.json().keys()) == (400, {"error"})
        assert (await client.post("/api/embeddings", json={"input": "a"})).status_code == 400
